"""Attention that a second pass over the context pays to the first, as in Attention Matching.

The model reads a request to repeat, the prompt's tail, and the context again; queries of evenly
spaced tokens of that pass are kept. `gracekv.fit` also uses them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import reduce
from torch import Tensor

from gracekv.kernels.softmax_sums import softmax_columns
from gracekv.kernels.uploads import on_device
from gracekv.prefill import LayerCapture, Needs, Prefill, PromptSpans, Region
from gracekv.prefill.needs import region_samples
from gracekv.prefill.observer import TokenRun
from gracekv.registry import bounded
from gracekv.value.base import SCORERS, Memory, Scorer
from gracekv.value.kvzip_two_pass import Repetition


@dataclass(frozen=True)
class RepeatedQueries(Repetition):
    """Queries of the second pass at evenly spaced context tokens, [L, H, Q, d].

    They are rotated to their positions in that pass: after prefix and context come the request, the
    tail and the repeated tokens. The request is KVzip's, see `Reconstruction`.

    Attributes:
        count: Q; a shorter context uses all its tokens.
        chunk: context tokens that one pass repeats; a longer context takes several.
    """

    count: int
    chunk: int = 4096

    def shape(self, prefill: Prefill) -> tuple[int | None, ...]:
        count = min(self.count, prefill.spans.context_length)
        return prefill.layers, prefill.query_heads, count, prefill.head_dim

    def seen(self, run: TokenRun, spans: PromptSpans, part: Region) -> Tensor:
        at = region_samples(Region(spans.context_start, spans.context_end), self.count)
        inside = at[(at >= part.start) & (at < part.end)] - part.end + run.queries.shape[1]
        return run.queries[:, on_device(inside, run.queries.device)]

    def joined(self, parts: list[Tensor]) -> Tensor:
        """[L, H, Q, d]."""
        return torch.cat(parts, dim=2)


@SCORERS.register("repeated_attention", works_sharded=True)
class RepeatedAttention(Scorer):
    """Root mean square of the attention paid while the model repeats the context.

    The mean is over queries and a KV head's query heads; the softmax runs over the compressible
    tokens only. The question is not read.

    Source: Zweiger et al. (2026), Attention Matching, arXiv:2602.16284, "highest attention keys"
    of its code.

    Cost: a second pass over the context, and attention rows of its queries, O(L H Q T d).

    Attributes:
        count: number of evenly spaced queries; all of a shorter context (ours; the public code
            takes all).
    """

    count: int = bounded(4096, at_least=1)

    def needs(self) -> Needs:
        """The queries of the second pass."""
        return Needs.observed(RepeatedQueries(self.count))

    def layer(self, capture: LayerCapture, region: Region, memory: Memory) -> Tensor:
        """[G, N], not normalised. Raises `MissingCaptureError` without the second pass."""
        keys = capture.keys[:, region.start : region.end]
        asked = capture.observation(RepeatedQueries(self.count)).to(keys.device)
        squares = softmax_columns(
            asked, keys, region.length, scale=capture.scale, power=2.0, softcap=capture.softcap
        )
        return reduce(squares / asked.shape[1], "(g n) t -> g t", "mean", g=len(keys)).sqrt()
