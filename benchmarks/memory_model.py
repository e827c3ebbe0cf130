"""Tables of `memory.py`: measurements, and estimates for larger models by the same rules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import machine

from gracekv.hf.capture import chunk_size
from gracekv.prefill.needs import CaptureSizes, Needs, held_positions
from gracekv.prefill.options import CaptureOptions
from gracekv.prefill.spans import PromptSpans
from gracekv.segment.curvature import BlockInput

MIB = 2**20
GROUPED = {
    "vocab_size": 8192,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 4,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 65536,
}
"""A random-weight Qwen2 with 7 query heads a KV head."""
NARROW = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 65536,
}
"""A random-weight Qwen2 whose keys and values outweigh everything else."""
_MODELS = {"smollm2": "smollm2 is SmolLM2-135M-Instruct"} | {
    name: f"{name} has random weights, {sizes['num_attention_heads']} query heads over "
    f"{sizes['num_key_value_heads']} KV heads, and {sizes['num_hidden_layers']} layers"
    for name, sizes in (("grouped", GROUPED), ("narrow", NARROW))
}


@dataclass(frozen=True)
class Shape:
    """The sizes that a model's memory depends on; `unit` is bytes per number."""

    layers: int
    hidden: int
    inner: int
    heads: int
    groups: int
    dim: int
    unit: int

    @property
    def sizes(self) -> CaptureSizes:
        per = self.layers * self.dim * self.unit
        return CaptureSizes(kv=2 * self.groups * per, queries=self.heads * per)

    def activations(self, tokens: int) -> int:
        """Peak bytes of one layer: three inner rows and three residual rows per token."""
        return tokens * self.unit * (3 * self.inner + 3 * self.hidden)


SHAPES = {
    "smollm2": Shape(30, 576, 1536, 9, 3, 64, 4),
    "grouped": Shape(4, 896, 4864, 14, 2, 64, 4),
    "narrow": Shape(24, 256, 1024, 4, 4, 64, 4),
    "Qwen2.5-7B, bf16": Shape(28, 3584, 18944, 28, 4, 128, 2),
    "Llama-3.1-8B, bf16": Shape(32, 4096, 14336, 32, 8, 128, 2),
}


def plain(shape: Shape, length: int) -> float:
    """MiB above the model of a forward pass with a cache, last logits only."""
    return (length * shape.sizes.kv + shape.activations(length)) / MIB


def compressed(shape: Shape, length: int, needs: Needs, ratio: float) -> tuple[float, float]:
    """MiB above the model: peak of a compression, and its result.

    Keys and values, held queries and hidden states; then the larger of a chunk of the prefill with
    its mask, and recomputed queries with the packed cache.
    """
    spans = PromptSpans(16, length - 48, length - 8, length)
    held = len(held_positions(needs, spans, shape.sizes, None))
    fixed = length * shape.sizes.kv + held * shape.sizes.queries
    streams = sum(isinstance(x, BlockInput) for x in needs.observers)
    fixed += streams * length * shape.hidden * shape.unit
    running = _running(shape, length, by_layers=False)
    again = 0
    if needs.later_queries and held < length:
        again = (
            max(needs.prompt_samples, 2 * max(needs.context_samples, default=0))
            * shape.sizes.queries
        )
    # A few float32 numbers per token and head: scores of several parts.
    scores = 6 * 4 * length * shape.layers * shape.groups
    packed = int(length / ratio) * (shape.sizes.kv + 8 * shape.layers * shape.groups)
    return (fixed + max(running, again + running, scores + packed)) / MIB, packed / MIB


def streamed(shape: Shape, length: int, needs: Needs, ratio: float) -> float:
    """Peak MiB above the model of a compression layer by layer.

    The residual stream and the embeddings, which the model's forward holds to its end; keys, values
    and held queries of one layer; kept entries, with a score and a position each; scores of all
    tokens; a chunk of the prefill and its mask.
    """
    spans = PromptSpans(16, length - 48, length - 8, length)
    sizes = replace(shape.sizes, again=False)
    held = len(held_positions(needs, spans, sizes, None))
    layer = (length * sizes.kv + held * sizes.queries) / shape.layers
    stream = 2 * length * shape.hidden * shape.unit
    packed = int(length / ratio) * (sizes.kv + 24 * shape.layers * shape.groups)
    scores = 4 * length * shape.layers * shape.groups
    running = _running(shape, length, by_layers=True)
    return (stream + layer + packed + scores + running) / MIB


def _running(shape: Shape, length: int, *, by_layers: bool) -> int:
    """Bytes of a chunk's activations, and of the mask of some rows; a single chunk has no mask."""
    chunk = chunk_size(CaptureOptions(), length, splits=True, by_layers=by_layers)
    mask = 0 if chunk == length else min(256 * length, 2**22)
    return shape.activations(chunk) + mask * shape.unit


