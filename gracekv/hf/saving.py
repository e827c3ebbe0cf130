"""Compression results as files: what was kept, of which prompt, by which model."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gracekv.allocate.plan import BudgetPlan
from gracekv.cache import Accounting, CompressedCache, Timings, WidthShare
from gracekv.cache.serialization import write_cache
from gracekv.cache.sharding import whole_cache
from gracekv.distributed import head_shard
from gracekv.files import VERSION
from gracekv.prefill.prompt import Prompt, PromptSpans
from gracekv.registry import check_values


@dataclass(frozen=True, slots=True, eq=False)
class SavedPrompt:
    """What a file holds of one prompt, but for its entries.

    Attributes:
        prompt: ids, spans and format; its text and tokenizer are not saved.
        plan: the budget in entries.
        accounting: entries and bytes.
        timings: seconds.
    """

    prompt: Prompt
    plan: BudgetPlan
    accounting: Accounting
    timings: Timings

    def header(self) -> dict[str, Any]:
        """Everything but the ids, ready for JSON."""
        kept = self.accounting
        entries = {
            "entries": kept.entries.tolist(),
            "backend_bytes": 0,
            "widths": [dataclasses.asdict(share) for share in kept.widths],
        }
        return {
            "spans": dataclasses.asdict(self.prompt.spans),
            "format": [self.prompt.separator, self.prompt.template],
            "plan": dataclasses.asdict(self.plan),
            "accounting": {f.name: getattr(kept, f.name) for f in fields(kept)} | entries,
            "timings": dict(self.timings.as_dict()),
        }

    @classmethod
    def from_header(cls, header: Mapping[str, Any], ids: Tensor, tokenizer: Any) -> SavedPrompt:
        """The inverse of `header`; `ids` int64 [T] are kept apart.

        Raises `ConfigError` or another `ValueError` or `TypeError` if it is not what `header` made.
        """
        kept = header["accounting"]
        counts = {
            "entries": torch.tensor(kept["entries"]),
            "widths": tuple(_made_of(WidthShare, share) for share in kept.get("widths", ())),
        }
        separator, template = header.get("format", ("\n\n", True))
        prompt = {"separator": separator, "template": template}
        check_values(Prompt, prompt)
        return cls(
            Prompt(ids, _made_of(PromptSpans, header["spans"]), None, tokenizer, **prompt),
            _made_of(BudgetPlan, header["plan"]),
            _made_of(Accounting, {**kept, **counts}),
            _made_of(Timings, header["timings"]),
        )


def _made_of(cls: Any, data: Mapping[str, Any]) -> Any:
    check_values(cls, data)
    return cls(**data)


def save_result(
    path: str | os.PathLike[str],
    model: Any,
    fingerprint: Mapping[str, str],
    prompts: Sequence[SavedPrompt],
    packed: CompressedCache,
    pipeline: Mapping[str, Any],
    modules: Mapping[str, str],
    *,
    is_batch: bool,
) -> None:
    """Write what `gracekv.load` needs to go on in another process, atomically.

    Args:
        path: the file.
        model: whose processes write together.
        fingerprint: of the model and tokenizer that the cache was made with.
        prompts: one per sequence of `packed`.
        packed: the entries.
        pipeline: what made them, as plain data.
        modules: of other packages that define its strategies; see `plugins.foreign_modules`.
        is_batch: whether the prompts were given as a list.
    """
    header = {
        "gracekv_version": VERSION,
        "batch": is_batch,
        "model": dict(fingerprint),
        "pipeline": pipeline,
        "modules": modules,
        "prompts": [saved.header() for saved in prompts],
    }
    # Views of one tensor could not be saved side by side.
    ids = {
        f"prompts.{number}.ids": saved.prompt.ids.clone() for number, saved in enumerate(prompts)
    }
    shard = head_shard(model)
    if shard is not None:
        packed = whole_cache(packed, shard)
    if shard is None or shard.rank == 0:
        write_cache(Path(path), packed, header, ids)
    if shard is not None:
        # Until the file is there, or process 0 has failed.
        shard.total(1)
