"""Arguments of the `numba` backend's kernel."""

from __future__ import annotations

import ctypes

from gracekv.kernels.compiled import argument_fields


class CodedArgs(ctypes.Structure):
    """A coded part: E entries, N blocks, C scales per entry, Z rows.

    Fields are addresses of contiguous arrays, and sizes:
        key_codes, value_codes: uint8 [E, bytes].
        key_scale, key_zero: [N, d].
        value_scale, value_zero: [E, C].
        bias: float32 [E].
        offsets, blocks: int64 [Z + 1], the first entry and the first block of each row.
        entries, block_count, columns: E, N, C.
        bits, group_size: fields of `Coding`.
    """

    _fields_ = argument_fields(
        "key_codes key_scale key_zero value_codes value_scale value_zero bias offsets blocks "
        "entries block_count columns bits group_size"
    )


class AttentionArgs(ctypes.Structure):
    """Arguments of the kernel: addresses of contiguous arrays, and sizes.

    Fields, with E entries in Z = S * G rows, B continuations, n query heads per KV head, P splits
    of packed entries, C splits of each tail:
        keys, values: [E, d].
        bias: float32 [E].
        parts: `CodedArgs` [part_count].
        splits: int64 [P, 5]: row, first and last + 1 entry, first slot, and part: 0 for unquantised
            entries, else the coded part, counted from 1; sorted by row.
        row_splits: int64 [Z + 1], the first split of each row.
        sequence_start: int64 [S + 1], the first continuation of each sequence.
        continuations: int64 [B], batch rows ordered by sequence.
        sequence_of: int64 [B], the sequence of each continuation.
        query: float32 [B, G, n, d].
        tail_keys, tail_values: rows of d; the one of (b, g, s) is b * tail_batch + g * tail_head
            + s.
        mask: float32 [B, tail] to add to the tail's logits; 0 for none.
        partial: float32 [slots, d + 2], workspace: the queries of P splits, then [B, G, C, n] by
            continuation; output, maximum and sum of each.
        output: float32 [B, G, n, d].
        counters: int64 [1 + Z], zeros: number of splits taken, and of finished splits of each row.
        sink_logits: float32 [H], or 0.
        softcap: logit softcap, or 0.
        longest: entries per split of a tail; no packed split has more.
        most_queries: upper bound on the queries of any row.
    """

    _fields_ = argument_fields(
        "keys values bias parts part_count splits row_splits sequence_start continuations "
        "sequence_of query tail_keys tail_values mask partial output counters sink_logits entries "
        "dim heads group rows batch packed_splits packed_slots longest most_queries tail "
        "tail_splits tail_batch tail_head",
        "scale softcap",
    )
