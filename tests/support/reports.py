"""Reports of prompts that are too long to compress in a test."""

import torch

from gracekv.cache import Accounting, Timings
from gracekv.pipeline.run import CodedRelevance
from gracekv.prefill import PromptSpans
from gracekv.report.data import ReportColumn, ReportData
from gracekv.report.entries import KeptEntries

_WORDS = (" the", " rabbit", " ran", " away", ".\n", " because", " it", " was", " late", ",")


def long_report(tokens: int, *, layers: int, heads: int, ratio: int) -> ReportData:
    """Two random columns over a context of `tokens` tokens, as scattered and large as possible.

    In the first one, half of the entries are merged and extend to the next one; the others hold
    single tokens.

    Args:
        tokens: N_ctx.
        layers: L.
        heads: G.
        ratio: the context keeps `tokens // ratio` entries in each head.
    """
    begin, end = 40, 40 + tokens
    spans = PromptSpans(begin, end, end + 30, end + 40)
    made = [_column(number, tokens, layers, heads, tokens // ratio) for number in range(2)]
    words = tuple(_WORDS[i * i % 10] for i in range(spans.length))
    return ReportData("a model", spans, words, tuple(made))


def _column(number: int, tokens: int, layers: int, heads: int, kept: int) -> ReportColumn:
    rng = torch.Generator().manual_seed(number)
    units, begin = layers * heads, 40
    start = torch.rand(units, tokens, generator=rng).argsort(1)[:, :kept].sort(1).values
    reach = torch.cat([start[:, 1:], torch.full((units, 1), tokens)], 1)
    merged = (torch.rand(start.shape, generator=rng) < 0.5) & (number == 0)
    end = torch.where(merged, reach, start + 1)
    start, end = start.flatten() + begin, end.flatten() + begin
    entries = KeptEntries(
        layers=layers, heads=heads, region=(begin, begin + tokens),
        offsets=torch.arange(units + 1) * kept, start=start, end=end,
        multiplicity=1 + 0.7 * (end - start - 1).float(),
        depth=torch.randint(0, 9, start.shape, generator=rng).to(torch.int16),
        floor=torch.rand(start.shape, generator=rng) < 0.3,
    )  # fmt: skip
    return ReportColumn(
        label=f"made {number}", pipeline={}, represents="node", entries=entries,
        slots=torch.arange(begin, begin + tokens + 1, 64),
        relevance=CodedRelevance.of(torch.rand(layers, heads, tokens - 32, generator=rng) ** 6),
        curve=None,
        accounting=Accounting(
            budget=len(start), spent=len(start), floor_spent=0, recent=32,
            entries=entries.offsets.diff().view(entries.layers, entries.heads),
            bytes=256 * len(start), metadata_bytes=8 * len(start), full_bytes=256 * units * tokens,
        ),
        timings=Timings(),
    )  # fmt: skip
