"""`RaggedCache`: the compressed cache as physical tensors, and the interface of packers."""

from __future__ import annotations

import abc
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

from gracekv.allocate.base import Frontier
from gracekv.errors import ShapeError
from gracekv.prefill import Prefill
from gracekv.registry import Registry, Strategy
from gracekv.tree.merge import PrototypeRule


@dataclass(frozen=True, slots=True, eq=False)
class RaggedLayer:
    """The entries of one layer, its KV heads one after the other without padding.

    Attributes:
        keys: [E, d] post-RoPE, in the model's dtype.
        values: [E, d].
        positions: int32 [E] absolute, ascending inside a head.
        log_multiplicity: float32 [E], added to the attention logit; 0 for original tokens.
        offsets: int64 [G+1] on the CPU; head g holds entries [offsets[g], offsets[g+1]).
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    log_multiplicity: Tensor
    offsets: Tensor

    def __post_init__(self) -> None:
        entries = int(self.offsets[-1])
        if self.keys.ndim != 2 or self.keys.shape != self.values.shape or len(self.keys) != entries:
            raise ShapeError(
                f"RaggedLayer takes keys and values [E, d] with E = offsets[-1] = {entries}; got "
                f"{list(self.keys.shape)} and {list(self.values.shape)}."
            )
        if self.positions.shape != (entries,) or self.log_multiplicity.shape != (entries,):
            raise ShapeError(
                f"RaggedLayer takes positions and log_multiplicity [{entries}]; got "
                f"{list(self.positions.shape)} and {list(self.log_multiplicity.shape)}."
            )

    @property
    def heads(self) -> int:
        """G."""
        return len(self.offsets) - 1

    @property
    def entries(self) -> int:
        """E, physical entries of all heads."""
        return len(self.keys)

    @property
    def lengths(self) -> Tensor:
        """int64 [G], entries per head."""
        return self.offsets.diff()

    def head(self, g: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Views of head g: keys [E_g, d], values [E_g, d], positions [E_g], log m [E_g]."""
        at = slice(int(self.offsets[g]), int(self.offsets[g + 1]))
        return self.keys[at], self.values[at], self.positions[at], self.log_multiplicity[at]

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values."""
        return 2 * self.keys.numel() * self.keys.element_size()

    @property
    def metadata_bytes(self) -> int:
        """Bytes of positions, multiplicities and offsets."""
        return sum(
            t.numel() * t.element_size()
            for t in (self.positions, self.log_multiplicity, self.offsets)
        )

    @classmethod
    def dense(cls, keys: Tensor, values: Tensor) -> RaggedLayer:
        """Every token of [G, T, d] keys and values as it is (FullKV)."""
        heads, length, _ = keys.shape
        return cls(
            keys=rearrange(keys, "g t d -> (g t) d"),
            values=rearrange(values, "g t d -> (g t) d"),
            positions=torch.arange(length, dtype=torch.int32, device=keys.device).repeat(heads),
            log_multiplicity=torch.zeros(heads * length, device=keys.device),
            offsets=torch.arange(heads + 1) * length,
        )


@dataclass(frozen=True, slots=True, eq=False)
class RaggedCache:
    """One sequence's packed cache: immutable, shared by all its continuations.

    Attributes:
        layers: L ragged layers, each on its model layer's device.
        length: logical tokens covered, positions [0, length); decoding goes on from there. It is
            T - 1: the last prompt token is fed again, over the compressed cache (ours).
    """

    layers: tuple[RaggedLayer, ...]
    length: int

    def entries(self) -> Tensor:
        """int64 [L, G] physical entries, prefix and suffix included."""
        return torch.stack([layer.lengths for layer in self.layers])

    @property
    def kv_bytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(layer.kv_bytes for layer in self.layers)

    @property
    def metadata_bytes(self) -> int:
        """Bytes of everything else that is packed."""
        return sum(layer.metadata_bytes for layer in self.layers)


class Packer(Strategy, abc.ABC):
    """Turn the chosen nodes into physical entries.

    Each head holds, in this order: the prefix, the kept nodes by start, the recent window, the
    suffix without the last prompt token. Prefix, recent window, suffix and singletons are the
    prefill's own keys and values, bit for bit.
    """

    @abc.abstractmethod
    def __call__(
        self, prefill: Prefill, frontier: Frontier, tokens: Tensor, rule: PrototypeRule
    ) -> RaggedCache:
        """Pack `frontier`; `tokens` is R^tok [L, G, N], which weighs merged values."""


PACKERS: Registry[Packer] = Registry("pack", "how a chosen node becomes an entry")
Packer.registry = PACKERS