def report(rows: list[dict[str, Any]]) -> str:
    """The page."""
    names = {row["model"] for row in rows}
    lines = [
        "# Memory of a compression",
        "",
        "- Highest and held memory over the loaded model, MiB, medians over fresh processes (n), "
        "with the lowest and the highest process in brackets; a prompt of 512 tokens was "
        "compressed in each before. CPU: resident memory (VmHWM, VmRSS); CUDA: "
        "torch's allocated memory. `prefill` is a plain forward pass with a cache and the last "
        "logits; held is what its cache keeps.",
        f"- machine: {'; '.join(sorted({row['machine'] for row in rows}))}; "
        f"{'; '.join(sorted({row['versions'] for row in rows}))}",
        f"- commit: {machine.commit()}; ratio {rows[0]['ratio']}",
        f"- Models, in float32: {'; '.join(_MODELS[x] for x in _MODELS if x in names)}. Rows "
        "called whole read everything before they compress (`CaptureOptions(stream=False)`).",
        "",
        "| model | tokens | row | highest | of prefill | held | cache | device, threads | n |",
        "|---|--:|---|--:|--:|--:|--:|---|--:|",
    ]
    lost = [x for x in rows if "status" in x]
    rows = [x for x in rows if "status" not in x]
    usual: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["allocator"] == "default":
            usual[row["model"] != "smollm2", row["model"], row["length"], row["device"],
                  row["row"]].append(row)  # fmt: skip
    for key, same in sorted(usual.items()):
        first, highest = same[0], median(x["highest"] for x in same)
        plain = [x["highest"] for x in usual.get((*key[:-1], "prefill"), ())]
        share = f"{highest / median(plain):.2f}" if plain else ""
        lines.append(
            f"| {first['model']} | {first['length']:,} | `{first['row']}` | "
            f"{_middle(x['highest'] for x in same)} | {share} | {_middle(x['held'] for x in same)} "
            f"| {first.get('cache', '')} | {first['device']}, {first['threads']} | {len(same)} |"
        )
    lines += [
        f"| {x['model']} | {x['length']:,} | `{x['row']}` | failed, status {x['status']} | | | | "
        f"{x['device']} | |"
        for x in lost
    ]
    lines += ["", "## Computed", "", *_computed(rows)]
    return "\n".join(lines) + "\n"


def _middle(values: Iterable[float]) -> str:
    """The median; if there are several, also the lowest and the highest."""
    found = sorted(values)
    spread = f" [{found[0]:,.0f}, {found[-1]:,.0f}]" if len(found) > 1 else ""
    return f"{median(found):,.0f}{spread}"


def _computed(rows: list[dict[str, Any]]) -> list[str]:
    from gracekv import Pipeline

    measured: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
    for row in rows:
        if row["allocator"] == "direct" or row["device"] == "cuda":
            measured[row["model"], row["length"]][row["row"]] = row["highest"]
    lines = [
        "From shapes alone: keys and values, queries that are held or computed again, hidden "
        "states, one chunk's activations and mask, scores, the packed cache; layer by layer the "
        "residual stream and one layer's keys, values and queries. 8x; MiB. In brackets: what was "
        "measured in a process whose allocator keeps nothing (`--allocator direct`).",
        "",
        "| model | tokens | keys and values | `prefill` | `gracekv` | `gracekv-plus-no-fit`, whole "
        "| layer by layer | result |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    plus = "gracekv-plus-no-fit"
    needs = {
        "gracekv": Pipeline.named("gracekv").needs(),
        f"whole {plus}": Pipeline.named(plus).needs(),
    }
    cells = [key for key in measured if len(measured[key]) > 1]
    lengths = (8192, 32768, 131072, 524288)
    cells += [(name, n) for name in list(SHAPES)[3:] for n in lengths]
    for name, length in sorted(cells, key=lambda key: (list(SHAPES).index(key[0]), key[1])):
        shape, found = SHAPES[name], measured[name, length]

        def cell(row: str, value: float, found: dict[str, float] = found) -> str:
            return f"{value:,.0f}" + (f" ({found[row]:,.0f})" if row in found else "")

        peaks = {key: compressed(shape, length, need, 8.0) for key, need in needs.items()}
        stream = streamed(shape, length, needs[f"whole {plus}"], 8.0)
        lines.append(
            f"| {name} | {length:,} | {length * shape.sizes.kv / MIB:,.0f} | "
            f"{cell('prefill', plain(shape, length))} | "
            + " | ".join(cell(key, peak) for key, (peak, _) in peaks.items())
            + f" | {cell(plus, stream)} | {peaks['gracekv'][1]:,.0f} |"
        )
    return lines
