"""What a request may ask beside a question: compress its prompt, list contexts, delete one.

Where a question has a context's name, such a request has a mapping; see docs/vllm.md.
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
from gracekv.vllm.header import SEPARATOR, check_name

FOLLOW = "gracekv_follow"
"""The key of `Follow` in `kv_transfer_params`, which the front sets, whatever clients sent."""

_OPTIONS = {"name", "recipe", "save", "expires"}
_BUDGETS = {"ratio", "entries_per_head", "kv_bytes"}


@dataclass(frozen=True, slots=True)
class Follow:
    """How later requests go on after a context; `ContextHeader` says what each field is.

    Attributes:
        start: tokens before the context, which are never compressed.
        tokenizer: empty if the document is in no known format.
        question_text: as the front found it, or an export.
        separator: likewise.
        template: likewise.
        has_question: likewise.
        prompt_ids: likewise.
    """

    start: int = 0
    tokenizer: dict[str, Any] = field(default_factory=dict)
    question_text: str | None = None
    separator: str = SEPARATOR
    template: bool = False
    has_question: bool = False
    prompt_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Listing:
    """Which contexts there are."""


@dataclass(frozen=True, slots=True)
class Deletion:
    """A context shall go.

    Attributes:
        name: of the context.
    """

    name: str


@dataclass(frozen=True, slots=True)
class Compression:
    """A request's prompt shall become a context.

    Attributes:
        name: of the context.
        recipe: the pipeline's name.
        pipeline: compresses.
        budget: what may stay.
        save: whether it is also written to the store's folder.
        expires: seconds after which it is deleted; None: never.
        follow: how it goes on.
    """

    name: str
    recipe: str
    pipeline: Pipeline
    budget: Budget
    save: bool = False
    expires: float | None = None
    follow: Follow = field(default_factory=Follow)

    def spans(self, length: int) -> PromptSpans:
        """Of `length` tokens, the last of which is read after the context and gets no entries.

        Raises `StoreError` if less than two tokens are left to compress.
        """
        start = self.follow.start
        if not 0 <= start <= length - 3:
            raise StoreError(
                f"A document of {length - 1} tokens, of which {start} come before the context, "
                f"leaves nothing to compress. Send a longer one."
            )
        return PromptSpans(start, length - 1, length - 1, length)


Order = Compression | Listing | Deletion


def order_of(given: Any, follow: Mapping[str, Any] | None = None) -> Order | None:
    """The order that stands in a request's parameter; None if that is no mapping but a name.

    Args:
        given: the parameter.
        follow: fields of `Follow`, if the front was there.

    Raises `StoreError` for what is no order, and for a recipe that an engine cannot run.
    """
    if not isinstance(given, Mapping):
        return None
    if given == {"list": True}:
        return Listing()
    if list(given) == ["delete"]:
        return Deletion(check_name(given["delete"]))
    if list(given) == ["compress"] and isinstance(given["compress"], Mapping):
        try:
            return _compression(given["compress"], Follow(**follow or {}))
        except (BudgetError, ConfigError) as error:
            raise StoreError(str(error)) from error
    raise StoreError(
        f'A request names a context, or is one of {{"compress": {{"name": "book", "ratio": 4}}}}, '
        f'{{"list": true}} and {{"delete": "book"}}; got {str(given)[:200]}.'
    )


def _compression(given: Mapping[str, Any], follow: Follow) -> Compression:
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
    return Compression(
        check_name(given.get("name")), recipe, pipeline, budget, **options, follow=follow
    )
