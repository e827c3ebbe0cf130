"""The kinds of a model's decoder layers, and how each rotates its keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gracekv.errors import UnsupportedModelError
from gracekv.kernels.rope import Rope
from gracekv.prefill.layer_state import WITH_STATES

Rotation = Literal["halves", "one_half", "interleaved", "interleaved_table", "none"]
"""How the cos and sin that a model passes to its attention rotate features.

- "halves": features i and i + d_rot/2, from a table whose halves are equal (most models).
- "one_half": the same, from one half of that table (GPT-OSS).
- "interleaved": features 2i and 2i + 1, from a table whose halves are equal (GLM-4).
- "interleaved_table": the same, from a table whose neighbours are equal (Cohere).
- "none": the layer has no RoPE (some of SmolLM3, all of Nemotron-H).
"""

ROTATIONS: tuple[Rotation, ...] = get_args(Rotation)

COMPRESSED = ("full_attention", "hybrid")
"""Kinds of layers, as transformers names them, whose keys and values are compressed. A hybrid layer
also has states."""

_INTERLEAVED, _ONE_HALF = frozenset({"glm4"}), frozenset({"gpt_oss"})
# Families in which only sliding layers have RoPE, not those with full attention.
_ONLY_SLIDING_ROTATES = frozenset({"cohere2"})
# Families that multiply by `logits_scaling`; others divide.
_MULTIPLIES = frozenset({"hyperclovax"})

CHECKED: WeakKeyDictionary[Any, Mapping[int, Rotation]] = WeakKeyDictionary()
"""Models that passed the self-check, and the rotations by layer that it found."""


@dataclass(frozen=True, slots=True)
class ModelLayer:
    """One decoder layer.

    Attributes:
        number: 0-based, in the model.
        kind: as transformers names it: "full_attention", "sliding_attention" and so on.
        window: size of a sliding layer's window in tokens, or None.
        rotation: how its keys and queries are rotated.
    """

    number: int
    kind: str
    window: int | None
    rotation: Rotation

    @property
    def has_states(self) -> bool:
        """Whether it holds states of fixed size, with or without keys and values."""
        return self.kind in WITH_STATES

    @property
    def has_attention(self) -> bool:
        """Whether it has keys and values."""
        return self.kind in (*COMPRESSED, "sliding_attention")


def model_layers(model: Any) -> tuple[ModelLayer, ...]:
    """All decoder layers of `model`."""
    modules, config = model.get_decoder().layers, text_config(model)
    window, family = getattr(config, "sliding_window", None), config.model_type
    kinds, rope = CHECKED.get(model), has_rope(model)
    out = []
    for number, (layer, kind) in enumerate(zip(modules, layer_kinds(config), strict=True)):
        turn = kinds.get(number, "none") if kinds is not None else _rotation(family, rope, layer)
        out.append(ModelLayer(number, kind, window if kind == "sliding_attention" else None, turn))
    return tuple(out)


def compressed_layers(model: Any) -> tuple[ModelLayer, ...]:
    """The layers that are compressed: those with full attention.

    If all layers slide, all of them: up to their window they act like full attention.
    """
    layers = model_layers(model)
    return tuple(layer for layer in layers if layer.kind in COMPRESSED) or layers


def other_layers(model: Any) -> tuple[ModelLayer, ...]:
    """The layers that are not compressed, and hybrid ones, whose states are not."""
    layers, compressed = model_layers(model), compressed_layers(model)
    return tuple(layer for layer in layers if layer.has_states or layer not in compressed)


def text_config(model: Any) -> Any:
    """The config of the model's decoder."""
    return model.config.get_text_config(decoder=True)


def embeddings(model: Any) -> Any:
    """The model's embeddings, below peft adapters, which do not expose their sizes."""
    module = model.get_input_embeddings()
    for name in ("original_module", "base_layer"):
        module = getattr(module, name, module)
    return module


def own_decoder(model: Any) -> Any:
    """The decoder inside all wrappers; its attention is replaced, not that of image encoders."""
    decoder = model.get_decoder()
    return getattr(decoder, "_orig_mod", decoder)


def input_device(model: Any) -> torch.device:
    """The device on which the model expects its token ids."""
    # Quantised embeddings may recreate their weight on every access.
    device = next(embeddings(model).parameters()).device
    # Weights offloaded by accelerate are on "meta" between calls; its hooks move the ids.
    return torch.device("cpu") if device.type == "meta" else device


def final_logits(model: Any) -> tuple[float, float | None]:
    """The factor of the logits and the softcap after it, or None."""
    config = text_config(model)
    scale = getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None)
    factor, divisor = float(scale or 1.0), float(getattr(config, "logits_scaling", None) or 1.0)
    factor = factor * divisor if config.model_type in _MULTIPLIES else factor / divisor
    return factor, getattr(config, "final_logit_softcapping", None)


