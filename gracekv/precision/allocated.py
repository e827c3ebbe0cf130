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
from gracekv.kernels.uploads import on_device, upload
from gracekv.precision.base import PRECISIONS, AllocatingPrecision
from gracekv.precision.quantise import check_finite, quantised
from gracekv.precision.uniform import UniformPrecision
from gracekv.precision.width_auction import Entries, WidthCosts, allocated_widths
from gracekv.prefill import CaptureInfo, LayerCapture, PromptSpans, Region
from gracekv.registry import bounded


@PRECISIONS.register("allocated", works_sharded=True)
class AllocatedPrecision(AllocatingPrecision):
    """Each entry is dropped or kept at 4, 8 or all bits by marginal gain per byte.

    Candidates are the entries that the budget would hold at 4 bits. Each may be bought at 4 bits,
    then widened to 8 and to the model's dtype. The operation with the largest gain per byte over
    all layers and heads comes first, until the bytes are spent. Dropping an entry costs an error of
    its token scores times its head's sensitivity; rounding costs a share of that, measured for each
    head and width. The gain of an operation is its reduction of the sum of squared errors, since
    rounding errors are independent and the divergence grows with the square of an error. With a
    budget in entries, all entries stay unquantised.

    Source: ours; rounding as in `uniform`.

    Cost: rounding a sample of tokens, and a sort of three operations for each candidate.

    Attributes:
        group: how many numbers share a scale and a zero point.
        keys: always "channel", as in `uniform`; a block holds entries of one width.
        values: always "token".
        sinks: number of first prompt tokens that are dropped or stay unquantised, as in `uniform`.
        rounding: weight of a measured rounding error relative to that of dropping an entry.
    """

    group: int = bounded(32, at_least=1)
    keys: Literal["channel"] = "channel"
    values: Literal["token"] = "token"
    sinks: int = bounded(4, at_least=0)
    rounding: float = bounded(0.5, above=0)

    @property
    def stored(self) -> tuple[UniformPrecision, ...]:
        return tuple(UniformPrecision(bits, self.group, sinks=self.sinks) for bits in (4, 8))

    def asks(self, spans: PromptSpans) -> Tensor:
        return torch.tensor(spans.last(_QUERIES))

    def measured(self, capture: LayerCapture, region: Region) -> tuple[Tensor, ...]:
        """The losses of 4 and 8 bits float64 [G, 2], see `rounding_loss`.

        On a GPU, its arguments instead, because all layers are rounded at once.
        """
        sampled = samples(capture, region, self.group)
        if capture.info.device.type == "cuda":
            return sampled
        return (rounding_loss(*sampled, self.codings[::-1]),)

    def allocate(
        self,
        info: CaptureInfo,
        measured: Sequence[tuple[Tensor, ...]],
        candidates: Selection,
        worth: Tensor,
        budget: int,
    ) -> Tensor:
        costs = WidthCosts.of(self.stored, info)
        device = measured[0][0].device
        parts = [torch.cat([x.to(device) for x in own]) for own in zip(*measured, strict=True)]
        if len(parts) > 1:
            keys, values, queries = parts
            parts = [rounding_loss(keys, values, queries, self.codings[::-1])]
        loss = self.rounding * parts[0].cpu()
        check_finite([loss], info.dtype)
        head = candidates.head_of_entry()
        # Cuts over several processes are found on the CPU.
        device = worth.device if info.shard.ranks == 1 else torch.device("cpu")
        entries = Entries(
            worth=worth.to(device).double().square(),
            head=upload(head, device),
            loss=torch.nn.functional.pad(loss.square(), (0, 1)),
            fixed=candidates.start.to(device) < self.sinks,
            place=_places(head, info),
        )
        level = allocated_widths(entries, costs, budget, info.shard)
        return torch.tensor((0, *costs.bits), dtype=torch.uint8)[level]


def _places(head: Tensor, info: CaptureInfo) -> Tensor | None:
    """int64 [E]: ranks of the entries of `head` int64 [E] among those of all processes.

    None without other processes.
    """
    if info.shard.ranks == 1:
        return None
    counts = torch.bincount(head, minlength=info.layers * info.kv_heads)
    most = int(info.shard.maximum(counts.max()))
    _, step = rows_and_steps(counts)
    return info.shard.among_all(head * most + step, info.kv_heads * most)


# Number of evenly spaced tokens to round, and of last prompt queries that attend to them. Ours.
_TOKENS, _QUERIES = 256, 16


def samples(capture: LayerCapture, region: Region, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors that `rounding_loss` reads, from evenly spaced positions of `region`.

    Keys [G, B, d], values [G, n, d] and queries float32 [G, Q, d].
    """
    count, dim = min(_TOKENS, region.length), capture.info.entry_dim
    # Blocks of keys are padded with the last token, as in the cache.
    filled = torch.arange(-(-count // group) * group).clamp_(max=count - 1)
    at = on_device(region.start + filled * region.length // max(count, 1), capture.keys.device)
    queries = capture.queries_at(list(capture.spans.last(_QUERIES)))[..., :dim].float()
    queries = rearrange(queries * capture.scale, "(g n) p d -> g (n p) d", g=capture.kv_heads)
    return capture.keys[:, at, :dim], capture.values[:, at[:count], :dim], queries


def rounding_loss(
    keys: Tensor, values: Tensor, queries: Tensor, codings: Sequence[Coding]
) -> Tensor:
    r"""float64 [G, C]: the output error of rounding an entry relative to dropping it.

    Rounding adds d_v + (q . d_k) (v - mean) to an entry's share of the output, where q is a query
    times the attention scale; dropping the entry removes v - mean. The loss is sqrt(|d_v|^2 / |v -
    mean|^2 + (q . d_k)^2), with the mean of each square over tokens and queries.

    Source: ours.

    Args:
        keys: [G, B, d] of n entries of each head, in whole blocks.
        values: [G, n, d].
        queries: [G, Q, d] float32, times the attention scale.
        codings: C codings with one group size.
    """
    heads, count, dim = values.shape
    if not count:
        return torch.zeros(heads, len(codings), dtype=torch.float64)
    (group,) = {coding.group for coding in codings}
    levels = [coding.most for coding in codings]
    keys = keys.unflatten(1, (-1, group))
    codes, scale, zero = quantised(keys, -2, *levels)
    off = (zero + scale * codes - keys).float().flatten(2, 3)[:, :, :count]
    of_keys = (queries @ off.mT).square().mean(dim=(2, 3))
    spread = values.float()
    spread = (spread - spread.mean(dim=1, keepdim=True)).square().sum(dim=(1, 2))
    values = values.unflatten(2, (-1, min(group, dim)))
    codes, scale, zero = quantised(values, -1, *levels)
    of_values = (zero + scale * codes - values).square().sum(dim=(2, 3, 4))
    # All tokens may have equal values: a loss above 1 counts as 1 but must stay finite.
    of_values = of_values.double() / spread.clamp_min(torch.finfo(torch.float32).tiny)
    return (of_keys + of_values).sqrt().T.double()
