"""Requests other than questions: make or extend a context, list or delete contexts.

A question gives the name of a context; such a request gives a mapping instead. See docs/vllm.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gracekv.allocate import Budget
from gracekv.decode.limit import Limit
from gracekv.errors import BudgetError, ConfigError, StoreError
from gracekv.pipeline import Pipeline
from gracekv.prefill.spans import PromptSpans
from gracekv.recipes import DEFAULT_WITHOUT_QUESTION
from gracekv.registry import check_values
from gracekv.vllm.header import TurnFormat, check_name

FRONT = "gracekv_front"
"""The key in `kv_transfer_params` under which the front passes `start` and the `TurnFormat`.

It replaces whatever a client sends there.
"""

_OPTIONS = {"name", "recipe", "save", "expires"}
_BUDGETS = ("ratio", "entries_per_head", "kv_bytes")
_ABLE = "gracekv-agnostic, snapkv, expected-attention, knorm or keydiff"


@dataclass(frozen=True, slots=True)
class Listing:
    """Lists contexts.

    Attributes:
        name: name of the only context to list, if it exists; None for all.
    """

    name: str | None = None


@dataclass(frozen=True, slots=True)
class Deletion:
    """Deletes a context.

    Attributes:
        name: name of the context.
    """

    name: str


@dataclass(frozen=True, slots=True)
class Compression:
    """Makes a context of a request's prompt, or extends one by it.

    Attributes:
        name: name of the context.
        recipe: the pipeline's name.
        pipeline: compresses the prompt.
        budget: size of the context, or of the passage's part of it.
        save: whether to also write it to the store's folder.
        expires: seconds until it is deleted, or None.
        start: tokens before the document, which are never compressed.
        follow: how requests continue it.
        source: the context that the prompt continues, which is kept unless it has the same name;
            None for a document.
        limit: the most entries of the longer context, or None.
    """

    name: str
    recipe: str
    pipeline: Pipeline
    budget: Budget
    save: bool = False
    expires: float | None = None
    start: int = 0
    follow: TurnFormat = field(default_factory=TurnFormat)
    source: str | None = None
    limit: Limit | None = None

    def spans(self, length: int, past: int = 0) -> PromptSpans:
        """The spans of a prompt whose last token gets no entries.

        Args:
            length: tokens of the prompt.
            past: places of the context that precedes a passage.

        Raises `StoreError` if fewer than two tokens of a document are left to compress.
        """
        if not 0 <= self.start <= length - (3 if self.source is None else 2):
            raise StoreError(
                f"A document of {length - 1} tokens, of which {self.start} come before the "
                f"context, leaves nothing to compress. Send a longer one."
            )
        start, end = past + self.start, past + length - 1
        return PromptSpans(start, end, end, end + 1, past=past)


Order = Compression | Listing | Deletion


def names_of(order: Order) -> list[str]:
    """Names of the contexts that an order makes, reads, lists or deletes."""
    return [name for x in ("name", "source") if (name := getattr(order, x, None)) is not None]


def order_of(
    parameter: Any,
    front: Mapping[str, Any] | None = None,
    recipe_of: Callable[[str], str] = lambda name: DEFAULT_WITHOUT_QUESTION,
) -> Order | None:
    """The order in a request's parameter, or None if the parameter is a name.

    Args:
        parameter: the parameter.
        front: `start` and `follow` of `Compression`, if the request came through the front.
        recipe_of: the recipe of a context, which compresses a passage unless the order names one.

    Raises `StoreError` if it is not an order, or names a recipe that an engine cannot run.
    """
    if not isinstance(parameter, Mapping):
        return None
    kind, fields = next(iter(parameter.items())) if len(parameter) == 1 else ("", None)
    if parameter == {"list": True}:
        return Listing()
    if kind == "list":
        return Listing(check_name(fields))
    if kind == "delete":
        return Deletion(check_name(fields))
    if kind in ("compress", "extend") and isinstance(fields, Mapping):
        facts = {"start": 0, "follow": {}, **(front or {})}
        try:
            order = _compression(fields, recipe_of if kind == "extend" else None)
        except (BudgetError, ConfigError) as error:
            raise StoreError(str(error)) from error
        return replace(order, start=facts["start"], follow=TurnFormat(**facts["follow"]))
    raise StoreError(
        f'A request names a context, or is one of {{"compress": {{"name": "book", "ratio": 4}}}}, '
        f'{{"extend": {{"name": "book", "ratio": 4}}}}, {{"list": true}} and {{"delete": "book"}}; '
        f"got {str(parameter)[:200]}."
    )


def _compression(fields: Mapping[str, Any], recipe_of: Callable[[str], str] | None) -> Compression:
    names = _OPTIONS.union(_BUDGETS, () if recipe_of is None else {"into", "limit"})
    if unknown := sorted(map(str, fields.keys() - names)):
        raise StoreError(
            f"Compressing takes {', '.join(sorted(names))}; got {', '.join(unknown)[:200]}."
        )
    name, source = check_name(fields.get("name")), None
    recipe = fields.get("recipe", DEFAULT_WITHOUT_QUESTION)
    if recipe_of is not None:
        name, source = check_name(fields.get("into", name)), name
        recipe = fields["recipe"] if "recipe" in fields else recipe_of(source)
    if recipe == "custom":
        raise StoreError(f"Context {source!r} was not made by a recipe. Name one: recipe=...")
    if not isinstance(recipe, str):
        raise StoreError(f"A recipe is a name; got {str(recipe)[:200]!r}.")
    pipeline = Pipeline.named(recipe)
    reads = {what for observer in pipeline.needs().observers for what in observer.reads}
    if reads == {"passes"} and source and "recipe" not in fields:
        # A context by two passes was made elsewhere; one pass reads its passages.
        recipe, reads = DEFAULT_WITHOUT_QUESTION, set()
        pipeline = Pipeline.named(recipe)
    if reads:
        raise StoreError(
            f"An engine cannot compress with recipe {recipe!r}, which reads more of the model than "
            f"queries, keys and values. Use one that reads only those, such as {_ABLE}, or "
            f"compress with transformers and export."
        )
    options = {x: fields[x] for x in ("save", "expires") if x in fields}
    check_values(Compression, options)
    expires = options.get("expires")
    if expires is not None and (options.get("save") or not expires > 0):
        raise StoreError(
            f"'expires' is a number of seconds above 0, for a context that is not saved; got "
            f"{expires!r}. A saved one stays until it is deleted."
        )
    budget = Budget.of({x: fields[x] for x in _BUDGETS & fields.keys()}, _BUDGETS)
    shorter = budget.kind == "ratio" and budget.amount > 1
    if source and pipeline.keep_all and shorter and "recipe" not in fields:
        raise StoreError(
            f"Context {source!r} was made by {recipe!r}, which removes nothing. Name a recipe that "
            f"compresses, such as recipe={DEFAULT_WITHOUT_QUESTION!r}, or give ratio=1. For a "
            f"conversation that compresses, make the context by such a recipe at ratio=1."
        )
    limit = None if fields.get("limit") is None else Limit.from_dict(fields["limit"])
    if limit and (limit.strategy or limit.history):
        raise StoreError(f"A context's limit has neither 'strategy' nor 'history'; got {limit}.")
    return Compression(name, recipe, pipeline, budget, **options, source=source, limit=limit)
