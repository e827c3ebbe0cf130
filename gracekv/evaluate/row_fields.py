"""The fields of a row: method, sample, settings, costs, and what identifies them."""

from __future__ import annotations

import hashlib
import json
import platform
import traceback
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import gracekv
from gracekv.cache import Accounting, Timings
from gracekv.evaluate.experiment import Cell, Panel
from gracekv.evaluate.row_files import Row
from gracekv.evaluate.tasks import Task
from gracekv.prefill import PromptSpans

_PACKAGES = ("torch", "transformers", "numpy")
# Settings of a panel that change what a row measures.
_SETTINGS = (
    "protocol", "generate", "max_new_tokens", "fidelity", "answer_words", "max_prompt", "truncate",
)  # fmt: skip


def identity(model: str, dtype: str, panel: Panel, task: Task, index: int) -> dict[str, Any]:
    """The fields that tell one sample under a panel's settings from all others."""
    return {
        "model": model,
        "dtype": dtype,
        "task": task.name,
        "length": task.length,
        "seed": task.seed,
        "index": index,
        "settings": {name: getattr(panel, name) for name in _SETTINGS},
    }


def sample_key(sample: Mapping[str, Any]) -> str:
    """Identifies the sample of that `identity`, without loading the model."""
    return hashlib.sha256(json.dumps(sample, sort_keys=True).encode()).hexdigest()[:24]


def cell_fields(sample: Mapping[str, Any], cell: Cell) -> dict[str, Any]:
    """The method and the budget of one cell of a sample, and `key`.

    Rows of the same key measure the same thing.
    """
    pipeline = cell.pipeline.to_dict()
    fields = {"method": cell.method, "pipeline": pipeline, "column": cell.column}
    return {"key": sample_key({**sample, **fields}), **fields}


def known_fields(sample: Mapping[str, Any], group: str, cell: Cell) -> Row:
    """The part of a row that is known before anything is run."""
    return {
        **cell_fields(sample, cell),
        "sample": sample_key(sample),
        **sample,
        "group": group,
        "budget": None if cell.budget is None else cell.budget.kind,
        "versions": versions(),
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "error": None,
    }


def cost_fields(kept: Accounting, timings: Timings, spans: PromptSpans) -> dict[str, Any]:
    """Entries, bytes and seconds of one compression."""
    return {
        "entries": {
            "budget": kept.budget,
            "spent": kept.spent,
            "full": kept.entries.numel() * spans.context_length,
            "floor": kept.floor_spent,
            "recent_per_head": kept.recent,
        },
        "bytes": {
            "kv": kept.bytes,
            "metadata": kept.metadata_bytes,
            "backend": kept.backend_bytes,
            "full_kv": kept.full_bytes,
        },
        "prefill_seconds": timings.prefill,
        "construction_seconds": timings.construction,
        "stage_seconds": dict(timings.as_dict()),
        "certified_ratio": kept.certified_ratio,
    }


def over_questions(measured: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over the questions to one cache, with what each measured under "questions"."""

    def mean(values: Sequence[Any]) -> Any:
        if isinstance(values[0], Mapping):
            return {name: mean([value[name] for value in values]) for name in values[0]}
        return sum(values) / len(values)

    averaged = ("fidelity", "score", "scores", "new_tokens", "ms_per_token")
    return {
        **{name: mean([one[name] for one in measured]) for name in averaged if name in measured[0]},
        "questions": [dict(one) for one in measured],
    }


def error_fields(error: Exception) -> dict[str, Any]:
    """An error as data, with the place in the code that raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{last.name}:{last.lineno}"
    told = {"type": type(error).__name__, "message": str(error)[:2000], "where": where}
    return {"error": told}


def versions() -> dict[str, str]:
    """Versions of the packages that can change a result."""
    own = {"gracekv": gracekv.__version__, "python": platform.python_version()}
    return own | {package: version(package) for package in _PACKAGES}
