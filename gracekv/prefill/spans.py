"""`PromptSpans`: positions of prefix, context, question and tail; `Past`: the entries before them.

A passage may follow compressed entries. Heads keep different numbers of entries, and merged entries
have multiplicities, but a prefill holds one tensor [G, T, d] per layer. So heads are padded to the
longest, and keys and queries get one more coordinate: 1/s in queries, where s is the scale of the
logits, and log m in keys, or far below all logits if there is no entry:

    s q'.k' = s q.k + log m .

So attention to packed entries is correct for all readers of the prefill. The coordinate is not
rotated, and is 0 in keys of the passage. Zeros follow it, since GPU kernels need a multiple of 8.
Source: ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gracekv.errors import CacheError, PromptError
from gracekv.prefill.layer_state import LayerState


@dataclass(frozen=True, slots=True)
class Region:
    """The compressible positions C = [start, end), absolute.

    Attributes:
        start: first token position.
        end: exclusive.
    """

    start: int
    end: int

    @property
    def length(self) -> int:
        """N (the paper's N_c), in tokens."""
        return self.end - self.start

    def parts(self, size: int) -> Iterator[Region]:
        """The region in parts of `size` tokens, in order; the last may be shorter."""
        for first in range(self.start, self.end, size):
            yield Region(first, min(first + size, self.end))


@dataclass(frozen=True, slots=True)
class PromptSpans:
    """Prefix [0, c_s) | context [c_s, c_e) | suffix [c_e, T); the question ends at q_e.

    Attributes:
        context_start: c_s, absolute token position.
        context_end: c_e, absolute token position, exclusive.
        question_end: q_e; [q_e, T) holds the chat template's tail and the answer prefix.
        length: T, in tokens.
        past: number of leading places of the prefix that were compressed before this sequence was
            read; they have keys and values but no queries.

    Raises `PromptError` if the spans are empty, out of order or out of range.
    """

    context_start: int
    context_end: int
    question_end: int
    length: int
    past: int = 0

    def __post_init__(self) -> None:
        start, end = self.context_start, self.context_end
        if not 0 <= self.past <= start < end <= self.question_end <= self.length or self.length < 2:
            raise PromptError(
                f"A prompt has at least 2 tokens (the last one is fed again to start decoding), "
                f"and 0 <= past <= context start < context end <= question_end <= length; got "
                f"past {self.past}, context ({start}, {end}), question_end {self.question_end} and "
                f"length {self.length}. Leave question_end out if there is no template tail."
            )

    @property
    def context_length(self) -> int:
        """N_ctx, in tokens."""
        return self.context_end - self.context_start

    def region(self, recent: int) -> Region:
        """C = [c_s, c_e - r), the context without a recent window of `recent` tokens."""
        return Region(self.context_start, max(self.context_start, self.context_end - recent))

    def last(self, count: int) -> range:
        """The last `count` positions of the prompt, or fewer if fewer were read."""
        return range(max(self.past, self.length - count), self.length)

    def direct_probes(self, question: int = 32, tail: int = 16) -> list[int]:
        """U: the last `question` question positions and the last `tail` positions, ascending.

        Raises `PromptError` if there are none.

        Source: the paper, "Direct relevance"; the union is a set, see departure 3.
        """
        asked = range(max(self.context_end, self.question_end - question), self.question_end)
        if not (probes := sorted({*asked, *self.last(tail)})):
            raise PromptError(
                f"There are no probes among the last {question} question and {tail} tail positions "
                f"of the prompt. Set tail_probes >= 1, or mark the question's span in the prompt."
            )
        return probes

    def question_probes(self) -> list[int]:
        """U_q: the positions of U inside the question, or all of U if there is no question."""
        probes = self.direct_probes()
        return [u for u in probes if self.context_end <= u < self.question_end] or probes


ADDED = 8
"""Number of coordinates after the model's own in keys, values and queries after a `Past`."""
# The logit of padding.
NOWHERE = -1e4


@dataclass(frozen=True, slots=True, eq=False)
class Past:
    """The compressed entries before a passage, in P places of each head.

    Attributes:
        layers: the heads of each layer, as keys [E_g, d], values [E_g, d] and log m [E_g].
        places: P, at least the number of entries of the longest head.
        length: number of logical tokens that it stands for, and position of the passage's first
            token.
        other_layers: states of the layers that are not compressed.
    """

    layers: Sequence[Sequence[tuple[Tensor, Tensor, Tensor]]]
    places: int
    length: int
    other_layers: tuple[LayerState, ...] = ()

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write a layer to the first P places of `keys` and `values` [G, T, d + 8].

        The padding comes first, so that a head's entries and the passage's keys are one view.

        Raises `CacheError` if the model was moved.
        """
        keys[:, : self.places] = values[:, : self.places] = 0.0
        lies = self.layers[layer][0][0].device
        if lies != keys.device:
            raise CacheError(
                f"The compressed context is on {lies}, but the model computes on {keys.device}. "
                f"Compress again after moving the model."
            )
        keys[:, : self.places, -ADDED] = NOWHERE
        for g, (own_keys, own_values, log_m) in enumerate(self.layers[layer]):
            rows = slice(self.places - len(own_keys), self.places)
            keys[g, rows, :-ADDED], values[g, rows, :-ADDED] = own_keys, own_values
            keys[g, rows, -ADDED] = log_m


def first_entries(keys: Tensor, past: int) -> list[int]:
    """The place of the first entry in each head of `keys` [G, T, d + 8] after a `Past`.

    0 for all heads if there is no past, and on a GPU, to avoid synchronising.
    """
    if not past or keys.device.type != "cpu":
        return [0] * len(keys)
    return (keys[:, :past, -ADDED] < NOWHERE / 2).sum(dim=1).tolist()


def model_dim(dim: int, past: int) -> int:
    """The model's d, from the dimension `dim` of states in a sequence after `past` places."""
    return dim - ADDED if past else dim


def widened(states: Tensor, scale: float | None = None) -> Tensor:
    """The states [..., d + 8] of a passage [..., d]; queries pass their `scale`."""
    wide = torch.nn.functional.pad(states, (0, ADDED))
    if scale is not None:
        wide[..., -ADDED] = 1 / scale
    return wide


def without_zeros(states: Tensor) -> Tensor:
    """A view [..., d + 1] of keys or queries [..., d + 8]: CPUs need no multiple of 8."""
    return states[..., : 1 - ADDED]


def reflected(signal: Tensor, places: int) -> Tensor:
    """Fill the first `places` rows of a signal [T, ...], which are unknown, by reflection.

    Segmenters compare a passage with the whole prompt; earlier tokens are assumed to be similar to
    the passage. Known rows are not changed; written in place.
    """
    count = len(signal) - places
    if places and count:
        back = torch.arange(places, 0, -1, device=signal.device) % max(1, 2 * count - 2)
        signal[:places] = signal[places + torch.minimum(back, (2 * count - 2 - back).clamp(min=0))]
    return signal
