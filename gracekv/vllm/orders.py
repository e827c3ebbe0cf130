"""Requests beside questions: compress the prompt, list contexts, delete one.

A question gives the name of a context; such a request gives a mapping instead. See docs/vllm.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gracekv.allocate import Budget
from gracekv.errors import BudgetError, ConfigError, StoreError
from gracekv.pipeline import Pipeline
from gracekv.prefill.observations import check_observers
from gracekv.prefill.prompt import PromptSpans
from gracekv.recipes import DEFAULT_WITHOUT_QUESTION
from gracekv.registry import check_values
from gracekv.vllm.header import Continuation, check_name

FRONT = "gracekv_front"
"""The key in `kv_transfer_params` under which the front passes `start` and the `Continuation`.

It replaces whatever a client sends there.
"""

_OPTIONS = {"name", "recipe", "save", "expires"}
_BUDGETS = {"ratio", "entries_per_head", "kv_bytes"}


@dataclass(frozen=True, slots=True)
class Listing:
    """Lists contexts."""


@dataclass(frozen=True, slots=True)
class Deletion:
    """Deletes a context.

    Attributes:
        name: of the context.
    """

    name: str


@dataclass(frozen=True, slots=True)
class Compression:
    """Makes a context of a request's prompt.

    Attributes:
        name: of the context.
        recipe: the pipeline's name.
        pipeline: compresses the prompt.
        budget: size of the context.
        save: whether to write it to the store's folder too.
        expires: seconds until it is deleted, or None.
        start: tokens before the document, which are never compressed.
        follow: how requests continue it.
    """

    name: str
    recipe: str
    pipeline: Pipeline
    budget: Budget
    save: bool = False
    expires: float | None = None
    start: int = 0
    follow: Continuation = field(default_factory=Continuation)

    def spans(self, length: int) -> PromptSpans:
        """The spans of a prompt of `length` tokens; its last token gets no entries.

        Raises `StoreError` if fewer than two tokens are left to compress.
        """
        if not 0 <= self.start <= length - 3:
            raise StoreError(
                f"A document of {length - 1} tokens, of which {self.start} come before the "
                f"context, leaves nothing to compress. Send a longer one."
            )
        return PromptSpans(self.start, length - 1, length - 1, length)


Order = Compression | Listing | Deletion


def order_of(given: Any, front: Mapping[str, Any] | None = None) -> Order | None:
    """The order in a request's parameter, or None if the parameter is a name.

    Args:
        given: the parameter.
        front: `start` and `follow` of `Compression`, if the request came through the front.

    Raises `StoreError` if it is not an order, or names a recipe that an engine cannot run.
    """
    if not isinstance(given, Mapping):
        return None
    if given == {"list": True}:
        return Listing()
    if list(given) == ["delete"]:
        return Deletion(check_name(given["delete"]))
    if list(given) == ["compress"] and isinstance(given["compress"], Mapping):
        known = {"start": 0, "follow": {}, **(front or {})}
        follow = Continuation(**known["follow"])
        try:
            return _compression(given["compress"], known["start"], follow)
        except (BudgetError, ConfigError) as error:
            raise StoreError(str(error)) from error
    raise StoreError(
        f'A request names a context, or is one of {{"compress": {{"name": "book", "ratio": 4}}}}, '
        f'{{"list": true}} and {{"delete": "book"}}; got {str(given)[:200]}.'
    )


def _compression(given: Mapping[str, Any], start: int, follow: Continuation) -> Compression:
    unknown = sorted(map(str, given.keys() - _OPTIONS - _BUDGETS))
    if unknown:
        raise StoreError(
            f"A compressing request takes {', '.join(sorted(_OPTIONS | _BUDGETS))}; got "
            f"{', '.join(unknown)[:200]}."
        )
    recipe = given.get("recipe", DEFAULT_WITHOUT_QUESTION)
    if not isinstance(recipe, str):
        raise StoreError(f"A recipe is a name; got {str(recipe)[:200]!r}.")
    pipeline = Pipeline.named(recipe)
    check_observers(
        pipeline.needs().observers,
        frozenset(),
        "an engine",
        f"Take {DEFAULT_WITHOUT_QUESTION!r}, or compress with transformers and export.",
    )
    options = {x: given[x] for x in ("save", "expires") if x in given}
    check_values(Compression, options)
    expires = options.get("expires")
    if expires is not None and (options.get("save") or not expires > 0):
        raise StoreError(
            f"'expires' is a number of seconds above 0, for a context that is not saved; got "
            f"{expires!r}. A saved one stays until it is deleted."
        )
    budget = Budget.of({x: given[x] for x in _BUDGETS & given.keys()})
    name = check_name(given.get("name"))
    return Compression(name, recipe, pipeline, budget, **options, start=start, follow=follow)
