"""`ServedModel`: the config, layers and rotations of the model that vLLM serves.

Its facts must match those of the model that made a context; `gracekv.prefill.fingerprint` compares
them. Unlike that module's `fingerprint`, they can be read from a checkpoint, without a model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gracekv.errors import UnsupportedModelError
from gracekv.kernels.rope import Rope
from gracekv.prefill.fingerprint import active_adapters, sampled_digest
from gracekv.prefill.length_limits import sliding_window, switch_point
from gracekv.prefill.model_layers import (
    model_layers,
    other_layers,
    rope_parameters,
    rotations_up_to,
)
from gracekv.prefill.supported import TESTED_MODEL_TYPES, check_model

_SIZES = {
    "hidden_size": "hidden_size",
    "layers": "num_hidden_layers",
    "query_heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "vocabulary": "vocab_size",
}
# Parts of a weight's name that occur only in the model, or only in its checkpoint.
_WRAPPERS = {"model", "language_model", "base_layer"}


def config_facts(config: Any, dtype: torch.dtype) -> dict[str, Any]:
    """Family, sizes, RoPE, dtype and quantisation, from a config of transformers or vLLM."""
    sizes = {name: getattr(config, field, None) for name, field in _SIZES.items()}
    sizes["kv_heads"] = sizes["kv_heads"] or sizes["query_heads"]
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    return {
        "family": config.model_type,
        **sizes,
        "head_dim": dim,
        "rope": {name: value for name, value in sorted(rope.items()) if value is not None},
        "dtype": str(dtype).removeprefix("torch."),
        "quantised": getattr(config, "quantization_config", None) is not None,
    }


def model_facts(model: Any) -> dict[str, Any]:
    """`config_facts` of a transformers model, with a digest of each weight (a sample of elements).

    Weights that are quantised or offloaded have no digest.
    """
    facts = config_facts(model.config.get_text_config(), model.dtype)
    weights = model.named_parameters()
    plain = ((n, x) for n, x in weights if type(x.detach()) is Tensor and x.device.type != "meta")
    return facts | {"weights": None if facts["quantised"] else _digests(plain, model.dtype)}


def checkpoint_digests(folder: Path, dtype: torch.dtype) -> dict[str, str] | None:
    """The weights of `model_facts` from a folder of safetensors files; None if it has none."""
    from safetensors import SafetensorError, safe_open

    digests: dict[str, str] = {}
    try:
        index = folder / "model.safetensors.index.json"
        homes = {"model.safetensors"}
        if index.is_file():
            homes = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        for home in sorted(homes):
            with safe_open(folder / home, "pt") as file:
                weights = ((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
                digests |= _digests(weights, dtype)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return digests


def _digests(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> dict[str, str]:
    """Digests of each weight's shape and sampled elements in `dtype`, by the weight's name."""
    digests = {}
    for name, weight in weights:
        place = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
        digests[place] = sampled_digest([(place, weight)], dtype=dtype)
    return digests


@dataclass(frozen=True, slots=True, eq=False)
class ServedModel:
    """The transformers model for the config that vLLM serves, without weights.

    Attributes:
        model: the model, on the device "meta" except for its rotations.
        ranks: number of workers that share its KV heads.
    """

    model: Any
    ranks: int

    @classmethod
    def of(cls, vllm_config: Any) -> ServedModel:
        """From vLLM's config; `UnsupportedModelError` if such an engine cannot compress."""
        from transformers import AutoModelForCausalLM

        served, parallel = vllm_config.model_config, vllm_config.parallel_config
        config = served.hf_text_config
        ranks, heads = parallel.tensor_parallel_size, config_facts(config, served.dtype)["kv_heads"]
        # Each front knows only the contexts that were made through it.
        fronts = getattr(parallel, "_api_process_count", 1)
        if parallel.world_size_across_dp > ranks or heads % ranks or fronts > 1:
            raise UnsupportedModelError(
                f"This engine runs {heads} KV heads in {parallel.world_size_across_dp} processes, "
                f"of which {ranks} share one model, behind {fronts} API servers. Serve with tensor "
                f"parallelism alone, of a size that divides the KV heads, and one API server, or "
                f"compress with transformers and export."
            )
        if config.model_type not in TESTED_MODEL_TYPES:
            raise UnsupportedModelError(
                f"Models of the family {config.model_type!r} are not tested inside vLLM. Compress "
                f"with transformers, which tests the model first, and export."
            )
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=served.dtype).eval()
        decoder = model.get_decoder()
        if getattr(decoder, "rotary_emb", None) is not None:
            decoder.rotary_emb = type(decoder.rotary_emb)(config=config)
        check_model(model)
        check_served(model)
        return cls(model, ranks)

    def rope(self, length: int, device: torch.device, places: int = 0) -> Rope:
        """The rotations of positions 0..length - 1 after `places` rows of position 0."""
        ropes = rotations_up_to(self.model, length - 1)
        pairs = zip(model_layers(self.model), ropes, strict=True)
        rope = next((x for layer, x in pairs if layer.rotation != "none"), ropes[0])
        at = torch.arange(-places, length).clamp(min=0)
        return Rope(rope.cos[at].to(device), rope.sin[at].to(device), rope.interleaved)


def check_served(model: Any) -> None:
    """Raise `UnsupportedModelError` if vLLM would not attend to entries as this model does."""
    others, adapters = other_layers(model), active_adapters(model)
    rope, window = rope_parameters(model), sliding_window(model)
    changing = rope.get("rope_type") in ("dynamic", "longrope") or switch_point(model) is not None
    cap = getattr(model.config, "attn_logit_softcapping", None)
    obstacles = [
        others and f"layer {others[0].number} is of kind {others[0].kind}",
        adapters and f"it has the adapters {', '.join(adapters)}, which are not in its weights",
        "mrope_section" in rope and "it also numbers rows and columns of images",
        rope.get("llama_4_scaling_beta") and "it scales its queries by their positions",
        changing and f"its RoPE {rope.get('rope_type')!r} depends on the sequence's length",
        cap is not None and f"it caps its attention logits at {cap}",
        window is not None and f"its layers have a sliding window of {window} tokens",
    ]
    if found := [text for text in obstacles if text]:
        raise UnsupportedModelError(
            f"vLLM cannot serve contexts of {type(model).__name__}: {'; '.join(map(str, found))}. "
            f"Serve a text model with full attention in every layer, RoPE of type default, linear, "
            f"llama3 or yarn, and no cap on logits; merge adapters into the weights first. Every "
            f"recipe works with it."
        )
