"""The budget that a call names, and whether it can work."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, TypeAlias

from gracekv.allocate import Budget
from gracekv.errors import BudgetError
from gracekv.pipeline import Pipeline
from gracekv.prefill.model_layers import compressed_layers, head_sizes
from gracekv.prefill.prompt import Prompt

Number: TypeAlias = int | float | str | Fraction


def chosen_budget(**amounts: Any) -> Budget:
    """The one budget that is not None, of `budget` and the constructors of `Budget`.

    Raises `BudgetError` if there is none, or several.
    """
    given = {name: value for name, value in amounts.items() if value is not None}
    if len(given) != 1:
        raise BudgetError(
            f"Give exactly one budget, {', '.join(amounts)}; got {' and '.join(given) or 'none'}. "
            f"For example ratio=8 keeps an eighth of the context."
        )
    ((name, value),) = given.items()
    if name != "budget":
        budget: Budget = getattr(Budget, name)(value)
        return budget
    if not isinstance(value, Budget):
        raise BudgetError(
            f"budget takes a gracekv.Budget; got {value!r}. Use Budget.ratio(8), or ratio=8."
        )
    return value


def check_budget(model: Any, prompt: Prompt, pipe: Pipeline, budget: Budget) -> None:
    """Raise `BudgetError` if `budget` is too small, from the model's config and the spans alone."""
    _, groups, dim = head_sizes(model)
    budget.plan(
        layers=len(compressed_layers(model)),
        heads=groups,
        context=prompt.spans.context_length,
        entry_bytes=2 * dim * model.dtype.itemsize,
        window=pipe.window,
        costs=pipe.precision.entry_bytes(dim, model.dtype.itemsize, prompt.spans),
    )
