"""How long does the floor's purchase take? Prints a table, writes `benchmarks/results/floor.md`.

Compares the compiled walk with the plain Python one on made-up forests; both must buy the same.
"""

from __future__ import annotations

import time
from pathlib import Path

import machine
import torch

from gracekv.allocate import BudgetPlan, Frontier, Singleton, singleton
from gracekv.allocate.operations import Operations
from gracekv.testing.forests import random_forest

LAYERS, HEADS, SLOT_TOKENS, RATIO = 28, 4, 127, 8
SLOTS = (2, 19, 64, 192)
COLUMNS = ("tokens", "operations", "candidates", "bought", "Python s", "compiled s", "faster")


def timed(compiled: bool, *inputs: object) -> tuple[float, Frontier]:
    """Best wall seconds of three purchases, and the result."""
    singleton._COMPILED = 0 if compiled else 10**12
    best = float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        result = Singleton().realize(*inputs)  # type: ignore[arg-type]
        best = min(best, time.perf_counter() - begin)
    return best, result


def row(slots: int) -> list[str]:
    forest = random_forest(
        0, layers=LAYERS, heads=HEADS, slots=slots, slot_tokens=SLOT_TOKENS,
        gains="heavy", explode=0.0, prune=0.02, whole=0.0,
    )  # fmt: skip
    tokens = int(forest.end.max() - forest.start.min())
    plan = BudgetPlan(LAYERS, HEADS, tokens, LAYERS * HEADS * tokens // RATIO, recent=0)
    rng = torch.Generator().manual_seed(0)
    scores = torch.randn(LAYERS, HEADS, tokens, generator=rng).mul(2).exp()
    candidates = Singleton().candidates(scores / scores.sum(-1, keepdim=True), plan)
    assert candidates is not None
    plain, expected = timed(False, forest, candidates, plan, None)
    fast, result = timed(True, forest, candidates, plan, None)
    if not torch.equal(result.split, expected.split):
        raise SystemExit("the two walks buy differently: no timing without equality")
    return [
        f"{tokens:,}", f"{len(Operations.of(forest)):,}",
        f"{int((candidates > -torch.inf).sum()):,}", f"{result.floor_spent:,}",
        f"{plain:.3f}", f"{fast:.3f}", f"{plain / fast:.1f}x",
    ]  # fmt: skip


def main() -> None:
    lines = [
        "# The floor's purchase",
        "",
        f"- machine: {machine.threads()}; torch {torch.__version__}",
        f"- commit: {machine.commit()}",
        f"- forests: {LAYERS} layers, {HEADS} KV heads, slots of about {SLOT_TOKENS // 2} tokens, "
        f"made up; {Singleton()!r}; {RATIO}x",
        "- seconds of `Singleton.realize`, best of three: everything from candidates to frontier. "
        "The first call of a process loads the compiled walk, about 0.1 s; the first on a machine "
        "compiles it, about 1 s.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{'--:|' * len(COLUMNS)}",
    ]
    for slots in SLOTS:
        lines.append(f"| {' | '.join(row(slots))} |")
        print(lines[-1], flush=True)
    path = Path(__file__).parent / "results" / "floor.md"
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
