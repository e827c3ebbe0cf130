"""Windows of equal length over the packed entries of all heads, for kernels without ragged rows.

The entries of a layer lie one head after the other. C windows of one length, at one distance, cover
them: a strided view, so nothing is copied or padded, every thread gets the same work, and short
heads cost what they hold. A window that overlaps several heads gets the queries of each; a bias
hides the other heads' entries. The partial results of a head are merged by log-sum-exp.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gracekv.backends.base import sequence_of_row
from gracekv.backends.latest import Latest
from gracekv.cache.base import RaggedLayer
from gracekv.kernels import ragged

# Most query rows of a window over several heads. Each row holds a float of bias an entry, so more
# would take a large part of the memory that compression frees; beyond, heads go one by one. Ours.
_SHARED_ROWS = 32
# Most query rows of a window inside one head, where all rows share one bias. Ours.
_OWN_ROWS = 256
# Cost of a window, in units of one query row over one entry: entries * (rows + _ENTRY_COST)
# + _CALL_COST. Fitted to torch's CPU kernel with d = 64 on one x86 core.
_ENTRY_COST, _CALL_COST = 7, 600
# Numbers of windows to try, in multiples of the threads and of the nonempty rows.
_PER_THREAD = (1, 2, 3, 4, 6, 8, 12, 16)
_PER_ROW = (1, 2, 3, 4)
# Fewest entries of a window.
_SHORTEST = 64
# Size of a mixing matrix up to which one product is faster than a gather per query. Ours.
_MIXING = 4096
# Parallel windows to plan for on devices other than CPUs.
_PARALLEL = 16


@dataclass(frozen=True, slots=True, eq=False)
class KVWindows:
    """The windows of a layer for queries of one shape.

    Partial results lie in this order: C * R window rows, one blank row, and with a tail
    [B, n * Tq, G] rows of it.

    Attributes:
        keys: [C, 1, c, d], windows over the packed keys; a view.
        values: [C, 1, c, d].
        bias: float32 [C, 1, R or 1, c], log multiplicity, -inf where the entry is another head's
            or another window's; None if all are 0.
        gather: int64 [C, 1, R], the query (b, h, t), flattened, of each window row.
        slots: int64 [B*H*Tq, 1 + P], the places of a query's partial results: the tail's, then
            those of its head's windows; the blank row where there are fewer.
        mixing: float32 [B*H*Tq, partial results], 0 at a query's slots and -inf elsewhere; None
            where that would be large.
        blank_lse: float32 [1], -inf.
        blank_output: [1, d], 0.
        complete: whether every row of the layer holds entries.
    """

    keys: Tensor
    values: Tensor
    bias: Tensor | None
    gather: Tensor
    slots: Tensor
    mixing: Tensor | None
    blank_lse: Tensor
    blank_output: Tensor
    complete: bool

    @property
    def held_bytes(self) -> int:
        """Bytes of everything that is no view of the packed tensors."""
        held = (
            self.bias,
            self.gather,
            self.slots,
            self.mixing,
            self.blank_lse,
            self.blank_output,
        )
        return sum(t.numel() * t.element_size() for t in held if t is not None)


Key = tuple[int, int, int, tuple[int, ...] | None]


class WindowedLayer:
    """A layer and its windows for the latest query shape.

    Attributes:
        layer: the packed entries.
    """

    def __init__(self, layer: RaggedLayer) -> None:
        self.layer = layer
        self._latest: Latest[Key, KVWindows | None] = Latest()

    def windows(self, shape: tuple[int, ...], rows: Tensor | None) -> KVWindows | None:
        """The windows for queries of `shape` (B, H, Tq) and `rows` [B]; built once for both.

        None if the heads are to be read one by one: there are no entries, or too many queries a
        head.
        """
        batch, heads, tokens = shape
        key = (batch, heads, tokens, None if rows is None else tuple(rows.tolist()))

        def build() -> KVWindows | None:
            # Not inference tensors: the windows outlive this call's mode.
            with torch.inference_mode(False), torch.no_grad():
                return _windows(self.layer, batch, heads, tokens, rows)

        return self._latest.get(key, build)

    @property
    def held_bytes(self) -> int:
        """Bytes of the latest windows."""
        windows = self._latest.value
        return 0 if windows is None else windows.held_bytes


@dataclass(frozen=True, slots=True, eq=False)
class _WindowLayout:
    """C windows of `length` entries, `step` apart; a window owns its first `step` entries.

    Attributes:
        first: int64 [C], the first nonempty row that a window's own entries belong to.
        last: int64 [C], the last one.
        reach: k, the most rows in a window.
    """

    count: int
    step: int
    length: int
    first: Tensor
    last: Tensor
    reach: int

    @classmethod
    def of(cls, offsets: Tensor, count: int) -> _WindowLayout:
        """`offsets` int64 [Z+1] of the nonempty rows."""
        entries = int(offsets[-1])
        step = entries // count
        starts = torch.arange(count) * step
        ends = torch.cat([starts[1:], offsets[-1:]])
        first = torch.searchsorted(offsets, starts, right=True) - 1
        last = torch.searchsorted(offsets, ends) - 1
        # The last window starts at (count - 1) * step and ends with the entries.
        length = entries - (count - 1) * step
        return cls(count, step, length, first, last, int((last - first).max()) + 1)

    def window_rows(self, rows: int) -> int:
        """R for `rows` queries a head, even: odd numbers are slower than the next even one."""
        shared = self.reach * rows
        return shared + (shared > 1 and shared % 2)

    def fits(self, rows: int) -> bool:
        return rows <= _OWN_ROWS if self.reach == 1 else self.reach * rows <= _SHARED_ROWS

    def cost(self, rows: int, threads: int) -> int:
        a_window = self.length * (self.window_rows(rows) + _ENTRY_COST) + _CALL_COST
        return -(-self.count // threads) * a_window


def _windows(
    layer: RaggedLayer, batch: int, heads: int, tokens: int, rows: Tensor | None
) -> KVWindows | None:
    of_row = sequence_of_row(rows, batch, layer.sequences, torch.device("cpu")).cpu()
    continuations = torch.bincount(of_row, minlength=layer.sequences)
    group = heads // layer.heads
    # Every head gets as many query rows as the sequence with the most continuations needs.
    per_head = int(continuations.max()) * group * tokens
    lengths = layer.lengths
    nonempty = lengths.nonzero()[:, 0]
    layout = _cheapest_layout(ragged.offsets(lengths[nonempty]), per_head, layer)
    if layout is None:
        return None
    count, wide = layout.count, layout.window_rows(per_head)

    # Place of each query among those of its head: continuation, query head of the group, token.
    rank = (of_row[:, None] == of_row).tril(-1).sum(1)
    query = torch.arange(batch * heads * tokens).view(batch, layer.heads, group * tokens)
    place = rank[:, None, None] * group * tokens + torch.arange(group * tokens).expand_as(query)
    row = (of_row[:, None] * layer.heads + torch.arange(layer.heads))[..., None].expand_as(query)
    queries = torch.zeros(len(lengths), per_head, dtype=torch.int64)
    queries[row, place] = query

    # [C, k]: the nonempty rows that each window serves, clamped where it serves fewer.
    served = layout.first[:, None] + torch.arange(layout.reach)
    real = served <= layout.last[:, None]
    served = served.clamp(max=len(nonempty) - 1)
    gather = torch.zeros(count, wide, dtype=torch.int64)
    gather[:, : layout.reach * per_head] = queries[nonempty[served]].flatten(1)

    # first_slot [Z, P]: the first window row of each partial result of a layer row.
    blank = count * wide
    window = torch.arange(count)[:, None].expand_as(served)[real]
    slot = torch.arange(layout.reach).expand_as(served)[real]
    owner = nonempty[served[real]]
    first_window = torch.full((len(lengths),), count).scatter_reduce(0, owner, window, "amin")
    nth = window - first_window[owner]
    first_slot = torch.full((len(lengths), int(nth.max()) + 1), -1)
    first_slot[owner, nth] = window * wide + slot * per_head
    slots = torch.where(first_slot[row] < 0, blank, first_slot[row] + place[..., None])
    slots = slots.flatten(0, 2)
    # The tail's results are [B, n * Tq, G].
    tail = torch.arange(query.numel()).view(batch, group * tokens, layer.heads).mT.flatten()
    tail += blank + 1
    slots = torch.cat([tail[:, None], slots], dim=1)
    mixing = None
    if query.numel() * (blank + 1 + query.numel()) <= _MIXING:
        mixing = torch.full((query.numel(), blank + 1 + query.numel()), -math.inf)
        mixing.scatter_(1, slots, 0.0)

    device = layer.keys.device
    keys, values = (
        x.contiguous().unfold(0, layout.length, layout.step).mT[:, None]
        for x in (layer.keys, layer.values)
    )
    return KVWindows(
        keys=keys,
        values=values,
        bias=_bias(layer, layout, nonempty[served], real, per_head, wide),
        gather=gather[:, None].to(device),
        slots=slots.to(device),
        mixing=None if mixing is None else mixing.to(device),
        blank_lse=torch.full((1,), -math.inf, device=device),
        blank_output=keys.new_zeros(1, keys.shape[-1]),
        complete=len(nonempty) == len(lengths),
    )


def _cheapest_layout(offsets: Tensor, per_head: int, layer: RaggedLayer) -> _WindowLayout | None:
    """The layout of least cost among those tried; None if none fits."""
    entries, rows = int(offsets[-1]) if len(offsets) > 1 else 0, len(offsets) - 1
    if not entries or not per_head:
        return None
    threads = torch.get_num_threads() if layer.keys.device.type == "cpu" else _PARALLEL
    counts = {threads * m for m in _PER_THREAD} | {
        -(-rows * m // threads) * threads for m in _PER_ROW
    }
    counts |= {rows * m for m in _PER_ROW}
    allowed = sorted(c for c in counts if c * _SHORTEST <= entries) or [1]
    layouts = [x for x in (_WindowLayout.of(offsets, c) for c in allowed) if x.fits(per_head)]
    return min(layouts, key=lambda x: x.cost(per_head, threads), default=None)


def _bias(
    layer: RaggedLayer,
    layout: _WindowLayout,
    served: Tensor,
    real: Tensor,
    per_head: int,
    wide: int,
) -> Tensor | None:
    device = layer.keys.device
    log_multiplicity = layer.log_multiplicity
    plain = layout.reach == 1 and layout.step == layout.length
    if plain and not bool(log_multiplicity.any()):
        return None
    entry = torch.arange(layout.count)[:, None] * layout.step + torch.arange(layout.length)
    owner = (entry // layout.step).clamp(max=layout.count - 1)
    begin, end = layer.offsets[served][..., None], layer.offsets[served + 1][..., None]
    own = (entry[:, None] >= begin) & (entry[:, None] < end) & real[..., None]
    own &= (owner == torch.arange(layout.count)[:, None])[:, None]
    here = log_multiplicity[entry.to(device)][:, None]
    bias = torch.where(own.to(device), here, -math.inf)
    if layout.reach > 1:
        shared = bias.repeat_interleave(per_head, dim=1)
        bias = torch.zeros(layout.count, wide, layout.length, device=device)
        bias[:, : shared.shape[1]] = shared
    return bias[:, None]
