"""KVzip's score: what the model looks at when it repeats its context. Needs a second pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from gracekv.errors import ConfigError, MissingCaptureError
from gracekv.prefill import Needs, Prefill, Region
from gracekv.value.base import SCORERS, Scorer, TokenScores
from gracekv.value.seed_scores import mean_seed_scores


@final
@SCORERS.register("kvzip_two_pass")
@dataclass(frozen=True, slots=False)
class KVzipTwoPass(Scorer):
    """Most attention received while the model repeats the context in a second pass (KVzip).

    The question is not read. Every other score costs one prefill; this one makes the capture run
    the model over the context again, which takes longer than the prefill itself
    (`Prefill.seconds["reconstruction"]`).

    Source: Kim et al. (2025), KVzip, arXiv:2505.23416; see `gracekv.prefill.reconstruction`.

    Cost: the second pass, 3.5 times the prefill at 4,096 tokens on a CPU; nothing after it.

    Attributes:
        sinks: first prompt tokens that outrank all others (4).

    Raises:
        ConfigError: a field lies outside what it takes.
    """

    sinks: int = 4

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise ConfigError(
                f"KVzipTwoPass.sinks takes a number of tokens >= 0; got {self.sinks!r}. KVzip's "
                f"is 4."
            )

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
        return TokenScores(tokens, mean_seed_scores(tokens))
