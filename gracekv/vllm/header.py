"""`ContextHeader`: what `header.json` says of a context in a store."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gracekv.errors import StoreError
from gracekv.registry import check_values

FORMAT = 3
"""Raise it when contexts of an older version could be misread.

Formats before 3 have no checksum, and name weights by a sample that misses most of them.
"""

HEADER = "header.json"
PARAMETER = "gracekv"
"""The key of a context's name in a request's `kv_transfer_params`."""

QUESTION = "{question}"
"""Stands for the question in `ContextHeader.question_text`."""

SEPARATOR = "\n\n"
"""Between a context that vLLM makes and a question, as in `Prompt.from_chat`."""

# Of every context: as many entries in each head as the recipe chose, beside vLLM's pages. Earlier
# versions also wrote "equal", for entries that were loaded into pages.
_KIND = "ragged"
# Bytes of a header; what it holds of a prompt is what follows the context. Source: ours.
_LARGEST = 2**24
# More layers or heads than any model has.
_MOST = 2**16
# Names that some systems keep for devices are no names of folders everywhere.
_NAME = re.compile(
    r"(?!(con|prn|aux|nul|com\d|lpt\d)(\.|\Z))[a-z0-9]([a-z0-9._-]{0,126}[a-z0-9_-])?",
    re.IGNORECASE | re.ASCII,
)
# Names in the folder of a context: what is served, what earlier versions wrote, and what an export
# that was killed leaves, those of safetensors among it.
_FILES = re.compile(r"header\.json|entries(-[0-9a-f]{16})?\.safetensors")
_UNFINISHED = re.compile(
    r"\.(header\.json|new\.safetensors)-\w+|new\.safetensors|\.tmp[0-9A-Za-z]{6}", re.ASCII
)


def is_name(name: object) -> bool:
    """Whether it is a plain folder name on every system."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def check_name(name: Any) -> str:
    """`name`; raises `StoreError` unless it is a plain folder name on every system."""
    if is_name(name):
        return str(name)
    raise StoreError(
        f"A context's name has letters, digits, '.', '_' and '-', begins with a letter or digit, "
        f"does not end with '.', has at most 128 of them and is no device (such as 'nul'); got "
        f"{str(name)[:200]!r}."
    )


def is_served(name: str) -> bool:
    """Whether a file of this name may be part of a context."""
    return _FILES.fullmatch(name) is not None


def is_ours(name: str) -> bool:
    """Whether an export, finished or not, wrote a file of this name."""
    return is_served(name) or _UNFINISHED.fullmatch(name) is not None


def is_missing(error: BaseException) -> bool:
    """Whether `ContextHeader.read` raised it since there is no such context."""
    return isinstance(error.__cause__, FileNotFoundError)


@dataclass(frozen=True, slots=True)
class ContextHeader:
    """A context without its entries.

    Attributes:
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
            prompt had its question already, or no tokenizer.
        separator: between context and question.
        template: whether the chat format is used.
        positions: most positions of the model, or None if its config does not say.
        gracekv_version: which version wrote it.
    """

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
    def entries_file(self) -> str:
        """Its name says what it holds: a new header never stands beside old entries."""
        return f"entries-{self.digest[:16]}.safetensors"

    def to_json(self) -> str:
        """For `header.json`."""
        data = json.loads(json.dumps({"kind": _KIND, **dataclasses.asdict(self)}))
        return json.dumps({"format": FORMAT, "sha256": _checksum(data), **data}, indent=2) + "\n"

    @classmethod
    def read(cls, path: Path, name: str) -> ContextHeader:
        """Raises `StoreError` if it is missing, damaged, edited, or of an unknown format."""
        try:
            data = json.loads(_text(path))
        except FileNotFoundError as error:
            raise StoreError(
                f"There is no context {name!r} in the store. Have the server compress a document "
                f"under that name, or write it there with gracekv.vllm.export."
            ) from error
        except (OSError, ValueError, RecursionError) as error:
            raise StoreError(
                f"The header of context {name!r} cannot be read ({type(error).__name__}). Export "
                f"it again."
            ) from error
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            raise StoreError(
                f"Context {name!r} has another format than {FORMAT}, which this version reads. "
                f"Export it again."
            )
        if data.get("kind") == "equal":
            raise StoreError(
                f"Context {name!r} has equal shares, as earlier versions loaded them into vLLM's "
                f"pages, which are not served any more. Compress it again and export it."
            )
        try:
            return _checked(cls, data)
        # What was given is left out: it may be of any size.
        except (TypeError, ValueError, RecursionError) as error:
            raise StoreError(
                f"The header of context {name!r} is damaged or was edited. Export it again."
            ) from error


def _text(path: Path) -> str:
    with path.open("rb") as file:
        data = file.read(_LARGEST + 1)
    if len(data) > _LARGEST:
        raise ValueError(f"more than {_LARGEST} bytes")
    return data.decode()


def _checksum(data: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _checked(cls: type[ContextHeader], data: dict[str, Any]) -> ContextHeader:
    """The header of `data`; raises `ValueError` or `TypeError` if it is none that was written."""
    if data.pop("sha256", None) != _checksum(data):
        raise ValueError("the checksum differs")
    if data.pop("kind", None) != _KIND:
        raise ValueError("the kind is unknown")
    data["prompt_ids"] = tuple(data.get("prompt_ids", ()))
    check_values(cls, data)
    header = cls(**data)
    model = header.model
    fits = (
        isinstance(model, dict)
        and isinstance(header.tokenizer, dict)
        and re.fullmatch("[0-9a-f]{64}", header.digest) is not None
        and min(header.length, header.entries, header.bytes, *header.prompt_ids) >= 0
        and all(type(model.get(x)) is int for x in ("layers", "kv_heads"))
        and all(0 < model[x] < _MOST for x in ("layers", "kv_heads"))
        and isinstance(model.get("rope"), dict)
        and isinstance(model.get("weights"), dict | None)
    )
    if not fits:
        raise ValueError("a value is none that was written")
    return header
