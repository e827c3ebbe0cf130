"""`LimitedCache`: a cache that stays within a limit while generating."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gracekv.backends.base import sequence_of_row
from gracekv.cache import Occupancy, RaggedEntries
from gracekv.cache.closing import closed, known_reach, oldest_position
from gracekv.decode import Decoder, HeldLayer, Limit
from gracekv.decode.cut import kept_entries, packed_entries
from gracekv.decode.limit import CutHistory
from gracekv.distributed import head_shard
from gracekv.errors import BudgetError, CacheError
from gracekv.hf.cache import GraceCache
from gracekv.hf.limited_layer import LimitedLayer
from gracekv.hf.packed_layer import PackedLayer
from gracekv.kernels import ragged
from gracekv.kernels.rope import Rope
from gracekv.prefill.model_layers import rotations_up_to
from gracekv.undo import full_float32


class LimitedCache(GraceCache):
    """A `GraceCache` that is cut before a step that would exceed its limit.

    The packed entries are shared until the first cut, which copies the entries that stay, so that
    each row has its own. Positions still count all tokens that were read; on request, older keys
    are rotated closer where they would be too far away: see `Limit.positions`.

    Args:
        source: a cache with an empty tail, whose entries are not quantised.
        model: the model that the cache belongs to.
        limit: the most that it may hold.
        strategy: chooses the entries that stay.
        scores: L tensors float32 [E], the scores of the packed entries; inf for entries outside
            the compressed region, which stay in a cut before the first query. None if unknown.

    Attributes:
        cuts: number of cuts so far.

    Raises:
        BudgetError: the limit is too small for the entries that must stay.
        CacheError: the model's heads are spread over processes, or its positions cannot be closed.
    """

    limit: Limit
    grace_layers: tuple[LimitedLayer, ...]

    def __init__(
        self,
        source: GraceCache,
        model: Any,
        limit: Limit,
        strategy: Decoder,
        scores: Sequence[Tensor] | None = None,
    ) -> None:
        self.__dict__.update(source.__dict__)
        self.limit, self._strategy, self._start, self._scores = limit, strategy, source, scores
        # A function, which deep copies of the cache share, and with it the model.
        self._rotations: Callable[[int], list[Rope]] = lambda now: rotations_up_to(model, now)
        if head_shard(model).ranks > 1:
            raise CacheError(
                "The model's heads are spread over processes, and a cut compares all of them. "
                "Generate without a limit, or load the model without tp_plan."
            )
        packed = source.grace_layers[0].packed.entries
        self._units = len(source.grace_layers) * packed.heads
        self._entry_bytes = 2 * packed.dim * packed.dtype.itemsize
        self._known = known_reach(model, limit.positions)
        self.reset()
        self._check_size()

    def reset(self) -> None:
        """Drop everything after the packed prompts."""
        start, closes = self._start, self._known is not None
        self.padding = start.padding
        # The distance of the oldest rotated key, without the tail.
        self._reach = start.packed_length - (oldest_position(start.packed) if closes else 0)
        self._seen: Tensor | None = None
        self.cuts = self._most = 0
        self._read: list[int] = []
        self._left: list[Tensor] = []
        self._place([LimitedLayer(x.packed, self._strategy.queries) for x in start.grace_layers])
        for number, layer in enumerate(self.grace_layers):
            layer.carried = None if self._scores is None else self._scores[number]
            layer.places = layer.packed.entries.exact.positions if closes else None
        self._count()

    def with_empty_tail(self) -> LimitedCache:
        twin = copy.copy(self)
        twin.reset()
        return twin

    def with_static_tail(self, capacity: int, *, rows: int | None = None) -> GraceCache:
        """Raises `CacheError`: a cache for compiled steps cannot be cut."""
        raise CacheError(
            "A cache with a limit is cut while it grows, but a static tail has a fixed size. Use "
            "result.new_cache() without a limit for compiled steps and CUDA graphs."
        )

    def activate_past_recording(self) -> None:
        """Raises `CacheError`: assisted decoding would undo cuts."""
        raise CacheError(
            "Assisted decoding and prompt lookup remove tokens again, and a cache with a limit "
            "cannot undo a cut. Generate without an assistant, or without a limit."
        )

    def mark(self) -> Callable[[], None]:
        """As `GraceCache.mark`, but after a cut the function goes back to the packed prompts."""
        cuts, back = self.cuts, super().mark()
        return lambda: back() if self.cuts == cuts else self.reset()

    def packed_mask(self, rows: int, device: torch.device) -> Tensor:
        if self._seen is None:
            return super().packed_mask(rows, device)
        own = self.grace_layers[0].rows_of(rows)
        return self._seen[sequence_of_row(own, rows, len(self._seen), self._seen.device)].to(device)

    @property
    def accounting(self) -> Occupancy:
        """Entries and bytes, current and at the peak."""
        now = super().accounting
        most = max(now.entries, self._most)
        return Occupancy(now.entries, now.bytes, most, most * self._entry_bytes, self.cuts)

    @property
    def history(self) -> CutHistory:
        """The tokens read since the prompt, and what the cuts left of them; for a single row."""
        if not self.limit.history or self.grace_layers[0].batch > 1:
            return super().history
        first, keys = self._start.packed_length, self._start.packed.layers[-1].exact.keys
        # Removed tokens stay in `_read` until others are read.
        count = self.packed_length + self.grace_layers[0].tail_length - first
        tokens = torch.tensor(self._read[:count], dtype=torch.long, device="cpu")
        return CutHistory(first, tokens, (*self._left,), keys)

    def _count(self) -> None:
        """Count the packed entries of each sequence in all layers and heads."""
        self._each = self._sums([x.packed.entries.lengths for x in self.grace_layers])

    def _sums(self, counts: Sequence[Tensor]) -> list[int]:
        """The sum of each sequence over layers and heads; `counts` are L int64 [S G]."""
        return torch.stack([*counts]).view(len(counts), len(self.padding), -1).sum((0, 2)).tolist()

    def _target(self, length: int) -> int:
        return self.limit.target(length, self._units, self._entry_bytes)

    def _check_size(self) -> None:
        """Raise `BudgetError` unless the entries of every sequence that must stay fit."""
        units, stays, why = self._units, self._each, "the strategy keeps the prompt"
        if self._scores is None and not self._strategy.keep_prompt:
            why = "the packed entries have no scores by which they could be cut"
        elif not self._strategy.keep_prompt:
            counted = [ragged.offsets(layer.isinf().long().cpu()) for layer in self._scores or ()]
            each_layer = zip(counted, self.grace_layers, strict=True)
            stays = self._sums([n[x.packed.entries.exact.offsets].diff() for n, x in each_layer])
            why = "the part of the prompt that was not compressed stays"
        every, each = self.limit.every, [-(-count // units) + self.limit.window for count in stays]
        lengths = [self.packed_length + 1 - hidden for hidden in self.padding]
        sizes = list(zip(map(self._target, lengths), lengths, each, strict=True))
        if self._strategy.name != "none" and any(has < units * x for has, _, x in sizes):
            # Rounded down, so that this ratio works.
            ratio, least = min(n * 100 // x / 100 for _, n, x in sizes), max(each)
            most = f"a ratio of at most {ratio:.2f}" if ratio >= 1 else "no ratio"
            left, size = max(0, min(sizes)[0] // units), units * (least + every) * self._entry_bytes
            raise BudgetError(
                f"The limit leaves {left} entries per head, but {least} must stay: {why}, and so "
                f"do the last {self.limit.window} tokens. Use entries_per_head of at least "
                f"{least}, or kv_bytes of at least {size}; {most} works. Or compress the "
                f"prompt more, with a recipe that scores its tokens."
            )

    def make_room(self, tokens: Tensor, mask: Any) -> None:
        """Cut if `tokens` would exceed the limit.

        Args:
            tokens: tokens of the next step, ids [B, n] or embeddings [B, n, D].
            mask: the model's attention mask [B, length], or None.

        Raises `CacheError` for more tokens than an interval, and for a mask of another shape.
        """
        first, new = self.grace_layers[0], tokens.shape[1]
        cached = first.tail_length
        room = self._room(cached + new)
        bound = sys.maxsize if self._known is None else self._known
        far = self._reach + cached + new > bound and self._strategy.name != "none"
        if far or (cached + new > room and (cached or first.carried is not None)):
            self._cut(mask, min(bound // 2, bound - new) if far else None)
            cached, room = 0, self._room(new)
        if self._reach + cached + new > bound:
            raise CacheError(
                f"A head holds {self._reach} entries, and with {new} more tokens the first of them "
                f"would lie beyond the {bound} positions that the model supports. Use a smaller "
                f"limit."
            )
        if cached + new > room:
            raise CacheError(
                f"A step of {new} tokens exceeds the limit, which has room for {room} after a cut. "
                f"Feed at most {self.limit.every} tokens a step: model.generate(..., "
                f"prefill_chunk_size={self.limit.every})."
            )
        for layer in self.grace_layers:
            layer.room = room
        tail = self._units * first.batch * (cached + new)
        self._most = max(self._most, sum(self._each) + tail)
        if self.limit.history:
            # Tokens that were removed are read again.
            del self._read[self.packed_length + cached - self._start.packed_length :]
            self._read += tokens[0].tolist() if tokens.ndim == 2 else [-1] * new

    def _room(self, tail: int) -> int:
        """The number of tokens that the tail may hold, if it holds `tail`."""
        if self._strategy.name == "none":
            return sys.maxsize
        length, more = self.packed_length + tail, self._units * self.limit.every
        each = zip(self._each, self.padding, strict=True)
        return min((self._target(length - x) + more - own) // self._units for own, x in each)

    @torch.no_grad()
    def _cut(self, mask: Any, within: int | None = None) -> None:
        """Cut each row separately; with `within`, entries are moved within that many positions."""
        if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2):
            raise CacheError(
                "A cut has to know which tokens are padding. Pass a 2D attention_mask [B, length], "
                "or none."
            )
        first = self.grace_layers[0]
        rows, packed = first.batch, self.packed_length
        length, device = packed + first.tail_length, first.packed.entries.device
        visible = torch.ones(rows, length, dtype=torch.bool, device=device)
        visible[:, :packed] = self.packed_mask(rows, device)
        if mask is not None:
            # There are several rows for each of ours if samples or beams begin with this step.
            each = max(1, len(mask) // rows)
            visible[:, packed:] = mask[::each, packed:length].bool()
        with full_float32():
            kept = [self._cut_row(row, visible[row], within) for row in range(rows)]
        # After an error from here on, `mark` goes back to the packed prompts.
        self.cuts += 1
        self.padding = tuple((~visible).sum(dim=1).tolist())
        self._seen = visible if any(self.padding) else None
        self._reach += first.tail_length
        for layer, own in zip(self.grace_layers, zip(*kept, strict=True), strict=True):
            backend, joined = layer.packed.backend, RaggedEntries.stack([x.entries for x in own])
            layer.packed = PackedLayer(joined, backend.prepare(joined), backend, length)
            layer.reset()
            layer.carried = torch.cat([x.scores for x in own])
            places = [x.places for x in own if x.places is not None]
            layer.places = torch.cat(places) if places else None
        if within is not None:
            longest = (int(layer.packed.entries.lengths.max()) for layer in self.grace_layers)
            self._reach = max(within, *longest)
        self._count()
        if self.limit.history:
            positions = [x.packed.entries.index()[1].cpu() for x in self.grace_layers]
            self._left.append(torch.cat(positions).bincount(minlength=length).int())

    def _cut_row(self, row: int, visible: Tensor, within: int | None) -> list[_KeptEntries]:
        """A row's entries that stay, by layer; `visible` bool [length] is False for padding."""
        length, strategy, kept = int(visible.sum()), self._strategy, list[_KeptEntries]()
        ropes, prompt = self._rotations(length), self._start.packed_length

        def held(number: int) -> HeldLayer:
            return self.grace_layers[number].held(number, row, visible, prompt, ropes[number])

        target, window = self._target(length), self.limit.window
        masks, scores = kept_entries(len(self.grace_layers), held, strategy, target, window)
        for number, (stays, score) in enumerate(zip(masks, scores, strict=True)):
            layer = held(number)
            entries = packed_entries(layer, stays, strategy)
            places = None if layer.places is None else layer.places[stays].int()
            if places is not None and within is not None:
                moved = closed(replace(entries, positions=places), layer.now, ropes[number], within)
                entries, places = replace(moved, positions=entries.positions), moved.positions
            kept.append(_KeptEntries(entries, score[stays].float(), places))
        return kept


class _KeptEntries(NamedTuple):
    """What a cut leaves of one row in one layer.

    Attributes:
        entries: E entries.
        scores: float32 [E].
        places: int32 [E], the positions that keys are rotated to; None if gaps are never closed.
    """

    entries: RaggedEntries
    scores: Tensor
    places: Tensor | None
