"""The paper's sensitivity: how much a head can and does write to the residual stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from einops import reduce
from torch import Tensor

from gracekv.errors import MissingCaptureError
from gracekv.prefill import Needs, Prefill
from gracekv.registry import bounded
from gracekv.value.base import SENSITIVITIES, Sensitivity


@final
@SENSITIVITIES.register("output_projection")
@dataclass(frozen=True, slots=False)
class OutputProjection(Sensitivity):
    """Size of a head's output projection times size of its output at the question.

    The geometric mean of both (Eq. (V7)), divided by its mean over all heads (Eq. (V8)).

    Source: Eqs. (V7) and (V8); departures 3. Ours: the value of `epsilon`.

    Cost: none of its own; the capture multiplies the question's head outputs by the output
    projections, below 1 % of a prefill.

    Attributes:
        epsilon: keeps the denominator from 0; the value is ours.
    """

    works_sharded: ClassVar[bool] = True

    epsilon: float = bounded(1e-12, above=0, at_most=1e-3, hint="It keeps a denominator from 0.")

    def needs(self) -> Needs:
        return Needs(head_outputs=True)

    def __call__(self, prefill: Prefill) -> Tensor:
        """Omega [L, G]; `MissingCaptureError` without the projections' norms."""
        if prefill.projection_norms is None or prefill.projected_norms is None:
            raise MissingCaptureError(
                "OutputProjection reads the output projections' norms, which were not captured. "
                "Capture for the pipeline that you run: gracekv.capture(model, prompt, "
                "needs=pipeline.needs()); or use the sensitivity 'none'."
            )
        device = prefill.keys[0].device
        squares = prefill.projection_norms.to(device).float().square()
        static = reduce(squares, "l (g n) -> l g", "sum", g=prefill.kv_heads).sqrt()
        dynamic = prefill.projected_norms.to(device).float().mean(dim=-1)
        raw = (static * dynamic).sqrt()
        mean = raw.mean()
        if prefill.shard is not None:
            mean = prefill.shard.sum(mean) / prefill.shard.ranks
        return raw / (mean + self.epsilon)
