"""`ServedModel`: the config, layers and rotations of the model that vLLM serves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gracekv.errors import UnsupportedModelError
from gracekv.kernels.rope import Rope
from gracekv.prefill.model_layers import model_layers, rotations_up_to
from gracekv.prefill.supported import TESTED_MODEL_TYPES, check_model
from gracekv.vllm.exporting import check_served
from gracekv.vllm.model_facts import config_facts


@dataclass(frozen=True, slots=True, eq=False)
class ServedModel:
    """The transformers model of the config that vLLM serves, without weights.

    Attributes:
        model: on the device "meta", except for its rotations.
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
        if parallel.world_size_across_dp > ranks or heads % ranks:
            raise UnsupportedModelError(
                f"This engine runs {heads} KV heads in {parallel.world_size_across_dp} processes, "
                f"of which {ranks} share one model. Serve with tensor parallelism alone, of a size "
                f"that divides the KV heads, or compress with transformers and export."
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

    @property
    def layers(self) -> int:
        """L, the number of layers."""
        return len(model_layers(self.model))

    def rope(self, length: int, device: torch.device, places: int = 0) -> Rope:
        """The rotations of positions 0..length - 1 after `places` rows of position 0."""
        ropes = rotations_up_to(self.model, length - 1)
        rope = next((x for n, x in enumerate(ropes) if n not in self.unrotated()), ropes[0])
        at = torch.arange(-places, length).clamp(min=0)
        return Rope(rope.cos[at].to(device), rope.sin[at].to(device), rope.interleaved)

    def unrotated(self) -> frozenset[int]:
        """Layers without RoPE."""
        layers = enumerate(model_layers(self.model))
        return frozenset(number for number, layer in layers if layer.rotation == "none")
