"""How fast are the allocators? Prints a table and writes `benchmarks/results/allocate.md`.

The greedy allocator is timed against the heap in one run and must buy the same operations first.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path

import machine
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from gracekv.allocate import Frontier, Greedy, Lagrangian
from gracekv.allocate.operations import Operations
from gracekv.allocate.reference import greedy_heap
from gracekv.testing.forests import random_forest

LAYERS, HEADS, SLOT_TOKENS = 28, 4, 127
SLOTS = {"1e5": 19, "1e6": 192}
SHARES = (0.125, 0.5, 0.75)
WARM_UP = 10
COLUMNS = (
    "operations", "gains", "budget share", "quota", "greedy s", "heap s", "heap / greedy",
    "lagrangian s", "greedy / bound", "lagrangian / bound", "forest bytes/op", "greedy bytes/op",
)  # fmt: skip


def timed(
    allocator: Callable[..., Frontier], start: Frontier, quota: torch.Tensor | None, repeats: int
) -> tuple[float, Frontier]:
    """Best wall seconds of `repeats` calls, and the result."""
    best = float("inf")
    for _ in range(repeats):
        gc.collect()
        begin = time.perf_counter()
        result = allocator(start, quota)
        best = min(best, time.perf_counter() - begin)
    return best, result


def held(owner: object, names: Callable[[object], list[str]]) -> int:
    """Bytes of the tensors among an object's fields."""
    fields = (getattr(owner, name) for name in names(owner))
    return sum(x.numel() * x.element_size() for x in fields if isinstance(x, torch.Tensor))


def rows() -> list[list[str]]:
    table = []
    for slots in SLOTS.values():
        for gains in ("heavy", "normal", "zeros"):
            forest = random_forest(
                0, layers=LAYERS, heads=HEADS, slots=slots, slot_tokens=SLOT_TOKENS,
                gains=gains, explode=0.0, prune=0.02, whole=0.0,
            )  # fmt: skip
            ops = Operations.of(forest)
            forest_bytes = held(forest, lambda f: list(type(f).__dataclass_fields__))
            ops_bytes = held(ops, lambda o: list(type(o).__dataclass_fields__))
            for share in SHARES:
                for capped in (False, True) if share == SHARES[1] else (False,):
                    start = Frontier.empty(forest, int(share * int(ops.cost.sum())))
                    quota = None
                    if capped:
                        quota = torch.full((LAYERS, HEADS), start.budget // (LAYERS * HEADS))
                    # A process is slow at first, until its allocator keeps the memory it got.
                    timed(Greedy(), start, quota, WARM_UP)
                    fast, greedy = timed(Greedy(), start, quota, 5)
                    slow, heap = timed(greedy_heap, start, quota, 2)
                    if not torch.equal(greedy.added, heap.added) or not torch.equal(
                        greedy.split, heap.split
                    ):
                        raise SystemExit(
                            "greedy and its reference differ: no timing without equality"
                        )
                    priced, lagrangian = timed(Lagrangian(), start, quota, 1)
                    bound = lagrangian.bound
                    table.append([
                        f"{len(ops):,}", gains, f"{share:g}", "per_head" if capped else "global",
                        f"{fast:.3f}", f"{slow:.2f}", f"{slow / fast:.0f}x", f"{priced:.2f}",
                        f"{greedy.utility / bound:.4f}", f"{lagrangian.utility / bound:.6f}",
                        f"{forest_bytes / len(ops):.0f}", f"{ops_bytes / len(ops):.0f}",
                    ])  # fmt: skip
    return table


def header() -> list[str]:
    return [
        f"machine: {machine.threads()}; {machine.versions()}, numpy {np.__version__}",
        f"commit: {machine.commit()}",
        "dtype: gains float64, indices int64",
        f"config: random_forest(0, layers={LAYERS}, heads={HEADS}, slot_tokens={SLOT_TOKENS}, "
        f"explode=0, prune=0.02, whole=0), slots {', '.join(map(str, SLOTS.values()))}; "
        f"{Greedy()!r}; {Lagrangian()!r}",
        f"greedy: best of 5 after {WARM_UP} calls (the first of a process, in memory it has not "
        "touched yet, take about 0.2 s at 1e6 operations), heap: best of 2, lagrangian: one call. "
        "Budget share is of the cost of all operations. greedy bytes/op counts the arrays of the "
        "operations, temporaries apart.",
    ]


def main() -> None:
    lines, body = header(), rows()
    table = Table(title="Allocators", caption="\n".join(lines))
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for row in body:
        table.add_row(*row)
    Console(width=180).print(table)
    path = Path(__file__).parent / "results" / "allocate.md"
    path.parent.mkdir(exist_ok=True)
    text = ["# Allocators", "", *(f"- {line}" for line in lines), ""]
    text += [f"| {' | '.join(COLUMNS)} |", f"|{'--:|' * len(COLUMNS)}"]
    text += [f"| {' | '.join(row)} |" for row in body]
    path.write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
