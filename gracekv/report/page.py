"""The HTML page: a template, its style and script, and the data, all in one file."""

from __future__ import annotations

import base64
import html
import json
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from gracekv.errors import ReportError
from gracekv.files import write_atomically
from gracekv.report.data import ReportData, Result
from gracekv.report.packing import pack

if TYPE_CHECKING:
    from gracekv.cache import Accounting
    from gracekv.pipeline import Pipeline, Run
    from gracekv.prefill.prompt import Prompt

# In the order in which they build on each other; they share one scope.
_SCRIPTS = ("codec.js", "view.js", "charts.js", "text.js", "inspector.js", "main.js")


def write(
    path: str | os.PathLike[str],
    result: Result,
    *,
    label: str | None = None,
    answer: str | None = None,
) -> None:
    """Write a page of one result; `result.report` calls this.

    Args:
        path: the HTML file; its folder is made.
        result: what to show.
        label: its name on the page; default: how many times fewer entries it keeps.
        answer: what the model said, shown beside the accounting.

    Raises `ReportError` if the result does not hold what its entries stand for.
    """
    name = label or default_label(result)
    compare({name: result}, path, answers=None if answer is None else {name: answer})


def compare(
    results: Mapping[str, Result],
    path: str | os.PathLike[str],
    *,
    answers: Mapping[str, str] | None = None,
) -> None:
    """Write a page of several results of one prompt, any two of them side by side.

        gracekv.report.compare({"GraceKV": grace, "SnapKV": snap}, "page.html")

    Args:
        results: by the label that the page shows.
        path: the HTML file; its folder is made.
        answers: what the model said, by label.

    Raises `ReportError` if the results are of different prompts or models, or if one does not
    hold what its entries stand for.
    """
    write_atomically(Path(path), render(ReportData.of(results, answers)).encode())


class Batch(Protocol):
    """What a report reads of a `gracekv.BatchResult`."""

    @property
    def model(self) -> Any:
        """Whose cache it is."""

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """What was compressed, a prompt a row."""

    @property
    def _runs(self) -> tuple[Run, ...]:
        """What each stage made, of each row."""

    @property
    def pipeline(self) -> Pipeline:
        """The stages' strategies."""


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    """One prompt of a batch, as a `Result`."""

    model: Any
    prompt: Prompt
    _run: Run
    pipeline: Pipeline

    @property
    def accounting(self) -> Accounting:
        return self._run.accounting


def write_all(
    path: str | os.PathLike[str], batch: Batch, *, answers: Sequence[str] | None = None
) -> tuple[Path, ...]:
    """Write a page for each prompt of a batch: page-1.html, page-2.html for the path page.html.

    `answers` are what the model said, one a prompt. Returns the pages' paths. Raises `ReportError`
    if there are more or fewer answers, or as `write` does.
    """
    if answers is not None and len(answers) != len(batch.prompts):
        raise ReportError(
            f"Give one answer for each of the {len(batch.prompts)} prompts; got {len(answers)}."
        )
    path, written = Path(path), []
    for number, (prompt, run) in enumerate(zip(batch.prompts, batch._runs, strict=True)):
        page = path.with_name(f"{path.stem}-{number + 1}{path.suffix}")
        row = _Row(batch.model, prompt, run, batch.pipeline)
        write(page, row, answer=None if answers is None else answers[number])
        written.append(page)
    return tuple(written)


def default_label(result: Result) -> str:
    """Such as "GraceKV 8x": what merges or evicts, and how many times fewer entries stay."""
    kept = result.accounting
    full = kept.entries.numel() * result.prompt.spans.context_length
    ratio = f"{full / max(1, kept.spent):.1f}".removesuffix(".0")
    return "full cache" if kept.spent >= full else f"compressed {ratio}x"


def render(data: ReportData) -> str:
    """The page as text. Nothing of the prompt is in it as markup: scripts set it as text."""
    from gracekv import __version__

    header, block = pack(data)
    labels = ", ".join(outcome.label for outcome in data.outcomes)
    parts = {
        "title": html.escape(f"{labels} – gracekv report"),
        "style": _asset("page.css"),
        "script": "\n".join(_asset(name) for name in _SCRIPTS),
        "header": json_for_html({**header, "version": __version__}),
        "block": base64.b64encode(zlib.compress(block, 6)).decode(),
    }
    # One pass, so that nothing that was put in is read as a mark again.
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], _asset("page.html"))


def json_for_html(data: Any) -> str:
    """JSON that can stand inside a script element whatever texts it holds."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _asset(name: str) -> str:
    return (files("gracekv.report") / "assets" / name).read_text(encoding="utf-8")
