"""`export`: write a compressed prompt as a folder that vLLM can serve.

Context folders are written (atomically), replaced and deleted here.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from gracekv import recipes
from gracekv.cache import CompressedCache, RaggedCache, dequantised
from gracekv.cache.serialization import read_digest, write_cache
from gracekv.distributed.sharding import check_whole
from gracekv.errors import StoreError
from gracekv.files import VERSION, check_output, lock, path_of, replacing
from gracekv.hf.base_result import BaseResult
from gracekv.prefill.fingerprint import check_same_model, tokenizer_marks
from gracekv.prefill.length_limits import trained_length
from gracekv.prefill.model_layers import rotations_up_to
from gracekv.prefill.prompt import Prompt
from gracekv.vllm.header import HEADER, ContextHeader, TurnFormat, check_name, is_ours, is_served
from gracekv.vllm.requests import question_text
from gracekv.vllm.served_model import check_served, model_facts


def export(result: BaseResult, path: str | os.PathLike[str]) -> Path | list[Path]:
    """Write the compressed prompt as a folder that vLLM serves by its name; see docs/vllm.md.

        gracekv.vllm.export(result, "store/book")

    Writing is atomic: a killed process leaves either the new context or the old state. An existing
    folder is replaced if it holds nothing but a context's files. A batch writes book-1, book-2, ...

    Args:
        result: the result of `compress` or `load`.
        path: the store's folder, and the context's name in it.

    Returns:
        The folder, or a list of folders for a batch.

    Raises:
        StoreError: the name is not a plain folder name, or its folder holds other files.
        UnsupportedModelError: the model is sharded over processes, or vLLM would not attend to the
            entries as this model does (RoPE that depends on the length, sliding windows, ...).
        CacheError: the model's weights or adapters have changed since the compression.
    """
    check_whole(result.model, "export")
    check_served(result.model)
    check_same_model(result.fingerprint, result.model, "The result", "Compress it with this model.")
    path = path_of(path)
    names = [f"{path.name}-{number}" for number, _ in enumerate(result.prompts, 1)]
    folders = [path.parent / check_name(x) for x in (names if result.is_batch else [path.name])]
    for folder in folders:
        check_replaceable(folder)
    model, recipe = result.model, recipes.label(result.pipeline)
    for run, prompt, folder in zip(result.runs, result.prompts, folders, strict=True):
        # vLLM computes in the model's dtype.
        cache = dequantised(run.cache).with_scores(run.entry_scores())
        header = functools.partial(describe, model, _follow(prompt, cache), cache, recipe)
        write_context(rotated_back(model, cache), header, folder)
    return folders if result.is_batch else folders[0]


def _follow(prompt: Prompt, cache: RaggedCache) -> TurnFormat:
    """How requests continue `prompt`, from which `cache` was made."""
    spans, tokenizer = prompt.spans, prompt.tokenizer
    end = spans.length if prompt.has_question else spans.context_end
    open_ended = tokenizer is not None and not prompt.has_question
    follows = (tokenizer, prompt.separator, prompt.template)
    return TurnFormat(
        tokenizer={} if tokenizer is None else tokenizer_marks(tokenizer),
        question_text=question_text(*follows) if open_ended else None,
        separator=prompt.separator,
        template=prompt.template,
        has_question=prompt.has_question,
        prompt_ids=tuple(prompt.ids[cache.length : end].tolist()),
    )


def describe(
    model: Any, follow: TurnFormat, cache: RaggedCache, recipe: str, digest: str
) -> ContextHeader:
    """The header of a context.

    Args:
        model: the model that made it.
        follow: how requests continue it.
        cache: its entries.
        recipe: the pipeline's name.
        digest: digest of the entries' file, or a random number instead.
    """
    return ContextHeader(
        length=cache.length, entries=int(cache.entries().sum()), bytes=cache.kv_bytes,
        digest=digest, dtype=str(model.dtype).removeprefix("torch."), model=model_facts(model),
        recipe=recipe, positions=trained_length(model), gracekv_version=VERSION, **asdict(follow),
    )  # fmt: skip


def rotated_back(model: Any, cache: RaggedCache, by: int | None = None) -> RaggedCache:
    r"""Rotate the keys to `by` positions earlier.

    R(p) k becomes R(p - b) k = R(-b) R(p) k, in float32; attention depends only on differences of
    positions. By default b is T, so that the token after the entries has position 0. `positions`
    stay those of the prompt.

    Source: Eq. (T1).
    """
    by = cache.length if by is None else by
    layers = []
    ropes = rotations_up_to(model, by, step=max(1, by))
    for layer, rope in zip(cache.layers, ropes, strict=True):
        turn = rope.moved(torch.tensor([-1]), 0)
        keys = turn.rotate(layer.keys.float(), torch.zeros(1, dtype=torch.int64))
        layers.append(replace(layer, keys=keys.to(layer.keys.dtype)))
    return RaggedCache(tuple(layers), cache.length)


def check_replaceable(folder: Path) -> None:
    """Raise `StoreError` unless `folder` is missing or a readable folder of export files only.

    Raises `OutputError` if it does not exist and cannot be made.
    """
    if not os.path.lexists(folder):
        check_output(folder / HEADER)
        # Made for that check; it would stay if the export fails.
        with contextlib.suppress(OSError):
            folder.rmdir()
        return
    if folder.is_symlink() or not folder.is_dir() or not os.access(folder, os.R_OK | os.X_OK):
        raise StoreError(
            f"{folder} is not a folder that can be read, and is not replaced. Choose another name."
        )
    for path in folder.iterdir():
        if not is_ours(path.name) or path.is_symlink() or path.is_dir():
            raise StoreError(
                f"{folder} holds {path.name!r}, which no export wrote, and is not replaced. Choose "
                f"another name, or move it away."
            )


def write_context(
    rotated: CompressedCache, header_of: Callable[[str], ContextHeader], folder: Path
) -> ContextHeader:
    """Write a context atomically, replacing an existing one.

    Args:
        rotated: entries, with keys rotated as they are served.
        header_of: makes the header from the digest of the entries' file.
        folder: the context's folder.

    Returns:
        The header.

    Raises `StoreError` if `folder` holds other files, `OutputError` if writing fails.
    """
    check_replaceable(folder)
    with _alone_in(folder):
        try:
            # The new context takes effect when its header replaces the old one: each header names
            # its entries, and the old entries stay until then.
            with replacing(folder / HEADER) as header_file:
                entries, old = folder / "new.safetensors", folder / HEADER
                # Keep the old context's permissions.
                entries.touch(mode=old.stat().st_mode & 0o666 if old.exists() else 0o666)
                write_cache(entries, rotated, {"engine": "vllm"}, {})
                header = header_of(read_digest(entries))
                header_file.write_text(header.to_json(), encoding="utf-8")
                os.replace(entries, folder / header.entries_file)
        except BaseException:
            _delete(folder, lambda name: not is_served(name))
            raise
        _delete(folder, lambda name: name not in (HEADER, header.entries_file))
    return header


def delete_context(folder: Path) -> bool:
    """Delete a context's files, the header first; return whether there was a context.

    Also deletes what a killed export left. Raises `StoreError` if `folder` holds other files, or if
    an export is writing there; `PermissionError` if it may not be read.
    """
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return False
    # A folder that no export wrote is not a context.
    if HEADER not in names and not (names and all(map(is_ours, names))):
        return False
    check_replaceable(folder)
    with _alone_in(folder, wait=False):
        there = (folder / HEADER).is_file()
        (folder / HEADER).unlink(missing_ok=True)
        _delete(folder, is_ours)
    return there


@contextlib.contextmanager
def _alone_in(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """Make the folder and lock it against other exports; remove it at the end if it is empty.

    There is no lock on Windows.

    Raises `StoreError` if another export holds it and this one does not `wait`.
    """
    with contextlib.ExitStack() as opened:
        while True:
            folder.mkdir(parents=True, exist_ok=True)
            if os.name == "nt":  # folders can be neither opened nor locked
                break
            # Another export may remove the folder meanwhile.
            with contextlib.suppress(FileNotFoundError):
                handle = os.open(folder, os.O_RDONLY)
                opened.callback(os.close, handle)
                if not lock(handle, wait=wait):
                    raise StoreError(f"{folder.name!r} is being written: delete it later.")
                # A lock on a removed folder keeps nobody out of the new one.
                if os.path.samestat(os.fstat(handle), os.stat(folder)):
                    break
            opened.close()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                folder.rmdir()


def _delete(folder: Path, unneeded: Callable[[str], bool]) -> None:
    """Delete our files with unneeded names, including those of killed exports."""
    for path in folder.iterdir():
        if is_ours(path.name) and unneeded(path.name):
            path.unlink()
