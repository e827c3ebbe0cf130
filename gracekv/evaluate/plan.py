"""What is still to be run: samples with their missing cells."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from gracekv.evaluate.experiment import Cell, Experiment, Panel
from gracekv.evaluate.result_rows import Row, latest
from gracekv.evaluate.rows import row_key, sample_key
from gracekv.evaluate.sources import Sources
from gracekv.evaluate.tasks import Task
from gracekv.evaluate.worker import Worker


@dataclass(frozen=True, slots=True)
class Unit:
    """One sample and the cells that it still needs.

    Attributes:
        panel: the settings.
        task: where the sample comes from.
        index: its number.
        cells: what is missing, in the panel's order.
        before: the prompt hash in earlier rows of this sample, or None.
    """

    panel: Panel
    task: Task
    index: int
    cells: tuple[Cell, ...]
    before: str | None


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run has to do.

    Attributes:
        units: to run.
        done: cells that were there before.
        failed: cells among them that had failed.
    """

    units: tuple[Unit, ...]
    done: int
    failed: int

    @property
    def cells(self) -> int:
        """Cells to run."""
        return sum(len(unit.cells) for unit in self.units)


def make_plan(
    experiment: Experiment,
    rows: Sequence[Row],
    sources: Sources,
    worker: Callable[[], Worker],
    owns: Callable[[int], bool] = lambda number: True,
    retry_failed: bool = False,
) -> Plan:
    """Everything that the experiment asks for and `rows` do not hold.

    Args:
        experiment: what is asked for.
        rows: what exists, of all shards.
        sources: where texts come from.
        worker: gives the loaded model; only called if the plan needs a tokenizer ("skip").
        owns: whether the n-th sample is this process's.
        retry_failed: whether failed cells are run again.

    Raises `TaskError` if data are missing.
    """
    known = latest(list(rows))
    hashes = {row["sample"]: row["prompt_hash"] for row in rows if "prompt_hash" in row}
    name, dtype = experiment.model, experiment.dtype
    # Panels that ask the same sample under the same settings share its prefill.
    samples: dict[str, int] = {}
    units: dict[str, tuple[int, Unit]] = {}
    seen: set[str] = set()
    done = failed = 0
    for panel in experiment.panels:
        cells = panel.cells()
        for task in panel.all_tasks():
            task.source(sources)
            indices: Iterable[int] = task.available(panel.samples, sources)
            if panel.truncate == "skip" and task.length is None:
                loaded = worker()
                room = loaded.room(panel, task)
                indices = task.fitting(panel.samples, sources, loaded.tokenizer, room)
            for rank, index in enumerate(indices):
                sample = sample_key(name, dtype, panel, task, index)
                if not owns(samples.setdefault(sample, len(samples))):
                    continue
                missing = []
                for cell in cells:
                    key = row_key(name, dtype, panel, task, index, cell)
                    if key in seen:
                        continue
                    seen.add(key)
                    before = known.get(key)
                    if before is None or (before.get("error") is not None and retry_failed):
                        missing.append(cell)
                        continue
                    done += 1
                    failed += before.get("error") is not None
                if missing:
                    earlier = units[sample][1].cells if sample in units else ()
                    cells_of_sample = (*earlier, *missing)
                    unit = Unit(panel, task, index, cells_of_sample, hashes.get(sample))
                    units[sample] = (rank, unit)
    # Every task's first sample before any task's second: a run that is cut short is balanced.
    ordered = sorted(units.values(), key=lambda pair: pair[0])
    return Plan(tuple(unit for _, unit in ordered), done, failed)
