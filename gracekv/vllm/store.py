"""`ContextStore`: a folder of contexts, loaded once a process and shared by all requests."""

from __future__ import annotations

import os
import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from gracekv.cache.base import RaggedCache
from gracekv.cache.quantised import dequantised
from gracekv.cache.serialization import read_cache, read_digest
from gracekv.errors import SavedCacheError, StoreError
from gracekv.vllm.header import ContextHeader
from gracekv.vllm.model_facts import differences
from gracekv.vllm.stored_context import StoredContext, of_heads

ENTRIES = "entries.safetensors"
HEADER = "header.json"
AGAIN = "Export it again."
"""How every error about a damaged context ends."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def check_name(name: object) -> str:
    """`name`; raises `StoreError` unless it is a plain folder name."""
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise StoreError(
            f"A context's name has letters, digits, '.', '_' and '-', begins with a letter or "
            f"digit and has at most 128 of them; got {name!r}."
        )
    return name


class ContextStore:
    """The contexts in a folder, by name.

    Headers are read again when their file changes. Entries are loaded once and shared; the least
    recently used are dropped beyond the limit, but for those that are asked to stay. Safe to use
    from several threads.

    Args:
        root: the folder.
        model: facts of the served model, which contexts must agree with; None: any will do.
        limit: most bytes of entries in memory; None: no limit.
        heads: KV heads that this process serves, (first, last + 1); None: all.
        ragged: whether ragged contexts can be served, or those with equal shares only.
        device: where the entries of ragged contexts lie; equal shares stay on the CPU until they
            are written into pages.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        model: Mapping[str, Any] | None = None,
        limit: int | None = None,
        heads: tuple[int, int] | None = None,
        ragged: bool = True,
        device: torch.device | None = None,
    ) -> None:
        self.root = Path(root)
        self._model, self._limit, self._heads = model, limit, heads
        self.ragged, self._device = ragged, device or torch.device("cpu")
        self._headers: dict[str, tuple[object, ContextHeader]] = {}
        self._verified: dict[str, object] = {}
        self._loaded: OrderedDict[str, StoredContext] = OrderedDict()
        self._lock = threading.RLock()

    def names(self) -> list[str]:
        """Of all contexts in the folder."""
        found = self.root.glob(f"*/{HEADER}")
        return sorted(p.parent.name for p in found if _NAME.fullmatch(p.parent.name))

    def folder(self, name: object) -> Path:
        """Where the context lies; raises `StoreError` if its name leads outside the store."""
        path = self.root / check_name(name)
        if not path.resolve().is_relative_to(self.root.resolve()):
            raise StoreError(f"Context {name!r} lies outside the store. Use a copy, not a link.")
        return path

    def header(self, name: object) -> ContextHeader:
        """The context's header.

        Raises `StoreError` if the context is missing or damaged, was made with another model, or is
        ragged where that cannot be served.
        """
        folder = self.folder(name)
        known = folder.name
        state = _state(folder)
        with self._lock:
            cached = self._headers.get(known)
            if cached is not None and state is not None and cached[0] == state:
                return cached[1]
        header = ContextHeader.read(folder / HEADER, known)
        try:
            digest = read_digest(folder / ENTRIES)
        except SavedCacheError as error:
            raise StoreError(f"{ENTRIES} of context {known!r} is damaged. {AGAIN}") from error
        if digest != header.digest:
            raise StoreError(
                f"Context {known!r} is damaged: {ENTRIES} and {HEADER} do not belong together. "
                f"{AGAIN}"
            )
        other = differences(header.model, self._model or {})
        if other:
            raise StoreError(
                f"Context {known!r} was made with another model: {', '.join(other)} differ. Serve "
                f"the same weights in {header.dtype}, or compress with the model that is served."
            )
        if header.kind == "ragged" and not self.ragged:
            raise StoreError(
                f"Context {known!r} is ragged, and this engine takes equal shares only. Ragged "
                f"ones need the plugin 'gracekv' (VLLM_PLUGINS, if set, must name it) and, on "
                f"NVIDIA GPUs of compute capability 8.0 or newer, --attention-backend FLASH_ATTN "
                f"or TRITON_ATTN: serve it so, or compress with the recipe gracekv-agnostic-equal "
                f"and export with shares='equal'."
            )
        with self._lock:
            self._headers[known] = state, header
        return header

    def verify(self, name: object) -> ContextHeader:
        """The header, once all entries were read and compared with their checksums.

        Raises `StoreError` as `load` does. A file that has not changed is not read again.
        """
        header = self.header(name)
        state = _state(self.folder(name))
        if self._verified.get(str(name)) != (state, header.digest):
            self._read(str(name), header)
            self._verified[str(name)] = state, header.digest
        return header

    def load(
        self, name: object, digest: str | None = None, keep: Collection[str] = ()
    ) -> StoredContext:
        """The context, from memory if it is there.

        Args:
            name: of the context.
            digest: of the entries that are meant; another file of that name is refused.
            keep: digests of contexts that stay in memory whatever the limit.

        Raises `StoreError` if it is missing, damaged, of another model, or not the one meant.
        """
        with self._lock:
            if digest is not None and digest in self._loaded:
                self._loaded.move_to_end(digest)
                return self._loaded[digest]
            header = self.header(name)
            if digest is not None and header.digest != digest:
                raise StoreError(f"Context {name!r} was replaced while a request was using it.")
            context = self._loaded.get(header.digest)
            if context is None:
                context = self._read(str(name), header)
                self._drop(keep, context.bytes)
                if header.kind == "ragged":
                    context = context.to(self._device)
                self._loaded[header.digest] = context
            self._loaded.move_to_end(header.digest)
            return context

    @property
    def loaded_bytes(self) -> int:
        """Of the entries in memory."""
        return sum(context.bytes for context in self._loaded.values())

    def _drop(self, keep: Collection[str], room: int) -> None:
        """Drop contexts until `room` more bytes are below the limit."""
        if self._limit is None:
            return
        for digest in list(self._loaded):
            if self.loaded_bytes + room <= self._limit:
                return
            if digest not in keep:
                del self._loaded[digest]

    def _read(self, name: str, header: ContextHeader) -> StoredContext:
        path = self.folder(name) / ENTRIES
        try:
            layers = [torch.device("cpu")] * header.model["layers"]
            cache = read_cache(path, layers, header.digest)
        except SavedCacheError as error:
            raise StoreError(f"{ENTRIES} of context {name!r} is damaged. {AGAIN}") from error
        entries = dequantised(cache)
        facts = (cache.length, cache.sequences, int(cache.entries().sum()), cache.kv_bytes)
        if facts != (header.length, 1, header.entries, header.bytes) or (
            header.kind == "equal" and equal_share(entries) != header.share
        ):
            raise StoreError(f"Context {name!r} is damaged: its header is of other entries.")
        if self._heads is None:
            return StoredContext(header, entries.layers)
        return StoredContext(header, tuple(of_heads(x, *self._heads) for x in entries.layers))


def equal_share(cache: RaggedCache) -> int | None:
    """Entries of each head, if all hold as many and each stands for one token; else None."""
    lengths = cache.entries()
    original = all(not bool(layer.log_multiplicity.any()) for layer in cache.layers)
    return int(lengths[0, 0]) if original and bool((lengths == lengths[0, 0]).all()) else None


def _state(folder: Path) -> object:
    """Changes when one of the files is replaced or written to; None if one is missing."""
    try:
        stats = [(folder / name).stat() for name in (HEADER, ENTRIES)]
    except OSError:
        return None
    return [(x.st_ino, x.st_size, x.st_mtime_ns) for x in stats]
