"""`allocated`: bits by marginal gain per byte, in one auction over all layers and heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from einops import rearrange
from torch import Tensor

from gracekv.allocate import Selection
from gracekv.cache.coded import Coding
from gracekv.kernels.ragged import rows_and_steps
from gracekv.precision.allocating import AllocatingPrecision
from gracekv.precision.base import PRECISIONS
from gracekv.precision.quantise import check_finite, quantised
from gracekv.precision.uniform import UniformPrecision
from gracekv.precision.width_auction import Entries, WidthCosts, allocated_widths
from gracekv.prefill import CaptureInfo, LayerCapture, Region
from gracekv.registry import bounded


@PRECISIONS.register("allocated", works_sharded=True)
class AllocatedPrecision(AllocatingPrecision):
    """Each entry of each head at 0 (dropped), 4, 8 or all bits, by what a byte brings.

    Candidates are the entries that the budget would hold at 4 bits. Each may be bought at 4 bits,
    then widened to 8 and to the model's dtype: the operation that gains most per byte first, over
    all layers and heads, until the bytes are spent. Dropping an entry is an error as large as its
    token scores times its head's sensitivity; rounding it, a share of that, which is measured for
    each head and width. A gain is the square that an operation takes off the sum of squared errors:
    rounding errors are independent, and the divergence grows with the square of an error. A budget
    in entries leaves them all as they are.

    Source: ours; rounding as in `uniform`.

    Cost: a sample of tokens is rounded to find the losses, and a sort of thrice the candidates.

    Attributes:
        group: numbers that share a scale and a zero point.
        keys: always "channel", as in `uniform`; a block holds entries of one width.
        values: always "token".
        sinks: the prompt's first tokens are dropped or stay as they are, as in `uniform`.
        rounding: how much a measured rounding error counts against that of dropping an entry.
    """

    group: int = bounded(32, at_least=1)
    keys: Literal["channel"] = "channel"
    values: Literal["token"] = "token"
    sinks: int = bounded(4, at_least=0)
    rounding: float = bounded(0.5, above=0)

    @property
    def stored(self) -> tuple[UniformPrecision, ...]:
        return tuple(UniformPrecision(bits, self.group, sinks=self.sinks) for bits in (4, 8))

    def measured(self, capture: LayerCapture, region: Region) -> Tensor:
        """float64 [G, 2]: the losses of 4 and 8 bits, see `rounding_loss`."""
        return rounding_loss(capture, region, self.codings[::-1])

    def allocate(
        self,
        info: CaptureInfo,
        measured: Sequence[Tensor],
        candidates: Selection,
        worth: Tensor,
        budget: int,
    ) -> Tensor:
        costs = WidthCosts.of(self.stored, info)
        loss = torch.cat([own.to(measured[0].device) for own in measured]).cpu()
        check_finite([loss], info.dtype)
        loss = self.rounding * loss
        head = candidates.head_of_entry()
        entries = Entries(
            worth=worth.double().cpu().square(),
            head=head,
            loss=torch.nn.functional.pad(loss.square(), (0, 1)),
            fixed=(candidates.start < self.sinks).cpu(),
            place=_places(head, info),
        )
        level = allocated_widths(entries, costs, budget, info.shard)
        return torch.tensor((0, *costs.bits), dtype=torch.uint8)[level]


def _places(head: Tensor, info: CaptureInfo) -> Tensor | None:
    """int64 [E]: the order of entries of `head` int64 [E] among those of all processes.

    None without other processes.
    """
    if info.shard.ranks == 1:
        return None
    counts = torch.bincount(head, minlength=info.layers * info.kv_heads)
    most = int(info.shard.maximum(counts.max()))
    _, step = rows_and_steps(counts)
    return info.shard.among_all(head, info.kv_heads) * most + step


# Evenly spaced tokens that are rounded, and last prompt positions whose queries meet them. Ours.
_TOKENS, _QUERIES = 256, 16


def rounding_loss(capture: LayerCapture, region: Region, codings: Sequence[Coding]) -> Tensor:
    r"""float64 [G, C]: error of a rounded entry's output over the error of dropping it.

    Rounding adds d_v + (q . d_k) (v - mean) to an entry's share of the output, where q is a query
    times the attention scale; dropping the entry takes v - mean. The loss is the root of the mean
    square over tokens and queries, sqrt(|d_v|^2 / |v - mean|^2 + (q . d_k)^2).

    Source: ours.

    Args:
        capture: one layer.
        region: whose tokens are rounded; one head's sample in blocks of its own.
        codings: C ways to store them.
    """
    count, dim = min(_TOKENS, region.length), capture.info.entry_dim
    if not count:
        return torch.zeros(capture.kv_heads, len(codings), dtype=torch.float64)
    (group,) = {coding.group for coding in codings}
    levels = [coding.most for coding in codings]
    keys, values = capture.keys, capture.values
    # Blocks of keys are filled up with the last token, as in the cache.
    filled = torch.arange(-(-count // group) * group, device=keys.device).clamp_(max=count - 1)
    at = region.start + filled * region.length // count
    keys = keys[:, at, :dim].unflatten(1, (-1, group))
    codes, scale, zero = quantised(keys, -2, *levels)
    off = (zero + scale * codes - keys).float().flatten(2, 3)[:, :, :count]
    asking = list(capture.spans.last(_QUERIES))
    queries = capture.queries_at(asking)[..., :dim].float() * capture.scale
    queries = rearrange(queries, "(g n) p d -> g (n p) d", g=capture.kv_heads)
    of_keys = (queries @ off.mT).square().mean(dim=(2, 3))
    values = values[:, at[:count], :dim]
    spread = values.float()
    spread = (spread - spread.mean(dim=1, keepdim=True)).square().sum(dim=(1, 2))
    values = values.unflatten(2, (-1, min(group, dim)))
    codes, scale, zero = quantised(values, -1, *levels)
    of_values = (zero + scale * codes - values).square().sum(dim=(2, 3, 4))
    # Values that are all alike are rounded to themselves.
    of_values = of_values / spread.clamp_min(torch.finfo(torch.float32).tiny)
    loss: Tensor = (of_keys + of_values).sqrt()
    return loss.T.double()
