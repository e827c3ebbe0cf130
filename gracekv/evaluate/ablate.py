"""Ablations and sweeps: variants of one method, shown as differences from it."""

from __future__ import annotations

from collections.abc import Sequence

from gracekv import recipes
from gracekv.errors import ConfigError
from gracekv.evaluate.formats import difference
from gracekv.evaluate.measures import Measure
from gracekv.evaluate.methods import sweep
from gracekv.evaluate.row_files import Row
from gracekv.evaluate.tables import FULL, make_tables


def variants(base: str, settings: Sequence[str], ablations: bool) -> list[str]:
    """The base method, its ablation recipes (`BASE-no-...`), and one method a swept value.

    Raises `ConfigError` if nothing is left to compare with the base.
    """
    found = [base]
    if ablations:
        found += [name for name in recipes.names() if name.startswith(f"{base}-no-")]
    found += sweep(base, settings)
    if len(found) == 1:
        raise ConfigError(
            f"There are no ablation recipes of {base!r}. Give --set stage.field=v1,v2, or a base "
            f"with recipes {base}-no-..."
        )
    return found


def deltas(rows: Sequence[Row], base: str, measure: Measure) -> str:
    """Markdown: the base's mean, and every variant's paired difference from it, a table a group.

    Differences that `compare` finds at p < 0.05, Holm-adjusted, are bold.
    """
    parts = []
    for table in make_tables(rows, measure, base):
        columns = table.columns
        others = [m for m in table.methods if m != base and (m, FULL) not in table.cells]
        lines = [f"### {table.title}: {measure.title}, difference from {base}", ""]
        lines.append(f"| method | {' | '.join(columns)} |")
        lines.append(f"| --- |{' ---: |' * len(columns)}")
        means = [
            f"{table.cells[base, c].mean:.{measure.digits}f}" if (base, c) in table.cells else "–"
            for c in columns
        ]
        lines.append(f"| {base} | {' | '.join(means)} |")
        for method in others:
            cells = []
            for column in columns:
                versus = table.against.get((method, column))
                text = "–" if versus is None else difference(versus.delta, measure.digits)
                sure = versus is not None and versus.p < 0.05
                cells.append(f"**{text}**" if sure else text)
            lines.append(f"| {method} | {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"
