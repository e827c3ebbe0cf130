"""`run`: all rows of an experiment, resumable, and the schedule of samples without rows."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from gracekv.errors import ConfigError, expect
from gracekv.evaluate.experiment import Experiment, PendingSample
from gracekv.evaluate.row_files import Row, RowFile, latest, note_marks, read_rows
from gracekv.evaluate.sources import Sources
from gracekv.evaluate.worker import Worker, cell_fields, identity, sample_key


@dataclass(frozen=True, slots=True)
class Summary:
    """The outcome of a run.

    Attributes:
        written: rows that this run added, failures included.
        failed: cells of this shard that have failed, now or before.
        kept: cells that had a row before.
        folder: where the rows are.
    """

    written: int
    failed: int
    kept: int
    folder: Path


def run(
    experiment: Experiment,
    out: str | Path,
    *,
    shard: Shard | None = None,
    retry_failed: bool = False,
    progress: bool = False,
    model: Any = None,
    tokenizer: Any = None,
) -> Summary:
    """Run the cells that have no row yet; each row is written to disk as soon as it exists.

    A killed run resumes where it stopped. It never adds to rows of other weights or another
    tokenizer under the same names: even if nothing is left to run, the model is loaded and compared
    with the rows. Several processes may write to one folder, each its own shard. A failed cell is
    recorded and does not end the run.

    Args:
        experiment: what to run.
        out: the folder of rows; created if missing.
        shard: the part of this process; default: all.
        retry_failed: run failed cells again.
        progress: show a progress bar.
        model: a loaded model, instead of loading `experiment.model`; with its `tokenizer`.
        tokenizer: see `model`.

    Raises `ConfigError`, `OutputError` or `TaskError` before anything runs if the experiment, its
    data or the folder cannot be used, or if the folder holds rows of another model with the same
    name.
    """
    from rich import progress as rich
    from rich.console import Console

    expect(experiment, Experiment, "run takes an Experiment; Experiment.load reads a file")
    expect(shard, Shard | None, "shard takes a Shard, such as Shard(0, 4)")
    if (model is None) != (tokenizer is None):
        raise ConfigError("Give a loaded model and its tokenizer together, or neither.")
    folder, part = Path(out), shard or Shard()
    sources = Sources(None if experiment.data is None else Path(experiment.data))

    marks: dict[tuple[str, str], Any] = {}
    with RowFile(folder, part.name) as file:
        rows = read_rows(folder)
        for row in rows:
            note_marks(row, marks)
        schedule = make_schedule(experiment, rows, sources, part.owns, retry_failed)
        loaded = (model, tokenizer)
        if model is None:
            from gracekv.hf.smollm2 import load_model

            rank = os.environ.get("LOCAL_RANK") if torch.cuda.is_available() else None
            device = None if rank is None else f"cuda:{rank}"
            loaded = load_model(experiment.model, experiment.dtype, device)
        day = next((row["day"] for row in rows if row.get("day")), date.today().isoformat())
        ready = Worker(experiment.model, experiment.dtype, *loaded, sources, day)
        note_marks(ready.named, marks)
        for sample in schedule.changed:
            ready.check(sample)
        written = failed = 0
        columns = (
            rich.TextColumn("{task.percentage:.0f} %"),
            rich.BarColumn(),
            rich.MofNCompleteColumn(),
            rich.TextColumn("left"),
            rich.TimeRemainingColumn(),
        )
        new = chain.from_iterable(ready.rows(sample) for sample in schedule.samples)
        # Cells come in bursts after each prefill, so with a short window the estimate would jump.
        at, off = Console(stderr=True), not progress
        with rich.Progress(*columns, console=at, speed_estimate_period=600, disable=off) as bar:
            for row in bar.track(new, sum(len(sample.cells) for sample in schedule.samples)):
                file.append(row)
                written += 1
                if (error := row["error"]) is not None:
                    failed += 1
                    where = f"{row['task']} {row['index']} {row['method']} {row['column']}"
                    told = f"failed: {where}: {error['type']}: {error['message']}"
                    bar.console.print(told, markup=False) if progress else None
    return Summary(written, schedule.failed + failed, schedule.done, folder)


@dataclass(frozen=True, slots=True)
class Shard:
    """One process's part of a run.

    Attributes:
        index: number of this part, from 0.
        count: number of parts.
    """

    index: int = 0
    count: int = 1

    @property
    def name(self) -> str:
        """The name of the shard's file of rows."""
        return "main" if self.count == 1 else f"{self.index}of{self.count}"

    def owns(self, number: int) -> bool:
        """Whether unit `number` of the plan belongs to this shard."""
        return number % self.count == self.index


