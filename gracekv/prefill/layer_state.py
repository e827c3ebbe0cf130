"""`LayerState`: the state of an uncompressed layer, as in a stock cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from gracekv.errors import ShapeError

WITH_STATES = frozenset({"linear_attention", "conv", "hybrid"})
"""Kinds of layers with states of fixed size, by transformers' names."""

WITHOUT_CACHE = frozenset({"mlp", "moe"})
"""Kinds of layers without a cache."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerState:
    """The state of one decoder layer after some tokens of S sequences.

    Attributes:
        number: 0-based number of the layer in the model.
        kind: transformers' name of its kind, such as "sliding_attention".
        window: size of a sliding window, in tokens; None for other layers.
        tensors: "keys" and "values" [S, G, n, d] of the last n <= window - 1 tokens for a sliding
            layer; "conv" [S, C, k], the last inputs of its convolution, "recurrent" [S, heads, d_k,
            d_v], [S, C, d_v] or [S, C], or both for a layer with states; empty for a layer without
            cache.

    Raises:
        ShapeError: the tensors' shapes do not match.
    """

    number: int
    kind: str
    window: int | None
    tensors: Mapping[str, Tensor]

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Itself, tensors included: states are never written to, so forks of a cache share them."""
        memo.update({id(x): x for x in self.tensors.values()})
        return self

    def __post_init__(self) -> None:
        shapes = {name: list(x.shape) for name, x in self.tensors.items()}
        if self.window is not None:
            fits = shapes.keys() == {"keys", "values"} and shapes["keys"] == shapes["values"]
            fits = fits and len(shapes["keys"]) == 4
        elif self.kind in WITHOUT_CACHE:
            fits = not shapes
        else:
            axes = {"conv": (3,), "recurrent": (2, 3, 4)}
            fits = bool(shapes) and shapes.keys() <= axes.keys()
            fits = fits and all(len(shape) in axes[name] for name, shape in shapes.items())
        if not fits or len({len(x) for x in self.tensors.values()}) > 1:
            raise ShapeError(
                f"LayerState takes tensors of the same S sequences: keys and values [S, G, n, d] "
                f"for a sliding layer, conv [S, C, k] or recurrent [S, heads, d_k, d_v], [S, C, "
                f"d_v] or [S, C] for others; layer {self.number}, {self.kind}, has {shapes}."
            )

    @property
    def beside_entries(self) -> bool:
        """Whether the layer also has keys and values, which are compressed."""
        return self.kind == "hybrid"

    @property
    def bytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(x.numel() * x.element_size() for x in self.tensors.values())

    def to(self, device: torch.device) -> Self:
        """A copy on `device`."""
        return replace(self, tensors={name: x.to(device) for name, x in self.tensors.items()})

    def sequence(self, s: int, length: int) -> Self:
        """Views of sequence s, which covers `length` tokens."""
        tensors = {name: x[s : s + 1] for name, x in self.tensors.items()}
        if self.window is not None:
            # Shorter sequences are padded on the left.
            most = min(length, self.window - 1)
            tensors = {name: x[:, :, max(0, x.shape[2] - most) :] for name, x in tensors.items()}
        return replace(self, tensors=tensors)

    @classmethod
    def stack(cls, layers: Sequence[Self]) -> Self:
        """Stack the sequences of several states of one model layer, padded on the left.

        Raises `ShapeError` if they belong to different model layers.
        """
        first = layers[0]
        if len({(x.number, x.kind, x.window) for x in layers}) != 1:
            raise ShapeError("Only states of the same model layer can be stacked.")
        columns = {name: [x.tensors[name] for x in layers] for name in first.tensors}
        if first.window is not None:
            width = max(x.shape[2] for x in columns["keys"])
            for name, parts in columns.items():
                columns[name] = [functional.pad(x, (0, 0, width - x.shape[2], 0)) for x in parts]
        return replace(first, tensors={name: torch.cat(parts) for name, parts in columns.items()})


def bytes_by_kind(layers: Sequence[LayerState]) -> dict[str, int]:
    """Bytes of `layers` by kind, such as {"sliding_attention": ...}, without empty ones."""
    total: dict[str, int] = {}
    for layer in layers:
        if layer.tensors:
            total[layer.kind] = total.get(layer.kind, 0) + layer.bytes
    return total
