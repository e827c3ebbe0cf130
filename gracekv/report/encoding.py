"""Report data as bytes, which the page's script decodes (assets/codec.js).

Everything that grows with the prompt goes into one block of bytes, which the page stores deflated;
a table gives the offset of each part. Entries are stored as arrays with one number per entry. The
numbers are small where possible, such as gaps instead of positions, so that they deflate well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gracekv.pipeline.run import CodedRelevance
from gracekv.report.data import ReportColumn, ReportData

# If relevance takes more bytes in all columns together, it is averaged over heads. A page of 32K
# tokens then stays below 15 MB. Source: ours.
_RELEVANCE_BYTES = 7 * 2**20


# The fields of `Accounting` and `AuctionCurve` that the page shows.
_ACCOUNTING = (
    "budget", "spent", "floor_spent", "recent", "bytes", "metadata_bytes", "full_bytes",
    "backend_bytes", "utility", "bound", "certified_ratio", "entries", "full_in_16_bits",
    "budget_bytes", "spent_bytes",
)  # fmt: skip
_CURVE = ("entries", "utility", "floor_entries", "bound")


def encode(data: ReportData) -> tuple[dict[str, Any], bytes]:
    """Return a header of plain data and the block of bytes."""
    parts, history = dict[str, bytes](), data.history
    for name, texts in (("text", data.tokens), ("written", data.written)):
        parts[name] = "".join(texts).encode("utf-8", "replace")
        # JavaScript measures text in UTF-16 code units.
        units = [len(text.encode("utf-16-le", "replace")) // 2 for text in texts]
        parts[f"{name}Lengths"] = _u32(torch.tensor(units, device="cpu"))
    cuts = None
    if history is not None:
        parts["held"] = b"".join(map(_u32, history.held))
        cuts = {"first": history.first, "lengths": [len(own) for own in history.held]}
    entries, spans = data.columns[0].entries, data.spans
    header = {
        "model": data.model,
        "spans": [spans.context_start, spans.context_end, spans.question_end, spans.length],
        "layers": entries.layers,
        "heads": entries.heads,
        "modelLayers": data.model_layers,
        "region": list(entries.region),
        "columns": [_column(parts, number, data) for number in range(len(data.columns))],
        "written": len(data.written),
        "cuts": cuts,
    }
    table, block = {}, bytearray()
    for name, part in parts.items():
        table[name] = [len(block), len(part)]
        # Every part begins at a multiple of 4, as typed arrays require.
        block += part + b"\0" * (-len(part) % 4)
    return {**header, "parts": table}, bytes(block)


def _column(parts: dict[str, bytes], number: int, data: ReportData) -> dict[str, Any]:
    column = data.columns[number]
    entries, curve = column.entries, column.curve
    # Number of dropped tokens between each entry and the previous one in its head.
    before = entries.end.roll(1)
    before[entries.offsets[:-1][entries.offsets.diff() > 0]] = entries.region[0]
    parts[f"entryStarts.{number}"] = _u32(entries.offsets)
    parts[f"gaps.{number}"] = _u32(entries.start - before)
    parts[f"sizes.{number}"] = _u32(entries.length)
    if entries.depth is not None:
        depth = torch.where(entries.depth < 0, 127, entries.depth.clamp(max=126))
        floor = 0 if entries.floor is None else entries.floor * 128
        parts[f"origins.{number}"] = _u8(depth + floor)
    if entries.value_change is not None:
        parts[f"changes.{number}"] = _u8((entries.value_change * 100).round())
    if entries.bits is not None:
        parts[f"bits.{number}"] = _u8(entries.bits)
    share = entries.multiplicity / entries.length
    # A file holds fitted multiplicities but no changes; exp(log(n)) may exceed n by rounding.
    if entries.value_change is not None or bool((share > 1.01).any()):
        # 16 steps double the multiplicity.
        steps = (16 * entries.multiplicity.clamp_min(1e-6).log2()).round() + 128
        parts[f"masses.{number}"] = _u8(steps.clamp(0, 255))
    else:
        parts[f"weights.{number}"] = _u8((share * 255).round().clamp(0, 255))
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
        "relevance": _relevance(parts, number, data),
        "curve": None if curve is None else _plain(curve, *_CURVE),
    }


def _relevance(parts: dict[str, bytes], number: int, data: ReportData) -> dict[str, Any] | None:
    if (coded := data.columns[number].relevance) is None:
        return None
    everything = sum(x.relevance.codes.numel() for x in data.columns if x.relevance is not None)
    if everything > _RELEVANCE_BYTES:
        layers = [layer.mean(0, keepdim=True) for layer in coded.decoded()]
        coded = CodedRelevance.of(torch.stack(layers))
    parts[f"relevance.{number}"] = coded.codes.numpy().tobytes()
    shape = dict(zip(("layers", "heads", "length"), coded.codes.shape, strict=True))
    return {**shape, "low": coded.low, "high": coded.high}


def _plain(value: object, *names: str) -> dict[str, Any]:
    """The named attributes of `value` as plain data."""
    members = {name: getattr(value, name) for name in names}
    return {name: x.tolist() if isinstance(x, Tensor) else x for name, x in members.items()}


def settings(column: ReportColumn) -> list[list[str]]:
    """Pairs of (stage, setting), as text."""
    lines = []
    for stage, setting in column.pipeline.items():
        if isinstance(setting, dict):
            name, fields = setting.get("name", ""), setting.items()
            inside = ", ".join(f"{key}={value}" for key, value in fields if key != "name")
            setting = f"{name}({inside})" if inside else name
        lines.append([stage, str(setting)])
    return lines


def _u32(values: Tensor) -> bytes:
    return values.numpy().astype("<u4").tobytes()


def _u8(values: Tensor) -> bytes:
    return values.to(torch.uint8).numpy().tobytes()
