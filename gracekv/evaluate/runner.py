"""`run`: all rows of an experiment, resumable."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from gracekv.evaluate.experiment import Experiment
from gracekv.evaluate.row_files import Row, RowFile, note_marks, read_rows
from gracekv.evaluate.schedule import Schedule, Shard, local_device, make_schedule
from gracekv.evaluate.sources import Sources
from gracekv.evaluate.worker import Worker


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

    A run that was killed resumes where it stopped. It never adds to rows of other weights or of
    another tokenizer under the same names: the model is loaded, even if nothing is left to run,
    and compared with the rows. Several processes may write to one folder, each its own shard.
    A failed cell is recorded and does not end the run.

    Args:
        experiment: what to run.
        out: the folder of rows, made if it is not there.
        shard: the part of this process; default: all.
        retry_failed: run failed cells again.
        progress: show a progress bar.
        model: a loaded model, instead of loading `experiment.model`; with its `tokenizer`.
        tokenizer: see `model`.

    Raises `ConfigError`, `OutputError` or `TaskError` before anything is run if the experiment, its
    data or the folder cannot be used, or if the folder holds rows of another model that had the
    same name.
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

    marks: dict[tuple[str, str], Any] = {}
    with RowFile(folder, part.name) as file:
        rows = read_rows(folder)
        for row in rows:
            note_marks(row, marks)
        schedule = make_schedule(experiment, rows, sources, worker, part.owns, retry_failed)
        note_marks(worker().named, marks)
        written = failed = 0
        if schedule.samples:
            with _bar(schedule, progress) as tick:
                for row in chain.from_iterable(map(worker().rows, schedule.samples)):
                    file.append(row)
                    written += 1
                    failed += row["error"] is not None
                    tick(row)
    return Summary(written, schedule.failed + failed, schedule.done, folder)


@contextmanager
def _bar(schedule: Schedule, shown: bool) -> Iterator[Callable[[Row], None]]:
    """A progress bar over cells with the time left, called with every row; or nothing."""
    if not shown:
        yield lambda row: None
        return
    from rich import progress as rich

    columns = (
        rich.TextColumn("{task.description}"), rich.BarColumn(), rich.MofNCompleteColumn(),
        rich.TimeElapsedColumn(), rich.TextColumn("left"), rich.TimeRemainingColumn(),
    )  # fmt: skip
    # Cells come in bursts, a prefill before each: a short window would make the estimate jump.
    with rich.Progress(*columns, speed_estimate_period=600) as bar:
        task = bar.add_task("starting", total=sum(len(x.cells) for x in schedule.samples))
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
