"""Tables of strategies, stages and recipes for the pages, generated from the registries.

A page includes a table by a line of its own: `<!-- strategies: segment -->`, `<!-- stages -->` or
`<!-- recipes: PREFIX -->`. Cells come from docstrings: a strategy must have paragraphs that begin
with "Source:" and "Cost:"; an optional "Needs:" adds to what its `needs()` declares.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gracekv import recipes
from gracekv.pipeline import Pipeline
from gracekv.pipeline.composition import REGISTRIES
from gracekv.prefill import Needs
from gracekv.registry import Registry, Strategy
from gracekv.value.column_sums import ReceivedAttention

# The page that describes the strategies of each stage.
PAGES = {
    "segment": "stages/segment.md",
    "value": "stages/value.md",
    "sensitivity": "stages/value.md",
    "distortion": "stages/tree.md",
    "refine": "stages/tree.md",
    "floor": "stages/allocate.md",
    "quota": "stages/allocate.md",
    "allocate": "stages/allocate.md",
    "pack": "stages/cache.md",
    "fit": "stages/fit.md",
    "precision": "stages/precision.md",
    "decode": "stages/decode.md",
    "backend": "stages/backends.md",
}
_MARKER = re.compile(r"^<!-- (strategies|stages|recipes)(?:: ([\w-]+))? -->$", re.MULTILINE)
_COLUMNS = ("source", "cost", "needs", "ours")
_ARXIV = re.compile(r"arXiv:(\d{4}\.\d{4,5})")
_DEPARTURE = re.compile(r"departures (\d+)")
# Anchors of the headings of the page on departures, by number.
_DEPARTURES = {
    "1": "1-budget-and-recent-window",
    "2": "2-segmentation",
    "3": "3-value-flow",
    "4": "4-prototypes-and-distortion",
    "5": "5-trees",
    "6": "6-floor-and-auction",
    "7": "7-distortion-of-prefixes-and-suffixes",
    "8": "8-parallel-greedy-and-exact-pruning",
    "9": "9-certificate",
}


class TableError(ValueError):
    """A marker names something unknown, or a docstring lacks what its table shows."""


@dataclass(frozen=True)
class Description:
    """A strategy as described by its docstring and class, as lines of text.

    Attributes:
        summary: the first line.
        source: where it comes from.
        departures: which parts are ours; empty if none.
        cost: in time and memory.
        needs: what it needs of the capture, the machine or the extras; empty if nothing.
    """

    summary: str
    source: str
    departures: str
    cost: str
    needs: str


def expand(markdown: str) -> str:
    """A page's Markdown with its markers replaced; `TableError` if one cannot be."""
    makers: dict[str, Callable[[str], str]] = {
        "strategies": _strategies,
        "stages": lambda _: _stages(),
        "recipes": _recipes,
    }
    return _MARKER.sub(lambda found: makers[found[1]](found[2] or ""), markdown)


def describe(cls: type[Strategy]) -> Description:
    """The parts of `cls`'s docstring; `TableError` if it names no source or cost."""
    paragraphs = re.split(r"\n\s*\n", inspect.getdoc(cls) or "")
    found = {"Source": "", "Cost": "", "Needs": ""}
    for paragraph in paragraphs:
        label, _, text = paragraph.partition(":")
        if label in found:
            found[label] = " ".join(text.split())
    for label in ("Source", "Cost"):
        if not found[label]:
            raise TableError(
                f"The docstring of {cls.__module__}.{cls.__qualname__} has no paragraph that "
                f"begins with '{label}:'. Add one, a sentence or two."
            )
    source, _, departures = found["Source"].partition("Ours: ")
    if source.strip() in ("", "ours."):
        source = "ours"
    needs = "; ".join(x for x in (_needs(cls), found["Needs"].rstrip(".")) if x)
    return Description(
        summary=cls.summary(),
        source=source.strip(),
        departures=departures,
        cost=found["Cost"],
        needs=needs,
    )


def _needs(cls: type[Any]) -> str:
    """What an instance with default fields needs of the capture, in words."""
    strategy = cls()
    needs: Needs = strategy.needs() if hasattr(strategy, "needs") else Needs()
    observers = set(needs.observers)
    if getattr(strategy, "uses_column_sums", False):
        observers.add(ReceivedAttention())
    samples = " and ".join(str(count) for count in sorted(needs.context_samples))
    words = {
        f"{needs.prompt_samples} evenly spaced queries of the prompt": needs.prompt_samples > 0,
        f"{samples} evenly spaced queries of the context": bool(samples),
        "queries of positions known later": needs.later_queries,
        f"queries of the last {needs.last_queries} positions": needs.last_queries > 0,
        "curvature (hidden states)": getattr(strategy, "uses_curvature", False),
    }
    observed = sorted(f"`{observer!r}`" for observer in observers)
    return "; ".join([*observed, *(text for text, asked in words.items() if asked)])


