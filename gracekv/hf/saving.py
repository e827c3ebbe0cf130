"""Compression results as files: what was kept, of which prompt, by which model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gracekv.allocate.plan import BudgetPlan
from gracekv.cache import Accounting, CompressedCache, Timings, WidthShare
from gracekv.pipeline.run import Run
from gracekv.prefill.prompt import Prompt
from gracekv.prefill.spans import PromptSpans
from gracekv.registry import check_values


def prompt_facts(prompt: Prompt, run: Run) -> dict[str, Any]:
    """What a file holds of one prompt, but for its ids and entries; ready for JSON.

    Its text and tokenizer are not saved.
    """
    kept = run.accounting
    entries = {
        "entries": kept.entries.tolist(),
        "backend_bytes": 0,
        "widths": [dataclasses.asdict(share) for share in kept.widths],
    }
    return {
        "spans": dataclasses.asdict(prompt.spans),
        "format": [prompt.separator, prompt.template, prompt.messages],
        "plan": dataclasses.asdict(run.plan),
        "accounting": {f.name: getattr(kept, f.name) for f in dataclasses.fields(kept)} | entries,
        "timings": dict(run.timings.as_dict()),
    }


def saved_prompt(facts: Mapping[str, Any], ids: Tensor, tokenizer: Any) -> Prompt:
    """The prompt that a file's `facts` describe; `ids` int64 [T] are kept apart.

    Raises `ConfigError` or another `ValueError` or `TypeError` if no result wrote them.
    """
    # Files of 0.2 have no third.
    names = ("separator", "template", "messages")
    written = dict(zip(names, facts["format"], strict=False))
    check_values(Prompt, written)
    return Prompt(ids, _made_of(PromptSpans, facts["spans"]), None, tokenizer, **written)


def saved_run(
    facts: Mapping[str, Any], packed: CompressedCache, identity: Mapping[str, str]
) -> Run:
    """The run that a file's `facts` describe, with its entries and the model's fingerprint.

    Raises as `saved_prompt` does.
    """
    kept = dict(facts["accounting"])
    if "kept_bytes" in kept:  # its name in files of 0.2
        kept["other_bytes"] = kept.pop("kept_bytes")
    counts = {
        "entries": torch.tensor(kept["entries"]),
        "widths": tuple(_made_of(WidthShare, share) for share in kept["widths"]),
    }
    accounting = _made_of(Accounting, {**kept, **counts})
    timings = _made_of(Timings, facts["timings"])
    return Run(_made_of(BudgetPlan, facts["plan"]), packed, accounting, timings, identity)


def _made_of(cls: Any, data: Mapping[str, Any]) -> Any:
    check_values(cls, data)
    return cls(**data)
