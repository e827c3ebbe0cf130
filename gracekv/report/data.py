"""`ReportData`: everything that a page, a table or a figure shows, as plain tensors."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from gracekv.allocate.curve import AuctionCurve
from gracekv.cache import Accounting, Timings, dequantised
from gracekv.decode.limit import CutHistory
from gracekv.errors import ReportError, expect
from gracekv.pipeline.run import CodedRelevance
from gracekv.prefill import PromptSpans
from gracekv.prefill.chat_text import continued
from gracekv.prefill.fingerprint import differences
from gracekv.report.entries import KeptEntries, Result, check_result, result_entries

# The character with which decoders replace incomplete bytes.
_INCOMPLETE = "\ufffd"


# Properties that results shown side by side must share.
_SAME: dict[str, Callable[[Result], object]] = {
    "token ids": lambda result: result.prompt.ids.tolist(),
    "contexts": lambda result: result.prompt.spans,
    "layers and KV heads": lambda result: tuple(result.run.accounting.entries.shape),
}


def _differ(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The facts in which two models differ, apart from dtype and tokenizer."""
    ignored = {"tokenizer", "chat_template", "dtype"}
    if one.get("dtype") != other.get("dtype"):
        ignored |= {"weights", "plain_weights"}
        if one.get("model_name") != other.get("model_name"):
            return ["names"]
    rest = ({name: x for name, x in marks.items() if name not in ignored} for marks in (one, other))
    return [what.partition(" (")[0] for what in differences(*rest)]


@dataclass(frozen=True, slots=True, eq=False)
class ReportColumn:
    """One column of the page: one result. Fields that the result lacks are None.

    Attributes:
        label: the heading, such as the recipe's name.
        pipeline: the strategies, as plain data.
        represents: `Packer.represents`, the thing that one entry stands for.
        entries: the context entries and the tokens that each stands for.
        slots: int32 [J+1] absolute slot borders; None also if every token is its own slot.
        relevance: relevance of the context's tokens, without the recent window.
        curve: the auction curve.
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


@dataclass(frozen=True, slots=True, eq=False)
class ReportData:
    """One prompt and its columns.

    Attributes:
        model: the model's name.
        spans: prefix, context, question, tail.
        tokens: the text of each of the T tokens.
        columns: at least one column.
        history: what the cuts left of the tokens after the prompt; None without a limit.
        written: the texts of those tokens.
        model_layers: the number of each compressed layer in the model; empty if all are compressed.
    """

    model: str
    spans: PromptSpans
    tokens: tuple[str, ...]
    columns: tuple[ReportColumn, ...]
    history: CutHistory | None = None
    written: tuple[str, ...] = ()
    model_layers: tuple[int, ...] = ()

    @classmethod
    def of(cls, results: Mapping[str, Result], answers: Mapping[str, str] | None = None) -> Self:
        """Collect results of one prompt, keyed by label.

        Raises `ReportError` if there is no result, if prompts differ, if an answer has no result,
        or if a result does not know which tokens its entries stand for.
        """
        if not results:
            raise ReportError("A report needs at least one result; got none.")
        for label, result in results.items():
            expect(label, str, "A label is a string", ReportError)
            check_result(result)
        answers = answers or {}
        if unknown := ", ".join(sorted(map(str, set(answers) - set(results)))):
            raise ReportError(f"Answers are keyed by label: {', '.join(results)}; got {unknown}.")
        (first, main), *others = results.items()
        for label, other in others:
            for what, fact in _SAME.items():
                if fact(main) != fact(other):
                    raise ReportError(
                        f"Results to compare must share prompt, context and model; {first!r} "
                        f"and {label!r} have different {what}. Compress the same Prompt with both "
                        f"pipelines."
                    )
            if apart := _differ(main.run.fingerprint, other.run.fingerprint):
                raise ReportError(
                    f"Results to compare must be of one model; those of {first!r} and {label!r} "
                    f"differ: {', '.join(apart)}. Compress with one model."
                )
        tokenizer = next((x for r in results.values() if (x := r.prompt.tokenizer)), None)
        # Of a local folder, only the name: pages are shared, and paths are private.
        name = str(getattr(getattr(main.model, "config", None), "name_or_path", "")).rstrip("/\\")
        if os.path.isabs(name) or os.path.isdir(name):
            name = re.split(r"[/\\]", name)[-1]
        # A loaded prompt may have no tokenizer.
        tokens = tuple(token_texts(main.prompt.ids, tokenizer))
        columns = tuple(report_column(x, result, answers.get(x)) for x, result in results.items())
        name, layers = name or type(main.model).__name__, main.run.cache.model_layers
        return cls(name, main.prompt.spans, tokens, columns, model_layers=layers)

    def with_history(self, result: Result, history: CutHistory) -> ReportData:
        """A copy that also shows what was generated on a cache of `result`.

        Raises `ReportError` if the cache belongs to another result.
        """
        first, prompt = result.run.cache.length, result.prompt
        # A cache with a limit holds quantised entries in the model's dtype.
        packed_keys = dequantised(result.run.cache).layers[-1].keys
        keys = packed_keys if history.keys is None else history.keys.to(packed_keys)
        if history.first != first or not torch.equal(packed_keys, keys):
            raise ReportError(
                f"The cache belongs to another result: its entries of {history.first} prompt "
                f"tokens are not this one's of {first}. Use this result's new_cache(limit)."
            )
        # Decoding of a token depends on the tokens before it.
        lead = prompt.ids[max(0, first - 4) : first]
        tokenizer = None if (history.ids < 0).any() else prompt.tokenizer
        texts = token_texts(torch.cat([lead, history.ids]), tokenizer)[len(lead) :]
        return replace(self, history=history, written=tuple(texts))


def report_column(label: str, result: Result, answer: str | None = None) -> ReportColumn:
    """Make the column of one result. Raises `ReportError` as `result_entries` does."""
    expect(answer, str | None, "An answer is a string", ReportError)
    run, pipe, record = result.run, result.pipeline, result.run.recorded()
    slots, relevance, curve = None, None, None
    if record is not None:
        slots, relevance, curve = record.slots, record.relevance, record.curve
    own = (label, pipe.to_dict(), pipe.pack.represents, result_entries(result))
    return ReportColumn(*own, slots, relevance, curve, run.accounting, run.timings, answer)


def token_texts(ids: Tensor, tokenizer: Any) -> list[str]:
    """The text of each token of `ids` int64 [T]; without a tokenizer, its id.

    Joined, they are the text of all tokens. Each token is decoded after the previous one, so that
    leading whitespace is kept. If tokens share a character, one gets all of it and the others "".
    """
    if tokenizer is None:
        return [f"⟨{number}⟩ " for number in ids.tolist()]
    texts: list[str] = []
    first = end = 0
    for at in range(len(ids)):
        old_text = tokenizer.decode(ids[first:end], skip_special_tokens=False) if end else ""
        text = tokenizer.decode(ids[first : at + 1], skip_special_tokens=False)
        # A character has at most four bytes; bytes that stay incomplete for longer are not text.
        waits = text.endswith(_INCOMPLETE) and at - end < 3 and at + 1 < len(ids)
        if waits:
            # A text may hold the character itself.
            waits = continued(tokenizer, text[len(old_text) :]) != ids[end : at + 1].tolist()
        texts.append("" if waits else text[len(old_text) :])
        if not waits:
            first, end = end, at + 1
    return texts