def _strategies(stage: str) -> str:
    registry = _registry(stage)
    badges = _badges(stage)
    # First the strategies of the paper and of the default recipe, which most readers look for.
    names = sorted(registry, key=lambda name: (name not in badges, name))
    rows, details = [], []
    for name in names:
        cls = registry.get(name)
        about = describe(cls)
        path = f"{public_module(cls)}.{cls.__qualname__}"
        badge = "".join(f'<span class="badge">{text}</span> ' for text in badges.get(name, ()))
        title = f"[`{name}`](#{path}) {badge}{_cell(about.summary)}"
        cells = zip(
            _COLUMNS, (about.source, about.cost, about.needs, about.departures), strict=True
        )
        rows += ["<tr markdown>", f'<th colspan="4" markdown="span">{title}</th>', "</tr>"]
        rows += [
            "<tr markdown>",
            *(f'<td data-label="{label}" markdown="span">{_cell(x)}</td>' for label, x in cells),
            "</tr>",
        ]
        details.append(_details(name, path))
    head = "".join(f"<th>{label}</th>" for label in _COLUMNS)
    table = [
        '<table class="strategies" markdown>',
        f"<thead><tr>{head}</tr></thead>",
        "<tbody markdown>",
        *rows,
        "</tbody>",
        "</table>",
    ]
    return "\n".join([*table, "", *details])


def _badges(stage: str) -> dict[str, list[str]]:
    """By name, who uses a strategy: "default" is the recipe that `compress` uses by default."""
    found: dict[str, list[str]] = {}
    for text, pipeline in (("paper", Pipeline.named("gracekv")), ("default", Pipeline.default())):
        found.setdefault(getattr(pipeline, stage).name, []).append(text)
    return found


def _details(name: str, path: str) -> str:
    """The class under its registered name: fields with defaults, and the full docstring."""
    return (
        f"::: {path}\n"
        "    options:\n"
        f"      heading: '{name}'\n"
        f"      toc_label: '{name}'\n"
        "      heading_level: 3\n"
        "      members: false\n"
    )


def _stages() -> str:
    paper, default = Pipeline.named("gracekv"), Pipeline.default()
    rows = [
        f"| stage | decides | paper | `{recipes.DEFAULT}` | all |",
        "|---|---|---|---|---|",
    ]
    for stage, registry in REGISTRIES.items():
        link = PAGES[stage].removeprefix("stages/")
        rows.append(
            f"| [`{stage}`]({link}) | {registry.summary} | `{getattr(paper, stage).name}` | "
            f"`{getattr(default, stage).name}` | {len(registry)} |"
        )
    return "\n".join(rows)


def _recipes(prefix: str) -> str:
    rows = ["| recipe | what it is | source |", "|---|---|---|"]
    for name, recipe in recipes.RECIPES.items():
        if name.startswith(prefix):
            rows.append(f"| `{name}` | {_cell(recipe.summary)} | {_cell(recipe.source)} |")
    if len(rows) == 2:
        raise TableError(f"No recipe begins with {prefix!r}.")
    return "\n".join(rows)


def _registry(stage: str) -> Registry[Any]:
    if stage not in REGISTRIES:
        raise TableError(f"Unknown stage {stage!r}. Stages: {', '.join(REGISTRIES)}.")
    return REGISTRIES[stage]


def public_module(cls: type[Strategy]) -> str:
    """The package that exports `cls`: strategies live one level below it."""
    return cls.__module__.rpartition(".")[0]


def _cell(text: str) -> str:
    """Text of a table cell, with bars escaped and preprints and departures linked."""
    text = (text[:1].upper() + text[1:] or "–").replace("|", "\\|")
    text = _ARXIV.sub(r"[arXiv:\1](https://arxiv.org/abs/\1)", text)

    def departure(found: re.Match[str]) -> str:
        return f"[departures {found[1]}](../departures.md#{_DEPARTURES[found[1]]})"

    return _DEPARTURE.sub(departure, text)
