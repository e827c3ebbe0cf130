"""Keys and values of compressed entries that a new passage follows.

Heads keep different numbers of entries, and merged entries have multiplicities, but a prefill holds
one tensor [G, T, d] a layer. So heads are padded to the longest, and keys and queries get one more
coordinate: the query's is 1/s, s the scale of the logits, the key's is log m, or far below all
logits where there is no entry,

    s q'.k' = s q.k + log m .

Whatever reads attention from the prefill reads that of packed entries right. The coordinate does
not rotate, and is 0 in keys of the passage. Source: ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from gracekv.prefill.layer_state import LayerState

# Coordinates added to a head; GPUs want a multiple of 8.
ADDED = 8
# The logit of a place without an entry.
_NOWHERE = -1e4


@dataclass(frozen=True, slots=True, eq=False)
class Past:
    """The compressed entries that a passage follows, padded to P places a head.

    Attributes:
        keys: L tensors [G, P, d + 8].
        values: L tensors [G, P, d + 8], whose last 8 are 0.
        length: logical tokens that it stands for; the passage's first token is at this position.
        other_layers: states of the layers that are not compressed.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    length: int
    other_layers: tuple[LayerState, ...] = ()

    @property
    def places(self) -> int:
        """P."""
        return self.keys[0].shape[1]

    @classmethod
    def padded(
        cls,
        layers: Sequence[Sequence[tuple[Tensor, Tensor, Tensor]]],
        length: int,
        other_layers: tuple[LayerState, ...] = (),
        places: int | None = None,
    ) -> Self:
        """From each layer's heads as keys [E_g, d], values [E_g, d] and log m [E_g].

        Padded to `places`, by default to the longest head.
        """
        if places is None:
            places = max(len(keys) for heads in layers for keys, _, _ in heads)
        keys, values = [], []
        for heads in layers:
            like = heads[0][0]
            shape = (len(heads), places, like.shape[1] + ADDED)
            keys.append(like.new_zeros(shape))
            values.append(like.new_zeros(shape))
            keys[-1][..., like.shape[1]] = _NOWHERE
            for g, (own_keys, own_values, log_m) in enumerate(heads):
                count, dim = own_keys.shape
                keys[-1][g, :count, :dim] = own_keys
                keys[-1][g, :count, dim] = log_m.to(like.dtype)
                values[-1][g, :count, :dim] = own_values
        return cls(tuple(keys), tuple(values), length, other_layers)


def widened(states: Tensor, dim: int, first: float = 0.0) -> Tensor:
    """Extend states [..., d] to `dim` coordinates: `first`, then zeros.

    `first` is 1/s for queries, 0 for keys and values of a passage.
    """
    old = states.shape[-1]
    if old == dim:
        return states
    wide = functional.pad(states, (0, dim - old))
    if first:
        wide[..., old] = first
    return wide


def reflected(signal: Tensor, places: int) -> Tensor:
    """Fill the first `places` rows of a signal [T, ...], which are unknown, by reflection.

    Segmenters compare a passage with the whole prompt; what was read before is taken to be like the
    passage. The known rows are left; written in place.
    """
    known = len(signal) - places
    if places and known:
        back = torch.arange(places, 0, -1, device=signal.device) % max(1, 2 * known - 2)
        signal[:places] = signal[places + torch.minimum(back, (2 * known - 2 - back).clamp(min=0))]
    return signal
