"""Report data as bytes, which the page's script decodes (assets/codec.js).

Everything that grows with the prompt goes into one block of bytes; a table says where each part
lies. A head's context is run-length encoded, so 32K tokens of 112 heads take a few megabytes:

    run = (tokens << 2) | kind      kind 0: dropped, 1: exact, 2: one merged entry

as variable-length integers (7 bits a byte, the lowest first, the top bit says that more follow).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gracekv.kernels.ragged import offsets
from gracekv.report.data import ReportColumn, ReportData
from gracekv.report.entries import KeptEntries
from gracekv.value.coded import CodedRelevance

DROPPED, EXACT, MERGED = 0, 1, 2

# Bytes that the relevance of all columns together may take before heads, then layers, are
# averaged: with the runs, a page of 32K tokens stays below 15 MB. Source: ours.
_RELEVANCE_BYTES = 7 * 2**20


# What the page shows of an `Accounting`, and of an `AuctionCurve`.
_ACCOUNTING = (
    "budget", "spent", "floor_spent", "recent", "bytes", "metadata_bytes", "full_bytes",
    "backend_bytes", "utility", "bound", "certified_ratio", "entries",
)  # fmt: skip
_CURVE = ("entries", "utility", "floor_entries", "bound_entries", "bound")


def encode(data: ReportData) -> tuple[dict[str, Any], bytes]:
    """A header of plain data, and the block of bytes."""
    parts, history = dict[str, bytes](), data.history
    for name, texts in (("text", data.tokens), ("written", data.written)):
        parts[name] = "".join(texts).encode("utf-8", "replace")
        # Scripts count text in units of UTF-16.
        units = [len(text.encode("utf-16-le", "replace")) // 2 for text in texts]
        parts[f"{name}Lengths"] = varints(np.array(units, dtype=np.int64))
    cuts = None
    if history is not None:
        parts["held"] = b"".join(map(_u32, history.held))
        cuts = {"first": history.first, "lengths": [len(own) for own in history.held]}
    entries, spans = data.columns[0].entries, data.spans
    columns = [_column(parts, number, data) for number in range(len(data.columns))]
    header = {
        "model": data.model,
        "spans": [spans.context_start, spans.context_end, spans.question_end, spans.length],
        "layers": entries.layers,
        "heads": entries.heads,
        "region": list(entries.region),
        "columns": columns,
        "written": len(data.written),
        "cuts": cuts,
    }
    table, block = {}, bytearray()
    for name, part in parts.items():
        table[name] = [len(block), len(part)]
        # Every part begins at a multiple of 4, as typed arrays want.
        block += part + b"\0" * (-len(part) % 4)
    return {**header, "parts": table}, bytes(block)


def _column(parts: dict[str, bytes], number: int, data: ReportData) -> dict[str, Any]:
    column = data.columns[number]
    entries, curve = column.entries, column.curve
    stream, starts = run_lengths(entries)
    merged = entries.length > 1
    parts[f"runs.{number}"] = stream
    parts[f"runStarts.{number}"] = _u32(starts)
    parts[f"entryStarts.{number}"] = _u32(entries.offsets)
    before = offsets(merged.long())
    parts[f"mergedStarts.{number}"] = _u32(before[entries.offsets])
    share = entries.multiplicity[merged] / entries.length[merged]
    parts[f"weights.{number}"] = _u8((share * 255).round().clamp(0, 255))
    if entries.depth is not None:
        depth = torch.where(entries.depth < 0, 127, entries.depth.clamp(max=126))
        floor = 0 if entries.floor is None else entries.floor * 128
        parts[f"origins.{number}"] = _u8(depth + floor)
    if entries.value_change is not None:
        parts[f"changes.{number}"] = _u8((entries.value_change * 100).round())
        # An octave of multiplicities is 16 steps.
        steps = (16 * entries.multiplicity.clamp_min(1e-6).log2()).round() + 128
        parts[f"masses.{number}"] = _u8(steps.clamp(0, 255))
    if column.slots is not None:
        parts[f"slots.{number}"] = _u32(column.slots)
    return {
        "label": column.label,
        "answer": column.answer,
        "represents": column.represents,
        "pipeline": settings(column),
        "accounting": _plain(column.accounting, *_ACCOUNTING),
        "timings": dict(column.timings.as_dict()),
        "hasFloor": entries.floor is not None,
        "relevance": _relevance(parts, number, data.columns),
        "curve": None if curve is None else _plain(curve, *_CURVE),
    }


def run_lengths(entries: KeptEntries) -> tuple[bytes, Tensor]:
    """The runs of all heads, and int64 [L*G+1] the byte at which those of each head begin."""
    first, last = entries.region
    heads, width = len(entries.offsets) - 1, last - first
    head, start, end = entries.head_of_entry(), entries.start, entries.end
    begins = torch.ones(len(start), dtype=torch.bool)
    begins[1:] = head[1:] != head[:-1]
    before = torch.where(begins, first, end.roll(1))
    exact = end - start == 1
    # Exact tokens side by side are one run.
    joins = exact & exact.roll(1) & (start == before) & ~begins
    run = (~joins).cumsum(0) - 1
    opening = torch.nonzero(~joins).flatten()
    tokens = torch.zeros(len(opening), dtype=torch.int64).index_add_(0, run, end - start)
    kinds = torch.where(exact[opening], EXACT, MERGED)

    gaps = torch.nonzero(start > before).flatten()
    ends = torch.full((heads,), first)
    filled = torch.nonzero(entries.offsets.diff() > 0).flatten()
    ends[filled] = end[entries.offsets[1:][filled] - 1]
    open_end = torch.nonzero(ends < last).flatten()
    where = torch.cat(
        [
            head[opening] * width + start[opening] - first,
            head[gaps] * width + before[gaps] - first,
            open_end * width + ends[open_end] - first,
        ]
    )
    values = torch.cat(
        [
            tokens * 4 + kinds,
            (start - before)[gaps] * 4 + DROPPED,
            (last - ends)[open_end] * 4 + DROPPED,
        ]
    )
    order = where.argsort()
    numbers = values[order].numpy()
    sizes = torch.from_numpy(_varint_sizes(numbers))
    bytes_per_head = torch.zeros(heads, dtype=torch.int64)
    bytes_per_head.index_add_(0, where[order] // max(1, width), sizes)
    return varints(numbers), offsets(bytes_per_head)


def varints(numbers: np.ndarray) -> bytes:
    """Whole numbers from 0 to 2^35 as variable-length integers."""
    sizes = _varint_sizes(numbers)
    begins = np.cumsum(sizes) - sizes
    out = np.zeros(int(sizes.sum()), dtype=np.uint8)
    for place in range(int(sizes.max(initial=0))):
        here = sizes > place
        more = (sizes[here] > place + 1) * 128
        out[begins[here] + place] = ((numbers[here] >> (7 * place)) & 127) + more
    return out.tobytes()


def _varint_sizes(numbers: np.ndarray) -> np.ndarray:
    sizes = np.ones(len(numbers), dtype=np.int64)
    for bits in (7, 14, 21, 28):
        sizes += numbers >= 1 << bits
    return sizes


def _relevance(
    parts: dict[str, bytes], number: int, columns: Sequence[ReportColumn]
) -> dict[str, Any] | None:
    coded = columns[number].relevance
    if coded is None:
        return None
    heads = coded.codes.shape[1]
    everything = sum(x.relevance.codes.numel() for x in columns if x.relevance is not None)
    if everything > _RELEVANCE_BYTES:
        layers = torch.stack([layer.mean(0, keepdim=True) for layer in coded.decoded()])
        whole = everything // heads > _RELEVANCE_BYTES
        coded = CodedRelevance.of(layers.mean(0, keepdim=True) if whole else layers)
    parts[f"relevance.{number}"] = coded.codes.numpy().tobytes()
    shape = dict(zip(("layers", "heads", "length"), coded.codes.shape, strict=True))
    return {**shape, "low": coded.low, "high": coded.high}


def _plain(value: object, *names: str) -> dict[str, Any]:
    """Those attributes as plain data."""
    members = {name: getattr(value, name) for name in names}
    return {name: x.tolist() if isinstance(x, Tensor) else x for name, x in members.items()}


def settings(column: ReportColumn) -> list[list[str]]:
    """Pairs of stage and setting, as text."""
    lines = []
    for stage, setting in column.pipeline.items():
        if isinstance(setting, dict):
            fields = dict(setting)
            name = fields.pop("name", "")
            inside = ", ".join(f"{key}={value}" for key, value in fields.items())
            lines.append([stage, f"{name}({inside})" if inside else str(name)])
        else:
            lines.append([stage, str(setting)])
    return lines


def _u32(values: Tensor) -> bytes:
    return values.numpy().astype("<u4").tobytes()


def _u8(values: Tensor) -> bytes:
    return values.to(torch.uint8).numpy().tobytes()
