"""Facts that must agree between the model that made a context and the model that vLLM serves.

`gracekv.prefill.fingerprint` compares them; unlike its `fingerprint` they can be read from a
checkpoint, without a model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gracekv.prefill.fingerprint import sampled_digest

_SIZES = {
    "hidden_size": "hidden_size",
    "layers": "num_hidden_layers",
    "query_heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "vocabulary": "vocab_size",
}
# Parts of a weight's name that only the model has, or only its checkpoint.
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
    plain = (
        (name, weight)
        for name, weight in model.named_parameters()
        if type(weight.detach()) is Tensor and weight.device.type != "meta"
    )
    return facts | {"weights": None if facts["quantised"] else _digests(plain, model.dtype)}


def checkpoint_digests(folder: Path, dtype: torch.dtype) -> dict[str, str] | None:
    """The weights of `model_facts` from a folder of safetensors files, or None without any."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, str] = {}
    try:
        index = folder / "model.safetensors.index.json"
        homes = {"model.safetensors"}
        if index.is_file():
            homes = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        for home in sorted(homes):
            with safe_open(folder / home, "pt") as file:
                weights = ((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
                found |= _digests(weights, dtype)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return found


def _digests(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> dict[str, str]:
    """Digests of each weight's shape and sampled elements in `dtype`, by the weight's name."""
    found = {}
    for name, weight in weights:
        place = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
        found[place] = sampled_digest([(place, weight)], dtype=dtype)
    return found
