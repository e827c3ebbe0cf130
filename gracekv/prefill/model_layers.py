"""What each decoder layer of a model is, and how it rotates its keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gracekv.rope import Rope

Rotation = Literal["halves", "one_half", "interleaved", "interleaved_table", "none"]
"""How cos and sin, as a model passes them to its attention, rotate features.

- "halves": features i and i + d_rot/2, from a table whose halves are alike (most models).
- "one_half": the same, from one half of that table (GPT-OSS).
- "interleaved": features 2i and 2i + 1, from a table whose halves are alike (GLM-4).
- "interleaved_table": the same, from a table whose neighbours are alike (Cohere).
- "none": the layer has no RoPE (some of SmolLM3).
"""

ROTATIONS: tuple[Rotation, ...] = (
    "halves", "one_half", "interleaved", "interleaved_table", "none",
)  # fmt: skip

_INTERLEAVED, _ONE_HALF = frozenset({"glm4"}), frozenset({"gpt_oss"})
# Families whose layers with full attention have no RoPE, while those that slide do.
_ONLY_SLIDING_ROTATES = frozenset({"cohere2"})

# What the self-check found for families that are not listed.
_found: WeakKeyDictionary[Any, Mapping[int, Rotation]] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class ModelLayer:
    """One decoder layer.

    Attributes:
        number: 0-based, in the model.
        kind: as transformers names it: "full_attention", "sliding_attention" and so on.
        window: tokens that a sliding layer sees; None for others.
        rotation: of its keys and queries.
    """

    number: int
    kind: str
    window: int | None
    rotation: Rotation

    @property
    def is_linear(self) -> bool:
        """Whether it holds states in place of keys and values."""
        return self.kind == "linear_attention"


def model_layers(model: Any) -> tuple[ModelLayer, ...]:
    """All decoder layers of `model`."""
    modules, config = model.get_decoder().layers, text_config(model)
    window = getattr(config, "sliding_window", None)
    return tuple(
        ModelLayer(
            number,
            kind,
            window if kind == "sliding_attention" else None,
            _rotation(model, number, layer),
        )
        for number, (layer, kind) in enumerate(zip(modules, layer_kinds(config), strict=True))
    )


def compressed_layers(model: Any) -> tuple[ModelLayer, ...]:
    """The layers that are compressed: those with full attention.

    Where all slide, all of them: up to their window they are as layers with full attention.
    """
    layers = model_layers(model)
    return tuple(layer for layer in layers if layer.kind == "full_attention") or layers


def kept_layers(model: Any) -> tuple[ModelLayer, ...]:
    """The other layers, whose cache stays as it is."""
    compressed = compressed_layers(model)
    return tuple(layer for layer in model_layers(model) if layer not in compressed)


def text_config(model: Any) -> Any:
    """The config of the model's decoder."""
    return model.config.get_text_config(decoder=True)


def rope_parameters(model: Any) -> Any:
    """The config's RoPE parameters; where kinds of layers have their own, those of full ones."""
    parameters = getattr(text_config(model), "rope_parameters", None)
    if isinstance(parameters, dict) and isinstance(parameters.get("full_attention"), dict):
        return parameters["full_attention"]
    return parameters


def layer_kinds(config: Any) -> list[str]:
    """What each layer is, as transformers names it."""
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return list(kinds)
    kind = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    return [kind] * config.num_hidden_layers


def rotation_kind(model: Any) -> tuple[str, ...]:
    """What `rotary_emb` takes beside positions where kinds of layers have their own RoPE."""
    own = rope_parameters(model) is not getattr(text_config(model), "rope_parameters", None)
    return ("full_attention",) if own else ()


def remember_rotations(model: Any, found: Mapping[int, Rotation]) -> None:
    """Use these rotations, by layer, for `model` from now on."""
    _found[model] = dict(found)


def _rotation(model: Any, number: int, layer: Any) -> Rotation:
    if model in _found:
        return _found[model].get(number, "none")
    attention, family = getattr(layer, "self_attn", None), text_config(model).model_type
    if not getattr(attention, "use_rope", True):
        return "none"
    if family in _ONLY_SLIDING_ROTATES and not getattr(attention, "sliding_window", None):
        return "none"
    if family in _ONE_HALF:
        return "one_half"
    return "interleaved" if family in _INTERLEAVED else "halves"


def rope_of_table(cos: Tensor, sin: Tensor, rotation: Rotation) -> Rope:
    """The `Rope` of cos and sin [T, n] as the model passes them to a layer of this rotation."""
    if rotation == "none":
        return Rope.none(len(cos), cos.device)
    if rotation == "one_half":
        cos, sin = (torch.cat([x, x], dim=-1) for x in (cos, sin))
    elif rotation == "interleaved_table":
        cos, sin = (torch.cat([x[:, ::2]] * 2, dim=-1) for x in (cos, sin))
    return Rope(cos, sin, rotation.startswith("interleaved"))


def table_of_rope(rope: Rope, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """The inverse of `rope_of_table`: cos and sin [T, n] as the model expects them."""
    half = rope.cos.shape[1] // 2
    cos, sin = rope.cos, rope.sin
    if rotation == "one_half":
        cos, sin = cos[:, :half], sin[:, :half]
    elif rotation == "interleaved_table":
        cos, sin = (x[:, :half].repeat_interleave(2, dim=-1) for x in (cos, sin))
    return cos, sin


def rotating(layers: Sequence[ModelLayer]) -> Rotation:
    """How those of `layers` rotate that do; "none" if none does."""
    return next((layer.rotation for layer in layers if layer.rotation != "none"), "none")
