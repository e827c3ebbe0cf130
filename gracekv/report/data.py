"""`ReportData`: all that a page, a table or a figure shows, as plain tensors."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from gracekv.allocate.curve import AuctionCurve
from gracekv.cache import Accounting, Timings, dequantised
from gracekv.decode.history import CutHistory
from gracekv.errors import ReportError
from gracekv.prefill import PromptSpans
from gracekv.report.entries import KeptEntries, Result, kept_entries
from gracekv.value.coded import CodedRelevance

# How decoders show bytes of an incomplete character.
_INCOMPLETE = "\ufffd"


# What results that are shown side by side have in common.
_SAME: dict[str, Callable[[Result], object]] = {
    "token ids": lambda result: result.prompt.ids.tolist(),
    "contexts": lambda result: result.prompt.spans,
    "layers and KV heads": lambda result: tuple(result.accounting.entries.shape),
}


@dataclass(frozen=True, slots=True, eq=False)
class ReportColumn:
    """One result, as the page shows it in one column; what the result does not hold is None.

    Attributes:
        label: its heading, such as the recipe's name.
        pipeline: the strategies, as plain data.
        represents: what an entry stands for, `Packer.represents`.
        entries: what each context entry stands for.
        slots: int32 [J+1] slot borders, absolute; None also where every token is its own slot.
        relevance: of the tokens from the context's start, without the recent window.
        curve: the auction.
        accounting: entries and bytes.
        timings: seconds.
        answer: the model's answer.
    """

    label: str
    pipeline: Mapping[str, Any]
    represents: str
    entries: KeptEntries
    slots: Tensor | None
    relevance: CodedRelevance | None
    curve: AuctionCurve | None
    accounting: Accounting
    timings: Timings
    answer: str | None = None

    def resolution(self) -> Tensor:
        """int64 [n+1]: number of (head, token) pairs of the region in entries of 0..n tokens.

        0 counts dropped tokens, 1 exact ones; n is the longest entry's length.
        """
        entries = self.entries
        counts = torch.bincount(entries.length, minlength=2) * torch.arange(
            max(2, int(entries.length.max()) + 1 if len(entries.start) else 2)
        )
        first, last = entries.region
        counts[0] = entries.layers * entries.heads * (last - first) - counts.sum()
        return counts


@dataclass(frozen=True, slots=True, eq=False)
class ReportData:
    """One prompt, and one or more columns.

    Attributes:
        model: its name.
        spans: prefix, context, question, tail.
        tokens: T texts.
        columns: at least one.
        history: what became of the tokens written after the prompt, of one column; or None.
        written: their texts.
    """

    model: str
    spans: PromptSpans
    tokens: tuple[str, ...]
    columns: tuple[ReportColumn, ...]
    history: CutHistory | None = None
    written: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        results: Mapping[str, Result],
        answers: Mapping[str, str] | None = None,
    ) -> ReportData:
        """The data of results of one prompt, by label.

        Raises `ReportError` if there is no result, if prompts differ, if an answer belongs to no
        result, or if a result does not hold what its entries stand for.
        """
        if not results:
            raise ReportError("A report needs at least one result; got none.")
        answers = answers or {}
        if unknown := sorted(set(answers) - set(results)):
            raise ReportError(
                f"Answers are given by the labels of the results, {', '.join(results)}; got "
                f"{', '.join(unknown)}."
            )
        for label, result in results.items():
            _check(label, result)
        (first, main), *others = results.items()
        for label, other in others:
            for what, read in _SAME.items():
                if read(main) != read(other):
                    raise ReportError(
                        f"Results side by side must be of one prompt, context and model; {first!r} "
                        f"and {label!r} have different {what} ({_apart(read(main), read(other))}). "
                        f"Compress the same Prompt with both pipelines."
                    )
        tokenizer = next((x for r in results.values() if (x := r.prompt.tokenizer)), None)
        config = getattr(main.model, "config", None)
        # Of a local folder only its name: pages are shared, paths are private.
        name = str(getattr(config, "name_or_path", "")).rstrip("/\\")
        if os.path.isabs(name) or os.path.isdir(name):
            name = re.split(r"[/\\]", name)[-1]
        return cls(
            model=name or type(main.model).__name__,
            spans=main.prompt.spans,
            # A loaded prompt may have no tokenizer.
            tokens=tuple(token_texts(main.prompt.ids, tokenizer)),
            columns=tuple(
                report_column(label, r, answers.get(label)) for label, r in results.items()
            ),
        )

    def with_history(self, result: Result, history: CutHistory) -> ReportData:
        """These data with what was written on a cache of `result`.

        Raises `ReportError` if the cache is of another result.
        """
        first, prompt = result._run.cache.length, result.prompt
        # A cache with a limit holds codes of fewer bits as numbers of the model's dtype.
        own = dequantised(result._run.cache).layers[-1].keys
        keys = own if history.keys is None else history.keys.to(own)
        if history.first != first or not torch.equal(own, keys):
            raise ReportError(
                f"The cache goes on from {history.first} prompt tokens of another result; this one "
                f"has {first}. Give a cache that this result's new_cache(limit) made."
            )
        # Blanks and letters depend on the tokens before.
        lead = prompt.ids[max(0, first - 4) : first]
        tokenizer = None if (history.ids < 0).any() else prompt.tokenizer
        texts = token_texts(torch.cat([lead, history.ids]), tokenizer)[len(lead) :]
        return dataclasses.replace(self, history=history, written=tuple(texts))


def report_column(label: str, result: Result, answer: str | None = None) -> ReportColumn:
    """The column of one result. Raises `ReportError` as `kept_entries` does."""
    run, record = result._run, result._run.recorded()
    return ReportColumn(
        label=label,
        pipeline=result.pipeline.to_dict(),
        represents=result.pipeline.pack.represents,
        entries=kept_entries(result),
        slots=None if record is None else record.slots,
        relevance=None if record is None else record.relevance,
        curve=None if record is None else record.curve,
        accounting=run.accounting,
        timings=run.timings,
        answer=answer,
    )


def _apart(one: Any, other: Any) -> str:
    """How two values differ, as an error says it: of lists the lengths and the first place."""
    if not isinstance(one, list):
        return f"{one!r}, {other!r}"
    at = next(n for n, pair in enumerate(zip_longest(one, other)) if pair[0] != pair[1])
    return f"of {len(one)} and {len(other)} tokens, the first at position {at}"


def _check(label: str, result: object) -> None:
    if not all(hasattr(result, name) for name in ("_run", "prompt", "pipeline")):
        raise ReportError(
            f"{label!r} must be what gracekv.compress returns for one prompt; got "
            f"{type(result).__name__}. For a page of each prompt of a batch use "
            f"batch.report(path)."
        )


def token_texts(ids: Tensor, tokenizer: Any) -> list[str]:
    """Texts of `ids` int64 [T], which add up to that of all; without a tokenizer the numbers.

    Each is a token's text after the one before it, so that leading blanks are not lost. Of a
    character that several tokens share, one token has all and the others have "".
    """
    if tokenizer is None:
        return [f"⟨{number}⟩ " for number in ids.tolist()]
    texts: list[str] = []
    first = read = 0
    for at in range(len(ids)):
        before = tokenizer.decode(ids[first:read], skip_special_tokens=False) if read else ""
        after = tokenizer.decode(ids[first : at + 1], skip_special_tokens=False)
        # A character has at most four bytes, so a longer wait is for bytes that are no text.
        waits = after.endswith(_INCOMPLETE) and at - read < 3 and at + 1 < len(ids)
        texts.append("" if waits else after[len(before) :])
        if not waits:
            first, read = read, at + 1
    return texts
