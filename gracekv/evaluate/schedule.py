"""The schedule of a run: samples with the cells that have no row yet, and their shards."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gracekv.errors import ConfigError
from gracekv.evaluate.experiment import Experiment, PendingSample
from gracekv.evaluate.row_fields import cell_fields, identity, sample_key
from gracekv.evaluate.row_files import Row, latest
from gracekv.evaluate.sources import Sources
from gracekv.evaluate.worker import Worker


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
        """Names the shard's file of rows."""
        return "main" if self.count == 1 else f"{self.index}of{self.count}"

    def owns(self, number: int) -> bool:
        """Whether unit `number` of the plan is this shard's."""
        return number % self.count == self.index


@dataclass(frozen=True, slots=True)
class Schedule:
    """The work of a run.

    Attributes:
        samples: samples to run, in order.
        done: number of cells that have a row already.
        failed: number of those cells that failed.
    """

    samples: tuple[PendingSample, ...]
    done: int
    failed: int


def make_schedule(
    experiment: Experiment,
    rows: Sequence[Row],
    sources: Sources,
    worker: Callable[[], Worker],
    owns: Callable[[int], bool] = lambda number: True,
    retry_failed: bool = False,
) -> Schedule:
    """Schedule every cell of the experiment that `rows` lack.

    Args:
        experiment: the panels to run.
        rows: existing rows, of all shards.
        sources: where texts come from.
        worker: returns the loaded model; only called if samples are chosen by length ("skip").
        owns: whether the n-th sample belongs to this process.
        retry_failed: whether failed cells are run again.

    Raises `TaskError` if data are missing.
    """
    known = {
        key: row
        for key, row in latest(list(rows)).items()
        if row.get("error") is None or not retry_failed
    }
    hashes = {row["sample"]: row["prompt_hash"] for row in rows if "prompt_hash" in row}
    # Panels with the same sample under the same settings share its prefill.
    numbers: dict[str, int] = {}
    pending: dict[str, tuple[int, PendingSample]] = {}
    seen: set[str] = set()
    done = failed = 0
    for panel in experiment.panels:
        cells = panel.cells()
        for task in panel.all_tasks():
            task.source(sources)
            indices: Iterable[int] = task.available(panel.samples, sources, panel.first)
            if panel.truncate == "skip" and task.length is None:
                loaded = worker()
                longest = loaded.longest_prompt(panel, task)
                indices = task.fitting(
                    panel.samples, sources, loaded.tokenizer, longest, panel.first
                )
            for rank, index in enumerate(indices):
                about = identity(experiment.model, experiment.dtype, panel, task, index)
                sample = sample_key(about)
                if not owns(numbers.setdefault(sample, len(numbers))):
                    continue
                keys = {cell_fields(about, cell)["key"]: cell for cell in cells}
                new = {key: cell for key, cell in keys.items() if key not in seen}
                seen |= new.keys()
                before = [known[key] for key in new if key in known]
                done += len(before)
                failed += sum(row.get("error") is not None for row in before)
                if missing := [cell for key, cell in new.items() if key not in known]:
                    earlier = pending[sample][1].cells if sample in pending else ()
                    every = (*earlier, *missing)
                    entry = PendingSample(panel, task, index, every, hashes.get(sample))
                    pending[sample] = (rank, entry)
    # Every task's first sample before any task's second: a run that is cut short is balanced.
    ordered = sorted(pending.values(), key=lambda pair: pair[0])
    return Schedule(tuple(entry for _, entry in ordered), done, failed)


def parse_shard(text: str | None, environment: Mapping[str, str] = os.environ) -> Shard:
    """``i/n`` with i from 0; without it torchrun's RANK and WORLD_SIZE; without those everything.

    Raises `ConfigError` if it cannot be read or i is not below n.
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


def local_device() -> str | None:
    """torchrun's LOCAL_RANK as a GPU, or None where there is no GPU or no torchrun."""
    import torch

    rank = os.environ.get("LOCAL_RANK")
    return f"cuda:{rank}" if rank is not None and torch.cuda.is_available() else None