def head_sizes(model: Any) -> tuple[int, int, int]:
    """H, G and d of the compressed layers.

    Raises `UnsupportedModelError` if they differ from one another.
    """
    config, layers = text_config(model), compressed_layers(model)
    configs = [config]
    if getattr(config, "is_heterogeneous", False):
        configs = [config.per_layer_config[layer.number] for layer in layers]
    sizes = []
    for conf in configs:
        heads = conf.num_attention_heads
        groups = getattr(conf, "num_key_value_heads", None) or heads
        sizes.append((heads, groups, getattr(conf, "head_dim", None) or conf.hidden_size // heads))
    if (other := next((i for i, size in enumerate(sizes) if size != sizes[0]), None)) is not None:
        raise UnsupportedModelError(
            f"Layers {layers[0].number} and {layers[other].number} of {type(model).__name__} have "
            f"{sizes[0]} and {sizes[other]} query heads, KV heads and features per head; gracekv "
            f"compresses layers of one size only."
        )
    return sizes[0]


def cache_dtype(model: Any) -> torch.dtype:
    """The dtype of keys and values: the model's, or the active one of autocast.

    A model with quantised embeddings has their output dtype; its first parameter may be a scale.
    """
    dtype: torch.dtype = getattr(embeddings(model), "output_dtype", None) or model.dtype
    # Offloaded weights are on "meta" between calls.
    device = "cpu" if model.device.type == "meta" else model.device.type
    # Autocast does not change float64.
    casts = dtype != torch.float64 and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if casts else dtype


def rope_parameters(model: Any) -> Mapping[str, Any]:
    """The config's RoPE parameters; if layer kinds have their own, those of full attention.

    Empty if it has none.
    """
    parameters: Any = getattr(text_config(model), "rope_parameters", None)
    for kind in rotation_kind(model):
        parameters = parameters[kind]
    return parameters if isinstance(parameters, dict) and "rope_type" in parameters else {}


def layer_kinds(config: Any) -> list[str]:
    """The kind of each layer, as transformers names it."""
    if kinds := getattr(config, "layer_types", None):
        return list(kinds)
    kind = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    return [kind] * config.num_hidden_layers


def rotation_kind(model: Any) -> tuple[str, ...]:
    """The last argument of the rotary module if layer kinds have their own RoPE."""
    parameters = getattr(text_config(model), "rope_parameters", None) or {}
    return tuple(kind for kind in COMPRESSED if isinstance(parameters.get(kind), dict))[:1]


def attention_module(layer: Any) -> Any:
    """The attention module of a decoder layer, by the names of most families, or None."""
    # Compiled modules have no truth value.
    attention = getattr(layer, "self_attn", None)
    return getattr(layer, "mixer", None) if attention is None else attention


def output_projection(attention: Any) -> Any:
    """The linear layer after an attention module's heads, or None if it is not found."""
    projection = getattr(attention, "o_proj", None)
    return getattr(attention, "out_proj", None) if projection is None else projection


def rotary_module(decoder: Any) -> Any:
    """The module that computes rotations for the decoder's layers, or None."""
    return getattr(decoder, "rotary_emb", getattr(decoder, "pos_emb", None))


def has_rope(model: Any) -> bool:
    """Whether the decoder computes rotations for its layers."""
    return rotary_module(model.get_decoder()) is not None


def runs_in_parts(model: Any) -> bool:
    """Whether a prompt can be run in parts: with RoPE, or where the decoder rotates nothing."""
    return has_rope(model) or rotating(model_layers(model)) == "none"


def rotation_table(model: Any, like: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [1, T, n] of places [1, T], with the dtype and device of `like`."""
    at, kind = rotary_positions(model, places), rotation_kind(model)
    made: tuple[Tensor, Tensor] = rotary_module(model.get_decoder())(like, at, *kind)
    return made


def rotary_positions(model: Any, places: Tensor) -> Tensor:
    """Positions [1, T] in the form that the model's rotary module takes.

    Models that also read images take [3, 1, T], with rows and columns; for text all three are
    equal.
    """
    return places.expand(3, 1, -1) if "mrope_section" in rope_parameters(model) else places


def rotations_up_to(model: Any, last: int, step: int = 1) -> list[Rope]:
    """The rotations of positions 0, `step`, ... up to `last` for each compressed layer.

    The model's weights may be on the device "meta".
    """
    layers = compressed_layers(model)
    if not has_rope(model):
        return [Rope.none(last // step + 1) for _ in layers]
    device = next(rotary_module(model.get_decoder()).buffers()).device
    like = torch.zeros((), device=device, dtype=torch.float32)
    made = rotation_table(model, like, torch.arange(0, last + 1, step, device=device)[None])
    cos, sin = (x[0].float() for x in made)
    return [rope_of_table(cos, sin, layer.rotation) for layer in layers]


def _rotation(family: str, rope: bool, layer: Any) -> Rotation:
    attention = attention_module(layer)
    still = family in _ONLY_SLIDING_ROTATES and not getattr(attention, "sliding_window", None)
    if not rope or not getattr(attention, "use_rope", True) or still:
        return "none"
    if family in _ONE_HALF:
        return "one_half"
    return "interleaved" if family in _INTERLEAVED else "halves"


def rope_of_table(cos: Tensor, sin: Tensor, rotation: Rotation) -> Rope:
    """The `Rope` from the cos and sin [T, n] that the model passes to a layer of this rotation."""
    if rotation == "none":
        return Rope.none(len(cos), cos.device)
    if rotation == "one_half":
        cos, sin = (torch.cat([x, x], dim=-1) for x in (cos, sin))
    elif rotation == "interleaved_table":
        cos, sin = (torch.cat([x[:, ::2]] * 2, dim=-1) for x in (cos, sin))
    return Rope(cos, sin, rotation.startswith("interleaved"))


def table_of_rope(rope: Rope, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """The inverse of `rope_of_table`: the cos and sin [T, n] that the model expects."""
    half = rope.cos.shape[1] // 2
    cos, sin = rope.cos, rope.sin
    if rotation == "one_half":
        cos, sin = cos[:, :half], sin[:, :half]
    elif rotation == "interleaved_table":
        cos, sin = (x[:, :half].repeat_interleave(2, dim=-1) for x in (cos, sin))
    return cos, sin


def rotating(layers: Sequence[ModelLayer]) -> Rotation:
    """The rotation of those `layers` that have one, else "none"."""
    return next((layer.rotation for layer in layers if layer.rotation != "none"), "none")
