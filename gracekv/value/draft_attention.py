"""What the answer's first tokens look at, which takes generating them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from gracekv.errors import ConfigError, MissingCaptureError
from gracekv.prefill import Needs, Prefill, Region
from gracekv.value.base import SCORERS, Scorer, TokenScores
from gracekv.value.seed_scores import mean_seed_scores


@final
@SCORERS.register("draft_attention")
@dataclass(frozen=True, slots=False)
class DraftAttention(Scorer):
    """Mean attention of the first 16 answer tokens, drafted greedily over the full cache.

    Leaves the single pass: the capture decodes `tokens` steps more, and the full cache stays until
    they are done (`Prefill.seconds["draft"]`).

    Source: ours; see `gracekv.prefill.draft`.

    Cost: `tokens` decoding steps over the full cache.

    Attributes:
        tokens: most drafted tokens; fewer where the answer ends before.

    Raises:
        ConfigError: a field lies outside what it takes.
    """

    tokens: int = 16

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ConfigError(
                f"DraftAttention.tokens takes a number of tokens >= 1; got {self.tokens!r}."
            )

    def needs(self) -> Needs:
        """The draft."""
        return Needs(draft=self.tokens)

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
        rows = prefill.draft[:, :, : self.tokens, first : first + region.length]
        tokens = rows.float().mean(dim=2).to(prefill.keys[0].device)
        return TokenScores(tokens, mean_seed_scores(tokens))
