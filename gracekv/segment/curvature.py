r"""How sharply the hidden-state trajectory turns at each token.

With steps d_t = hbar_{t+1} - hbar_t, the two local directions at i are triangular sums of steps,

    delta_-(i) = sum_{k=1}^{w-1} (w-k)/w d_{i-k}   and
    delta_+(i) = sum_{k=0}^{w-1} (w-k)/w d_{i+k},

which equal the differences to the window means. So their norms and their inner product are fixed
quadratic forms of the products d_s . d_t near i. No large numbers are subtracted, so a flat stretch
has exactly zero curvature in any sequence, and no window mean is stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from gracekv.errors import NonFiniteError
from gracekv.prefill import Needs, Prefill, PromptSpans, depth_layers
from gracekv.prefill.observer import Accumulator, LayerObserver, TokenRun
from gracekv.prefill.spans import reflected
from gracekv.registry import Configurable, bounded

# Rows per matrix product: (rows + width) / width times the needed products are computed, so small
# blocks suit narrow bands; below 64 the overhead of a call shows.
_BLOCK = 64
_CHUNK_BYTES = 64 * 2**20
_DEPTHS = "0 is the first layer, 1 the last; for layer i of L give i / L."


def unit_states(hidden: Tensor, epsilon: float) -> Tensor:
    """Rows of `hidden` [n, D] divided by max(norm, epsilon): [n, D] float64.

    A row with NaN or infinity becomes NaN. Source: Eq. (S2).
    """
    hidden = hidden.double()
    norm: Tensor = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
    return hidden / norm.clamp(min=epsilon)


def band_products(x: Tensor, width: int, before: int = 0, after: int = 0) -> Tensor:
    """[n, width]: entry (t, j) is x_t . x_{t+j} for the rows of x [m, D]; 0 past the last row.

    The band at the diagonal of a Gram matrix, computed as small overlapping matrix products. n =
    `before` + m + `after`; x is padded with rows of zeros on both sides.
    """
    rows, dim = before + len(x) + after, x.shape[1]
    blocks = -(-rows // _BLOCK)
    span = _BLOCK + width - 1
    padded = functional.pad(x, (0, 0, before, blocks * _BLOCK + width - 1 - before - len(x)))
    left = padded[: blocks * _BLOCK].view(blocks, _BLOCK, dim)
    gram = torch.bmm(left, padded.unfold(0, span, _BLOCK)).contiguous()
    # The diagonal of row r is column r: a row stride of span + 1 follows the diagonal.
    band = gram.as_strided((blocks, _BLOCK, width), (_BLOCK * span, span + 1, 1))
    return band.reshape(-1, width)[:rows]


def chunk_rows(row_values: int, overlap: int) -> int:
    """Number of rows of `row_values` float64 numbers to hold at once, at least `overlap`."""
    return max(_CHUNK_BYTES // (8 * row_values), overlap, 1)


@dataclass(frozen=True)
class BlockInput(LayerObserver):
    """The residual stream [T, D] before one block, in the model's dtype.

    In a passage that follows packed entries, earlier positions mirror those of the passage.

    Attributes:
        depth: rho; the layer is min(floor(rho L), L - 1).
    """

    reads = frozenset({"hidden"})
    part = "prefill"

    depth: float

    def shape(self, prefill: Prefill) -> tuple[int | None, ...]:
        return (prefill.spans.length, None)

    def accumulator(self, layer: int, layers: int, spans: PromptSpans) -> Accumulator | None:
        return _Rows(spans) if depth_layers([self.depth], layers) == (layer,) else None

    def combine(self, by_layer: Mapping[int, Tensor]) -> Tensor:
        """[T, D] of the one layer."""
        (states,) = by_layer.values()
        return states


class _Rows:
    def __init__(self, spans: PromptSpans) -> None:
        self._spans, self._rows = spans, torch.empty(0, dtype=torch.float32)

    def add(self, run: TokenRun) -> None:
        assert run.hidden is not None  # declared in `reads`
        if run.start == self._spans.past:
            self._rows = run.hidden.new_empty(self._spans.length, run.hidden.shape[1])
        self._rows[run.start : run.end] = run.hidden

    def result(self) -> Tensor:
        return reflected(self._rows, self._spans.past)


def hidden_at(prefill: Prefill, depths: Sequence[float]) -> list[Tensor]:
    """Block inputs [T, D] of the layers at relative `depths`, ascending, without duplicates.

    Raises `MissingCaptureError` if one was not captured.
    """
    inputs = [x for x in prefill.observed if isinstance(x, BlockInput)]
    held = {depth_layers([x.depth], prefill.layers): x for x in inputs}
    wanted = {depth_layers([depth], prefill.layers): BlockInput(depth) for depth in depths}
    return [prefill.observation(held.get(layer, wanted[layer])) for layer in sorted(wanted)]


@dataclass(frozen=True)
class Curvature(Configurable):
    """Curvature of the trajectory, stabilised over layers and window sizes.

    Attributes:
        depths: relative depths rho of the sampled layers (Eq. (S1)).
        windows: sizes w in tokens of the averages on either side (Eq. (S4)).
        stability: lambda_stab, weight of the standard deviation over layers and windows, which is
            subtracted from the mean (Eq. (S5)).
        epsilon: lower bound of norms in denominators (Eq. (S2)).
    """

    depths: tuple[float, ...] = bounded((0.33, 0.5, 0.67), at_least=0, at_most=1, hint=_DEPTHS)
    windows: tuple[int, ...] = bounded(
        (4, 8, 16), at_least=1, distinct=True, hint="The paper's are (4, 8, 16) tokens."
    )
    stability: float = bounded(0.25, at_least=0)
    epsilon: float = bounded(1e-6, above=0)

    def needs(self) -> Needs:
        """Hidden states of the sampled layers."""
        return Needs.observed(*map(BlockInput, self.depths))

    def __call__(self, prefill: Prefill) -> Tensor:
        """kappa of every position of the sequence: float64 [T]; see `of_states`.

        Raises `MissingCaptureError` if a sampled layer was not captured.
        """
        return self.of_states(hidden_at(prefill, self.depths))

    def of_states(self, states: Sequence[Tensor]) -> Tensor:
        """kappa from the sampled layers' block inputs, each [T, D]: float64 [T].

        Mean minus `stability` times the population standard deviation over all layers and windows;
        a window that does not fit on both sides of a position counts as 0 there. The result is on
        the first layer's device. Raises `NonFiniteError` on NaN or infinity.

        Source: Eqs. (S3) to (S5).
        """
        device = states[0].device
        # Once for all layers, since each upload to a GPU synchronises.
        forms = self._quadratic_forms().to(device)
        windows = torch.tensor(self.windows, device=device)[:, None]
        views = torch.cat([self._of_layer(x, forms, windows).to(device) for x in states])
        kappa = views.mean(dim=0) - self.stability * views.std(dim=0, correction=0)
        if not bool(kappa.isfinite().all()):
            raise NonFiniteError(
                "The hidden states hold NaN or infinity, so slots cannot be cut from them. Check "
                "the model's weights and dtype (float16 overflows in some models: try bfloat16)."
            )
        return kappa

    def _of_layer(self, hidden: Tensor, forms: Tensor, windows: Tensor) -> Tensor:
        """kappa^(l,w) of one layer [T, D]: float64 [W, T]; `windows` are int64 [W, 1].

        All NaN if a state is not finite.
        """
        length, dim = hidden.shape
        reach = max(self.windows) - 1
        forms, windows = forms.to(hidden.device), windows.to(hidden.device)
        rows = chunk_rows(max(dim, forms.shape[0]), 2 * reach)
        chunks, squares = [], []
        for start in range(0, length, rows):
            stop = min(start + rows, length)
            near = hidden[max(0, start - reach) : stop + reach + 1]
            steps = unit_states(near, self.epsilon).diff(dim=0)
            before = max(0, reach - start)
            after = stop - start + 2 * reach - before - len(steps)
            band = band_products(steps, 2 * reach + 1, before, after)
            squares.append(band[:, 0].sum())
            around = band.unfold(0, 2 * reach + 1, 1).reshape(stop - start, -1)
            chunks.append((around @ forms).view(stop - start, len(self.windows), 3))
        incoming, outgoing, inner = torch.cat(chunks).permute(2, 1, 0)
        norms = [x.clamp(min=0).sqrt().clamp(min=self.epsilon) for x in (incoming, outgoing)]
        position = torch.arange(length, device=hidden.device)
        complete = (windows <= position) & (position < length - windows)
        kappa = torch.where(complete, 1 - inner / (norms[0] * norms[1]), 0.0)
        return kappa + 0.0 * torch.stack(squares).sum()

    def _quadratic_forms(self) -> Tensor:
        """Weights of the products around i in |delta_-|^2, |delta_+|^2 and <delta_-, delta_+>.

        float64 [(2 reach + 1)^2, 3 W]; row (j, p) has the weight of the product of the steps i -
        reach + p and i - reach + p + j.
        """
        reach = max(self.windows) - 1
        size = 2 * reach + 1
        columns = []
        for window in self.windows:
            ramp = torch.arange(window, 0, -1, dtype=torch.float64) / window
            incoming, outgoing = torch.zeros(2, 2 * size, dtype=torch.float64)
            outgoing[reach : reach + window] = ramp
            incoming[reach - window + 1 : reach] = ramp[1:].flip(0)
            for a, b in ((incoming, incoming), (outgoing, outgoing), (incoming, outgoing)):
                form = a[:size, None] * b.unfold(0, size, 1)[:size]
                # A product of two different steps stands for both orders.
                form[:, 1:] += (b[:size, None] * a.unfold(0, size, 1)[:size])[:, 1:]
                columns.append(form.T.reshape(-1))
        return torch.stack(columns, dim=1)
