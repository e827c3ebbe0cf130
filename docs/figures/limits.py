"""Entries over time: without a limit, with a fixed one, and with a ratio."""

from __future__ import annotations

from functools import cache

import torch
from matplotlib.figure import Figure
from style import Theme, new_figure, plain_axes

import gracekv
from gracekv.testing.models import tiny_model

TOKENS, STEP, PROMPT = 3000, 20, 600


@cache
def measured() -> dict[str, list[float]]:
    """Entries per KV head of a tiny model's caches, every `STEP` tokens."""
    model = tiny_model(positions=8192)
    prompt = gracekv.Prompt.from_ids(torch.arange(PROMPT) * 13 % 97, (4, PROMPT - 10))
    result = gracekv.compress(model, prompt, ratio=4, pipeline="snapkv")
    limits = {
        "no limit": None,
        "ratio=3": gracekv.Limit(ratio=3, every=256, strategy="recent"),
        "entries_per_head=384": gracekv.Limit(entries_per_head=384, every=256, strategy="recent"),
    }
    found = {}
    for name, limit in limits.items():
        held, taught = [], result.new_cache(limit)
        for first in range(0, TOKENS, STEP):
            ids = torch.arange(first, first + STEP)[None] * 7 % 97
            with torch.no_grad():
                model(input_ids=ids, past_key_values=taught)
            tail = sum(layer.tail_length for layer in taught.grace_layers)
            packed = sum(float(x.lengths.float().mean()) for x in taught.packed.layers)
            held.append((packed + tail) / len(taught.grace_layers))
        found[name] = held
    return found


def draw(theme: Theme) -> Figure:
    """Entries per head over tokens written."""
    figure = new_figure(theme, 8.4, 3.4)
    axes = figure.add_axes((0.075, 0.15, 0.9, 0.77))
    plain_axes(axes, theme, grid=True)
    written = [STEP * (n + 1) for n in range(TOKENS // STEP)]
    colours = (theme.muted, theme.orange, theme.blue)
    for (name, held), colour in zip(measured().items(), colours, strict=True):
        axes.plot(written, held, color=colour, linewidth=1.6)
        # The fixed limit's name stands below its line, the others above theirs.
        height = 200 if "entries" in name else held[-1] + 60
        axes.text(
            written[-1] - 20, height, name, color=colour, fontsize=8.5, ha="right", va="bottom"
        )
    axes.axhline(384 + 256, color=theme.blue, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.text(20, 384 + 256 + 30, "limit and one interval", color=theme.blue, fontsize=8)
    axes.set_xlim(0, TOKENS)
    axes.set_ylim(0, None)
    axes.set_xlabel("tokens written after the prompt", fontsize=8.5)
    axes.set_ylabel("entries per KV head", fontsize=8.5)
    return figure
