"""Attention of the answer's first tokens, which are generated over the full cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from gracekv.errors import MissingCaptureError
from gracekv.prefill import Needs, Prefill, Region
from gracekv.registry import bounded
from gracekv.value.base import SCORERS, Scorer, TokenScores


@final
@SCORERS.register("draft_attention")
@dataclass(frozen=True, slots=False)
class DraftAttention(Scorer):
    """Mean attention of the first 16 answer tokens, drafted greedily over the full cache.

    Not a single pass: the capture decodes `max_tokens` steps more and holds the full cache until
    they are done (`Prefill.seconds["draft"]`).

    Source: ours; see `gracekv.prefill.draft`.

    Cost: `max_tokens` decoding steps over the full cache.

    Attributes:
        max_tokens: drafted tokens; fewer if the answer ends before.
    """

    works_sharded: ClassVar[bool] = True

    max_tokens: int = bounded(16, at_least=1)

    def needs(self) -> Needs:
        """The draft."""
        return Needs(draft=self.max_tokens)

    def __call__(self, prefill: Prefill, region: Region) -> TokenScores:
        """Attention shares, float32 [L, G, N], not normalised.

        Raises `MissingCaptureError` if no answer was drafted.
        """
        if prefill.draft is None:
            raise MissingCaptureError(
                "No answer was drafted for this prompt. Capture for the pipeline that you run: "
                "gracekv.capture(model, prompt, needs=pipeline.needs())."
            )
        first = region.start - prefill.spans.context_start
        rows = prefill.draft[:, :, : self.max_tokens, first : first + region.length]
        return TokenScores.from_scores(
            rows.float().mean(dim=2).to(prefill.keys[0].device), shard=prefill.shard
        )
