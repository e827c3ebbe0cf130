"""A second pass in which the model repeats its context, and the attention that it pays.

For each chunk, the model reads a request to repeat, the prompt's tail (the template's change of
turn, and the answer prefix if there is one), and then the chunk itself, after the keys and values
of prefix and context. A context token's score is the largest attention from any query of this pass,
in any query head of its KV head's group. The softmax runs over the prompt's first tokens, the
chunk, and the tokens that this pass has read so far: over the whole context it would need L H T^2
logits.

Source: Kim et al. (2025), KVzip, arXiv:2505.23416, with the texts and sizes of its code in kvpress.
Ours: the prompt's own tail in place of an empty chat's, and a pass without a request if the prompt
has no tokenizer.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from einops import reduce
from torch import Tensor

from gracekv.kernels.softmax_sums import softmax_columns
from gracekv.prefill import LayerCapture, Needs, Prefill, PromptSpans, Region
from gracekv.prefill.observer import Observer, Passes, PassObserver, TokenRun
from gracekv.registry import bounded
from gracekv.value.base import SCORERS, Memory, Scorer

_WHOLE = "\n\nRepeat the previous context exactly."
_PART = "\n\nRepeat the part of the previous context exactly, starting with"
# Number of tokens of the previous chunk quoted in a request, and of first prompt tokens that the
# softmax always includes.
_LEAD, _SINKS = 8, 4


class Repetition(PassObserver):
    """Observes the layers of the second pass. Observers with equal `chunk` share a pass.

    Attributes:
        chunk: context tokens that are repeated at once.
    """

    part = "reconstruction"
    chunk: int

    @property
    def timed_as(self) -> Observer:
        return Reconstruction(self.chunk)

    def reach(self, spans: PromptSpans) -> int:
        return spans.context_end + min(self.chunk, spans.context_length)

    @abc.abstractmethod
    def seen(self, run: TokenRun, spans: PromptSpans, part: Region) -> Tensor:
        """Return the observation [...] of one layer that reads `part` a second time."""

    @abc.abstractmethod
    def joined(self, parts: list[Tensor]) -> Tensor:
        """Join each chunk's observations of all layers [L, ...] into one [L, ...]."""

    def observe(self, passes: Passes) -> Tensor:
        return self.observe_all(passes, [self])[0]

    @torch.no_grad()
    def observe_all(self, passes: Passes, alike: Sequence[Any]) -> list[Tensor]:
        spans, parts, rows = passes.spans, list[list[Tensor]](), list[list[Tensor]]()
        for part, ids in repetitions(passes, self.chunk):

            def attend(layer: int, run: TokenRun, part: Region = part) -> None:
                rows.append([x.seen(run, spans, part) for x in alike])

            passes.after(spans.context_end, len(ids)).run(ids, attend)
            layers = zip(*rows, strict=True)
            parts.append([torch.stack([x.to(own[0].device) for x in own]) for own in layers])
            rows.clear()
        return [x.joined(own) for x, *own in zip(alike, *parts, strict=True)]


@dataclass(frozen=True)
class Reconstruction(Repetition):
    """The attention that each context token receives in the second pass, float32 [L, G, N_ctx].

    The maximum or a power mean over queries.

    In addition to the result it holds, one layer at a time, a copy of the keys and values of prefix
    and context, the mask [chunk, T] and a block of logits. Costs about as much as a chunked prefill
    of twice the context.

    Attributes:
        chunk: context tokens that one pass repeats.
        power: exponent of the mean; 0 for the maximum.
    """

    chunk: int = 2048
    power: float = 0.0

    def shape(self, prefill: Prefill) -> tuple[int | None, ...]:
        return prefill.layers, prefill.kv_heads, prefill.spans.context_length

    def seen(self, run: TokenRun, spans: PromptSpans, part: Region) -> Tensor:
        keys, own = run.keys[:, : spans.context_end], run.keys[:, spans.context_end :]
        return received_attention(run.queries, keys, own, part, self.power, **run.softmax_args)

    def joined(self, parts: list[Tensor]) -> Tensor:
        """[L, G, N_ctx]."""
        found = torch.cat(parts, dim=-1)
        return (found / found.shape[-1]) ** (1 / self.power) if self.power else found


@SCORERS.register("kvzip_two_pass")
class KVzipTwoPass(Scorer):
    """Maximum attention received while the model repeats the context in a second pass (KVzip).

    With `mean_power`, a power mean over the queries and query heads of that pass (ours): a token
    read by many queries scores higher than one read as strongly by a single query.

    The question is not read. The capture runs the model over the context again, which takes longer
    than the prefill itself.

    Source: Kim et al. (2025), KVzip, arXiv:2505.23416.

    Cost: the second pass, one to three times the prefill on a CPU.

    Attributes:
        sinks: number of first prompt tokens, which score higher than all others (KVzip's 4).
        mean_power: exponent of the mean over queries; 0 for the maximum (KVzip's).
    """

    sinks: int = bounded(4, at_least=0, hint="KVzip's is 4.")
    mean_power: float = bounded(0.0, at_least=0, hint="0: maximum, as KVzip; 2: root mean square.")

    def needs(self) -> Needs:
        """The second pass."""
        return Needs.observed(self._pass)

    @property
    def _pass(self) -> Reconstruction:
        return Reconstruction(power=self.mean_power)

    def layer(self, capture: LayerCapture, region: Region, memory: Memory) -> Tensor:
        """The captured attention [G, N]; sinks score 2, above any attention."""
        first = region.start - capture.spans.context_start
        seen = capture.observation(self._pass)[:, first : first + region.length]
        tokens = seen.to(capture.keys.device, torch.float32, copy=True)
        tokens[:, : max(0, self.sinks - region.start)] = 2.0
        return tokens


def repetitions(passes: Passes, chunk: int) -> Iterator[tuple[Region, Tensor]]:
    """Yield each context chunk as absolute positions, and the ids [n] that repeat it."""
    spans, ids = passes.spans, passes.ids
    for part in Region(spans.context_start, spans.context_end).parts(chunk):
        lead = ids[max(spans.context_start, part.start - _LEAD) : part.start]
        text = _PART if part.start > spans.context_start else _WHOLE
        request = torch.tensor(passes.encode(text), dtype=torch.int64)
        yield part, torch.cat([request, lead, passes.tail, ids[part.start : part.end]])


def received_attention(
    queries: Tensor, seen: Tensor, own: Tensor, part: Region, power: float, **softmax_args: Any
) -> Tensor:
    """The largest attention to each token of `part`, or a sum of its powers: float32 [G, n].

    Summed over queries, averaged over the query heads of a KV head.

    Args:
        queries: [H, Q, d] of the tokens of this pass.
        seen: [G, >= part.end, d] keys of prefix and context.
        own: [G, Q, d] keys of the tokens of this pass.
        part: absolute positions of the n tokens.
        power: exponent of the summed attention; 0 for the maximum.
        softmax_args: `scale`, `softcap` and `sinks`, as in `TokenRun`.
    """
    sinks, over = min(_SINKS, part.start), "mean" if power else "max"
    keys = torch.cat([seen[:, :sinks], seen[:, part.start : part.end], own], dim=1)
    width = sinks + part.length
    visible = torch.arange(width + 1, keys.shape[1] + 1, device=keys.device)
    softmax_args |= {"power": power or 1.0, "maximum": not power}
    columns = softmax_columns(queries, keys, visible, **softmax_args)
    return reduce(columns[:, sinks:width], "(g n) t -> g t", over, g=len(keys))
