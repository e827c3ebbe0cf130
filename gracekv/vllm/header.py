"""`ContextHeader`: what `header.json` says of a context in a store."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gracekv.errors import StoreError

FORMAT = 2
"""Raise it when contexts of an older version could be misread."""

KINDS = ("ragged", "equal")
"""Entries beside vLLM's pages as the recipe chose them, or as many in every head inside pages."""

QUESTION = "{question}"
"""Stands for the question in `ContextHeader.question_text`."""


@dataclass(frozen=True, slots=True)
class ContextHeader:
    """A context without its entries.

    Attributes:
        kind: "ragged" if entries lie beside vLLM's pages; "equal" if every head of every layer
            holds the same number of original entries and they are loaded into pages.
        length: positions that the entries stand for; the first token after them has this position.
        entries: of all layers and heads together.
        bytes: of keys and values.
        digest: of the entries' file.
        dtype: of keys and values.
        model: `model_facts` of the model that made them.
        tokenizer: hashes of vocabulary and chat template; empty if there was no tokenizer.
        recipe: the pipeline's name, or "custom".
        has_question: whether the prompt had its question already.
        prompt_ids: tokens of the prompt that follow the entries and have none yet.
        question_text: what follows the entries as text, with "{question}" in it; None if the
            prompt had its question already, or no tokenizer, or the kind is "equal".
        separator: between context and question.
        template: whether the chat format is used.
        positions: most positions of the model, or None if its config does not say.
        gracekv_version: which version wrote it.
    """

    kind: str
    length: int
    entries: int
    bytes: int
    digest: str
    dtype: str
    model: dict[str, Any]
    tokenizer: dict[str, Any]
    recipe: str
    has_question: bool
    prompt_ids: tuple[int, ...]
    question_text: str | None
    separator: str
    template: bool
    positions: int | None
    gracekv_version: str

    @property
    def share(self) -> int:
        """Entries of each head that are loaded into pages; 0 if they lie beside the pages."""
        heads = int(self.model["layers"] * self.model["kv_heads"]) if self.kind == "equal" else 0
        return self.entries // heads if heads else 0

    def to_json(self) -> str:
        """For `header.json`."""
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=2) + "\n"

    @classmethod
    def read(cls, path: Path, name: str) -> ContextHeader:
        """Raises `StoreError` if it is missing, damaged, or of an unknown format."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise StoreError(
                f"There is no context {name!r} in the store. Write it there with "
                f"gracekv.vllm.export(result, 'STORE/{name}')."
            ) from error
        except (OSError, ValueError) as error:
            raise StoreError(
                f"The header of context {name!r} cannot be read ({type(error).__name__}). Export "
                f"it again."
            ) from error
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            raise StoreError(
                f"Context {name!r} has another format than {FORMAT}, which this version reads. "
                f"Export it again."
            )
        try:
            header = cls(**data)
            header = dataclasses.replace(header, prompt_ids=tuple(map(int, header.prompt_ids)))
        except (TypeError, ValueError) as error:
            raise StoreError(
                f"The header of context {name!r} is damaged: {error}. Export it again."
            ) from error
        whole = (header.length, header.entries, header.bytes)
        if (
            any(type(number) is not int or number < 0 for number in whole)
            or not all(
                isinstance(part, kind)
                for part, kind in (
                    (header.model, dict), (header.tokenizer, dict), (header.digest, str)
                )
            )
            or header.kind not in KINDS
            or any(type(header.model.get(size)) is not int for size in ("layers", "kv_heads"))
        ):  # fmt: skip
            raise StoreError(f"The header of context {name!r} is damaged. Export it again.")
        return header
