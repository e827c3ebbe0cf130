"""KVzip's score: attention while the model repeats its context. Needs a second pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from gracekv.errors import MissingCaptureError
from gracekv.prefill import Needs, Prefill, Region
from gracekv.registry import bounded
from gracekv.value.base import SCORERS, Scorer, TokenScores


@final
@SCORERS.register("kvzip_two_pass")
@dataclass(frozen=True, slots=False)
class KVzipTwoPass(Scorer):
    """Maximum attention received while the model repeats the context in a second pass (KVzip).

    The question is not read. The capture runs the model over the context again, which takes longer
    than the prefill itself
    (`Prefill.seconds["reconstruction"]`).

    Source: Kim et al. (2025), KVzip, arXiv:2505.23416; see `gracekv.prefill.reconstruction`.

    Cost: the second pass, 3.5 times the prefill at 4,096 tokens on a CPU.

    Attributes:
        sinks: first prompt tokens, which score higher than all others (KVzip's 4).
    """

    sinks: int = bounded(4, at_least=0, hint="KVzip's is 4.")

    def needs(self) -> Needs:
        """The second pass."""
        return Needs(reconstruction=True)

    def __call__(self, prefill: Prefill, region: Region) -> TokenScores:
        """The captured maxima, not normalised. Raises `MissingCaptureError` without them."""
        if prefill.reconstruction is None:
            raise MissingCaptureError(
                "The model has not repeated this prompt's context, which takes a second pass. "
                "Capture for the pipeline that you run: gracekv.capture(model, prompt, "
                "needs=pipeline.needs())."
            )
        first = region.start - prefill.spans.context_start
        tokens = prefill.reconstruction[..., first : first + region.length].float()
        inside = min(max(0, self.sinks - region.start), region.length)
        if inside:
            tokens = tokens.clone()
            tokens[..., :inside] = float(tokens.max()) + 1
        return TokenScores.from_scores(tokens)
