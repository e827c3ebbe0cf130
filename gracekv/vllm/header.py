"""`ContextHeader`: the contents of `header.json`, which describes a context in a store."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from gracekv.errors import StoreError
from gracekv.registry import check_values

FORMAT = 3
"""Increase it when this version could misread contexts of an older one.

Formats before 3 have no checksum, and identify weights by a sample that misses most of them.
"""

HEADER = "header.json"
PARAMETER = "gracekv"
"""The key of a context's name in a request's `kv_transfer_params`."""

EXACT = "gracekv_exact"
"""The key in `kv_transfer_params` that has the prompt's tokens read as they are."""

QUESTION = "{question}"
"""Stands for the question in `TurnFormat.question_text`."""

SEPARATOR = "\n\n"
"""Between a question and a context that vLLM makes, as in `Prompt.from_chat`."""

# Each head holds as many entries as the recipe chose, outside vLLM's pages; so far the only kind.
_KIND = "ragged"
# Maximum bytes of a header, of which only the prompt's part after the context can be long. Source:
# ours.
_LARGEST = 2**24
# No model has more layers or heads.
_MOST = 2**16
# Positions have 32 bits.
_LONGEST = 2**31
# Numbers in replies have 64 bits.
_NUMBERS = 2**63
# Some systems reserve names for devices, so these are not folder names everywhere.
_NAME = re.compile(
    r"(?!(con|prn|aux|nul|com\d|lpt\d)(\.|\Z))[a-z0-9]([a-z0-9._-]{0,126}[a-z0-9_-])?",
    re.IGNORECASE | re.ASCII,
)
# Files in a context's folder: those that are served, those that earlier versions wrote, and those
# that a killed export leaves behind, including the ones of safetensors.
_FILES = re.compile(r"header\.json|entries(-[0-9a-f]{16})?\.safetensors")
_UNFINISHED = re.compile(
    r"\.(header\.json|new\.safetensors)-\w+|new\.safetensors|\.tmp[0-9A-Za-z]{6}", re.ASCII
)


def is_name(name: object) -> bool:
    """Whether `name` is a plain folder name on every system."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def check_name(name: Any) -> str:
    """Return `name`; raise `StoreError` unless it is a plain folder name on every system."""
    if is_name(name):
        return str(name)
    raise StoreError(
        f"A context's name has at most 128 letters, digits, '.', '_' and '-', begins with a letter "
        f"or digit, does not end with '.', and is not a device (such as 'nul'); got "
        f"{str(name)[:200]!r}."
    )


def is_served(name: str) -> bool:
    """Whether a file of this name may be part of a context."""
    return _FILES.fullmatch(name) is not None


def is_ours(name: str) -> bool:
    """Whether an export, finished or not, wrote a file of this name."""
    return is_served(name) or _UNFINISHED.fullmatch(name) is not None


def is_missing(error: BaseException) -> bool:
    """Whether `error` says that there is no such context."""
    return isinstance(error.__cause__, FileNotFoundError)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFormat:
    """How requests continue a context.

    Attributes:
        tokenizer: hashes of vocabulary and chat template; empty if the context was made without a
            tokenizer, or is not in its chat format.
        question_text: the text after the context, with "{question}" in it; None if the prompt
            already had its question, or without a tokenizer.
        separator: between context and question.
        template: whether the chat format is used.
        has_question: whether the prompt already had its question.
        prompt_ids: tokens of the prompt that follow the entries and have none yet.
    """

    tokenizer: dict[str, Any] = field(default_factory=dict)
    question_text: str | None = None
    separator: str = SEPARATOR
    template: bool = False
    has_question: bool = False
    prompt_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextHeader(TurnFormat):
    """A context without its entries.

    Attributes:
        length: positions that the entries stand for; the first token after them has this position.
        entries: total over layers and heads.
        bytes: total of keys and values.
        digest: digest of the entries' file.
        dtype: dtype of keys and values.
        model: `model_facts` of the model that made the entries.
        recipe: the pipeline's name, or "custom".
        positions: the model's longest sequence, or None if its config does not say.
        gracekv_version: the version that wrote the header.
    """

    length: int
    entries: int
    bytes: int
    digest: str
    dtype: str
    model: dict[str, Any]
    recipe: str
    positions: int | None
    gracekv_version: str

    @property
    def entries_file(self) -> str:
        """The name of the entries' file; its digest ties it to this header."""
        return f"entries-{self.digest[:16]}.safetensors"

    @property
    def continuation(self) -> TurnFormat:
        """The part of the header that says how requests continue the context."""
        return TurnFormat(**{x.name: getattr(self, x.name) for x in fields(TurnFormat)})

    def to_json(self) -> str:
        """The text of `header.json`."""
        data = json.loads(json.dumps({"kind": _KIND, **asdict(self)}))
        return json.dumps({"format": FORMAT, "sha256": _checksum(data), **data}, indent=2) + "\n"

    @classmethod
    def read(cls, path: Path, name: str) -> ContextHeader:
        """Read `header.json`.

        Raises `StoreError` if it is missing, damaged, edited, or has an unknown format.
        """
        try:
            with path.open("rb") as file:
                text = file.read(_LARGEST + 1)
            if len(text) > _LARGEST:
                raise ValueError(f"more than {_LARGEST} bytes")
            data = json.loads(text.decode())
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
        try:
            if data.pop("sha256", None) != _checksum(data) or data.pop("kind", None) != _KIND:
                raise ValueError("the checksum or the kind differs")
            # Replies repeat some of these texts, and must be encoded.
            json.dumps(data, ensure_ascii=False).encode()
            data["prompt_ids"] = tuple(data.get("prompt_ids", ()))
            check_values(cls, data)
            header, model = cls(**data), data["model"]
            if not isinstance(model, dict):
                raise TypeError("the model's facts are no mapping")
            sizes = model.get("layers"), model.get("kv_heads")
            numbers = header.length, header.entries, header.bytes, *header.prompt_ids
            if not (
                isinstance(header.tokenizer, dict)
                and re.fullmatch("[0-9a-f]{64}", header.digest) is not None
                and all(0 <= x < _NUMBERS for x in numbers)
                and len(header.recipe) < _MOST
                and header.length < _LONGEST
                and all(type(x) is int and 0 < x < _MOST for x in sizes)
                and isinstance(model.get("rope"), dict)
                and isinstance(model.get("weights"), dict | None)
            ):
                raise ValueError("an export writes no such value")
            return header
        # Do not repeat what was given: it may have any size.
        except (TypeError, ValueError, RecursionError) as error:
            raise StoreError(
                f"The header of context {name!r} is damaged or was edited. Export it again."
            ) from error


def _checksum(data: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
