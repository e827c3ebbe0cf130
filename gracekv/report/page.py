"""The HTML page: a template, its style and script, and the data, all in one file."""

from __future__ import annotations

import base64
import html
import json
import os
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gracekv import recipes
from gracekv.errors import ReportError, expect
from gracekv.files import VERSION, check_output, path_of, write_atomically
from gracekv.report.data import ReportData
from gracekv.report.encoding import encode
from gracekv.report.entries import Result, check_result

# In order of their dependencies; they share one scope.
_SCRIPTS = ("codec.js", "view.js", "charts.js", "cuts.js", "text.js", "inspector.js", "main.js")


def write(
    path: str | os.PathLike[str],
    result: Result,
    *,
    label: str | None = None,
    answer: str | None = None,
    cache: Any = None,
) -> None:
    """Write the page of one result; `result.report` calls this.

    Args:
        path: the HTML file; its folder is created.
        result: the result to show.
        label: the result's name on the page; default: the recipe's name and the ratio.
        answer: the model's answer, shown with the accounting.
        cache: the result's cache with a limit on which the answer was generated; the page then
            shows what each cut left of the answer.

    Raises `ReportError` if the result does not know which tokens its entries stand for, or if the
    cache belongs to another result; `CacheError` if the cache has no history.
    """
    name = label or default_label(result)
    data = ReportData.of({name: result}, None if answer is None else {name: answer})
    if cache is not None:
        data = data.with_history(result, cache.history)
    write_atomically(path_of(path), render(data).encode())


def compare(
    results: Mapping[str, Result] | Sequence[Result],
    path: str | os.PathLike[str],
    *,
    answers: Mapping[str, str] | None = None,
) -> None:
    """Write a page that compares results of one prompt, two of them side by side.

        gracekv.report.compare([plus, snap], "page.html")

    Args:
        results: a sequence, labelled by recipe and ratio, or a mapping from labels.
        path: the HTML file; its folder is created.
        answers: the model's answers, by label.

    Raises `ReportError` if prompts or models differ, or if a result does not know which tokens its
    entries stand for.
    """
    write_atomically(path_of(path), render(ReportData.of(with_labels(results), answers)).encode())


def write_all(
    path: str | os.PathLike[str], batch: Any, *, answers: Sequence[str] | None = None
) -> tuple[Path, ...]:
    """Write a page for each prompt of a batch: page-1.html, page-2.html for the path page.html.

    `batch` is a `gracekv.BatchResult`; `answers` are the model's, one per prompt. Returns the
    pages' paths. Raises `ReportError` if there are more or fewer answers, `OutputError` if `path`
    cannot be a file, and what `write` raises.
    """
    if answers is not None and len(answers) != len(batch.prompts):
        raise ReportError(
            f"Give one answer for each of the {len(batch.prompts)} prompts; got {len(answers)}."
        )
    path, written = path_of(path), []
    check_output(path)
    for number, (prompt, run) in enumerate(zip(batch.prompts, batch.runs, strict=True)):
        page = path.with_name(f"{path.stem}-{number + 1}{path.suffix}")
        # The backend's copies are those of the whole batch.
        kept = replace(run.accounting, backend_bytes=None)
        shared = {"model": batch.model, "pipeline": batch.pipeline}
        row: Any = SimpleNamespace(prompt=prompt, run=replace(run, accounting=kept), **shared)
        write(page, row, answer=None if answers is None else answers[number])
        written.append(page)
    return tuple(written)


def default_label(result: Result) -> str:
    """The recipe's name and the ratio of full to kept, such as "snapkv 8x".

    The ratio counts entries, or bytes if the budget does and entries are quantised.
    """
    check_result(result)
    account, name = result.run.accounting, recipes.label(result.pipeline)
    full, spent = account.entries.numel(), account.spent
    if account.spent_bytes is not None:
        full, spent = account.full_bytes // result.run.cache.length, account.spent_bytes
    ratio = full * result.prompt.spans.context_length / max(1, spent)
    return name if ratio <= 1 else f"{name} {ratio:.1f}".removesuffix(".0") + "x"


def with_labels(results: Mapping[str, Result] | Sequence[Result]) -> Mapping[str, Result]:
    """Results by label; a sequence gets default labels, numbered if they repeat."""
    if isinstance(results, Mapping):
        return results
    expect(results, Iterable, "compare takes results in a list, or by label", ReportError)
    by_label: dict[str, Result] = {}
    for result in results:
        name = default_label(result)
        same = sum(label == name or label.startswith(f"{name} (") for label in by_label)
        by_label[f"{name} ({same + 1})" if same else name] = result
    return by_label


def render(data: ReportData) -> str:
    """The page as HTML. The prompt never becomes markup: scripts insert it as text."""
    header, block = encode(data)
    labels = ", ".join(column.label for column in data.columns)
    parts = {
        # A label may hold half of a surrogate pair, which cannot be encoded.
        "title": html.escape(f"{labels} – gracekv report").encode("utf-8", "replace").decode(),
        "style": _asset("page.css"),
        "script": "\n".join(_asset(name) for name in _SCRIPTS),
        "header": json_for_html({**header, "version": VERSION}),
        "block": base64.b64encode(zlib.compress(block, 6)).decode(),
    }
    # One pass, so that inserted text is not searched for placeholders.
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], _asset("page.html"))


def json_for_html(data: Any) -> str:
    """JSON that is safe inside a script element, whatever texts it holds."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _asset(name: str) -> str:
    return (files("gracekv.report") / "assets" / name).read_text(encoding="utf-8")
