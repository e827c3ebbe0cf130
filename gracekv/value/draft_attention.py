"""The attention of an answer's first tokens, drafted over the full cache.

A compressed cache must hold the tokens that the answer's queries attend to, and the answer's first
tokens show these best. They are generated greedily from the captured keys and values: the full
cache stays in memory for these decoding steps, and compression waits for them.

Source: ours; the paper and the methods that it compares with compress before any answer token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import reduce
from torch import Tensor

from gracekv.kernels.softmax_sums import Engine, softmax_columns
from gracekv.prefill import LayerCapture, Needs, Prefill, Region
from gracekv.prefill.observer import Passes, PassObserver, TokenRun
from gracekv.registry import bounded
from gracekv.value.base import SCORERS, Memory, Scorer


@dataclass(frozen=True)
class Draft(PassObserver):
    """Attention of greedy answer tokens to the context, float32 [L, G, S, N_ctx].

    The mean over a KV head's query heads; the softmax runs over all tokens seen. S is smaller than
    `tokens` if the answer ends earlier; an end-of-sequence token counts only if it comes first.

    Attributes:
        tokens: maximum number of tokens, at least 1.
    """

    part = "draft"

    tokens: int

    def shape(self, prefill: Prefill) -> tuple[int | None, ...]:
        return prefill.layers, prefill.kv_heads, None, prefill.spans.context_length

    @torch.no_grad()
    def observe(self, passes: Passes) -> Tensor:
        """[L, G, S, N_ctx]."""
        start, end = passes.spans.context_start, passes.spans.context_end
        answer = passes.after(passes.spans.length, self.tokens)
        seen: list[Tensor] = []

        def attend(layer: int, run: TokenRun) -> None:
            keys, args = run.keys, run.softmax_args
            # The compiled engine packs all keys first, which does not pay for a single query.
            engine: Engine = "torch" if keys.device.type == "cpu" else "auto"
            columns = softmax_columns(run.queries, keys, keys.shape[1], **args, engine=engine)
            found = reduce(columns[:, start:end], "(g n) t -> g t", "mean", g=len(keys))
            seen.append(found.to(seen[0].device if seen else found.device))

        token, rows = passes.first, list[Tensor]()
        for _ in range(self.tokens):
            state = answer.run(torch.tensor([token]), attend)
            rows.append(torch.stack(seen))
            seen.clear()
            if (token := passes.likeliest(state)) in passes.stops:
                break
        return torch.stack(rows, dim=2)


@SCORERS.register("draft_attention", works_sharded=True)
class DraftAttention(Scorer):
    """Mean attention of the first 16 answer tokens, drafted greedily over the full cache.

    Not a single pass: the capture decodes `max_tokens` more steps, during which it holds the
    full cache.

    Source: ours.

    Cost: `max_tokens` decoding steps over the full cache.

    Attributes:
        max_tokens: number of drafted tokens; fewer if the answer ends earlier.
    """

    max_tokens: int = bounded(16, at_least=1)

    def needs(self) -> Needs:
        """The draft."""
        return Needs.observed(Draft(self.max_tokens))

    def layer(self, capture: LayerCapture, region: Region, memory: Memory) -> Tensor:
        """Attention shares, float32 [G, N], not normalised.

        Raises `MissingCaptureError` if no answer was drafted.
        """
        # A longer draft begins with a shorter one.
        fits = [x for x in capture.observed if isinstance(x, Draft) and x.tokens >= self.max_tokens]
        draft = capture.observation(fits[0] if fits else Draft(self.max_tokens))
        first = region.start - capture.spans.context_start
        rows = draft[:, : self.max_tokens, first : first + region.length]
        return rows.float().mean(dim=1).to(capture.keys.device)