@dataclass(frozen=True, slots=True)
class Schedule:
    """The work of a run.

    Attributes:
        samples: samples to run, in order.
        done: number of cells that have a row already.
        failed: number of those cells that failed.
        changed: samples with a row, whose data file has changed since; without cells.
    """

    samples: tuple[PendingSample, ...]
    done: int
    failed: int
    changed: tuple[PendingSample, ...] = ()


def make_schedule(
    experiment: Experiment,
    rows: Sequence[Row],
    sources: Sources,
    owns: Callable[[int], bool] = lambda number: True,
    retry_failed: bool = False,
) -> Schedule:
    """Schedule every cell of the experiment that is missing from `rows`.

    Args:
        experiment: the panels to run.
        rows: existing rows, of all shards.
        sources: the sources of texts.
        owns: whether the n-th sample belongs to this process.
        retry_failed: whether failed cells are run again.

    Raises `TaskError` if data are missing.
    """
    by_key = latest(rows)
    if retry_failed:
        by_key = {key: row for key, row in by_key.items() if row.get("error") is None}
    hashes = {row["sample"]: row["prompt_hash"] for row in rows if row.get("prompt_hash")}
    # Panels with the same sample under the same settings share its prefill.
    numbers: dict[str, int] = {}
    pending: dict[str, tuple[int, PendingSample]] = {}
    changed: list[PendingSample] = []
    visited: set[str] = set()
    done = failed = 0
    for panel in experiment.panels:
        cells = panel.cells()
        for task in panel.all_tasks():
            source = task.source(sources)
            for rank, index in enumerate(task.available(panel.samples, sources, panel.first)):
                about = identity(experiment.model, experiment.dtype, panel, task, index)
                sample = sample_key(about)
                if not owns(numbers.setdefault(sample, len(numbers))):
                    continue
                keys = {cell_fields(about, cell)["key"]: cell for cell in cells}
                new = {key: cell for key, cell in keys.items() if key not in visited}
                visited |= new.keys()
                old_rows = [by_key[key] for key in new if key in by_key]
                done += len(old_rows)
                failed += sum(row.get("error") is not None for row in old_rows)
                if any(row.get("source", source) != source for row in old_rows):
                    changed.append(PendingSample(panel, task, index, (), hashes.get(sample)))
                if missing := [cell for key, cell in new.items() if key not in by_key]:
                    old = pending[sample][1].cells if sample in pending else ()
                    entry = PendingSample(panel, task, index, (*old, *missing), hashes.get(sample))
                    pending[sample] = (rank, entry)
    # Every task's first sample before any task's second, so that an interrupted run is balanced.
    ordered = sorted(pending.values(), key=lambda pair: pair[0])
    return Schedule(tuple(entry for _, entry in ordered), done, failed, tuple(changed))


def parse_shard(text: str | None, environment: Mapping[str, str] = os.environ) -> Shard:
    """Parse ``i/n`` with i from 0; default: torchrun's RANK and WORLD_SIZE, else everything.

    Raises `ConfigError` if it cannot be parsed or i is not below n.
    """
    if text is None:
        rank, size = environment.get("RANK"), environment.get("WORLD_SIZE")
        if rank is None or size is None:
            return Shard()
        text = f"{rank}/{size}"
    match = re.fullmatch(r"(\d+)/(\d+)", text.strip())
    if match is None or int(match[1]) >= int(match[2]):
        raise ConfigError(
            f"A shard is i/n with i from 0 to n-1, such as 0/4; got {text!r} (from --shard, or "
            f"from RANK and WORLD_SIZE)."
        )
    return Shard(int(match[1]), int(match[2]))
