"""`run`: all rows of an experiment, resumable."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from gracekv.errors import ConfigError
from gracekv.evaluate.experiment import Experiment, PendingSample
from gracekv.evaluate.row_files import Row, RowFile, read_rows
from gracekv.evaluate.schedule import Schedule, make_schedule
from gracekv.evaluate.shards import Shard, local_device
from gracekv.evaluate.sources import Sources
from gracekv.evaluate.worker import Worker


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run did.

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


class Tick(Protocol):
    """Called with every row as it is written."""

    def __call__(self, row: Row) -> None: ...


def run(
    experiment: Experiment,
    out: str | Path,
    *,
    shard: Shard | None = None,
    retry_failed: bool = False,
    progress: bool = False,
    model: Any = None,
    tokenizer: Any = None,
    ray_workers: int | None = None,
) -> Summary:
    """Run what is missing; every row is on the disk as soon as it exists.

    A run that was killed goes on where it stopped, and a finished one ends at once, without
    loading the model (unless samples are chosen by their length). Several processes may write to
    one folder, each its own shard. A failed cell is recorded and does not end the run.

    Args:
        experiment: what to run.
        out: the folder of rows, made if it is not there.
        shard: the part of this process; default: all.
        retry_failed: run failed cells again.
        progress: show a progress bar.
        model: a loaded model, instead of loading `experiment.model`; with its `tokenizer`.
        tokenizer: see `model`.
        ray_workers: spread samples over this many workers of a Ray cluster.

    Raises `ConfigError` or `TaskError` before anything is run if the experiment, its data or the
    folder cannot be used.
    """
    folder, part = Path(out), shard or Shard()
    sources = Sources(None if experiment.data is None else Path(experiment.data))

    @cache
    def worker() -> Worker:
        loaded = (model, tokenizer)
        if model is None:
            from gracekv.hf.loading import load_model

            loaded = load_model(experiment.model, experiment.dtype, local_device())
        return Worker(experiment.model, experiment.dtype, *loaded, sources)

    with RowFile(folder, part.name) as file:
        rows = read_rows(folder)
        schedule = make_schedule(experiment, rows, sources, worker, part.owns, retry_failed)
        written = failed = 0
        if schedule.samples:
            if ray_workers is None:
                new = _here(schedule.samples, worker())
            else:
                from gracekv.evaluate.cluster import spread

                new = spread(experiment, schedule.samples, ray_workers)
            with _bar(schedule, progress) as tick:
                for row in new:
                    _check_model(row, rows)
                    file.append(row)
                    written += 1
                    failed += row["error"] is not None
                    tick(row)
    return Summary(written, schedule.failed + failed, schedule.done, folder)


def _check_model(row: Row, before: list[Row]) -> None:
    """Rows of two models under one name would be averaged in one table."""
    for other in before:
        if all(name in other and name in row for name in ("model", "dtype", "marks")) and (
            (other["model"], other["dtype"]) == (row["model"], row["dtype"])
        ):
            if other["marks"] != row["marks"]:
                raise ConfigError(
                    f"The folder holds rows of another model or tokenizer that was also called "
                    f"{row['model']!r}. Use a new folder."
                )
            return


def _here(samples: Iterable[PendingSample], worker: Worker) -> Iterator[Row]:
    for sample in samples:
        yield from worker.rows(sample)


@contextmanager
def _bar(schedule: Schedule, shown: bool) -> Iterator[Tick]:
    """A progress bar over cells with the time left, or nothing."""
    if not shown:
        yield lambda row: None
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    # Cells come in bursts, a prefill before each: a short window would make the estimate jump.
    with Progress(*columns, speed_estimate_period=600) as bar:
        task = bar.add_task("starting", total=schedule.cells)
        printed: set[tuple[str, str]] = set()

        def tick(row: Row) -> None:
            place = "" if row["length"] is None else f" @{row['length']}"
            bar.update(
                task, advance=1, description=f"{row['task']}{place} {row['method']} {row['column']}"
            )
            # A sample that fails as a whole fails in every cell: it is printed once.
            failed = (row["sample"], str(row["error"]))
            if row["error"] is not None and failed not in printed:
                printed.add(failed)
                bar.console.print(
                    f"failed: {row['task']} {row['index']} {row['method']} {row['column']}: "
                    f"{row['error']['type']}: {row['error']['message']}",
                    markup=False,
                )

        yield tick
