"""`ContextStore`: a folder of contexts; each process loads a context once for all requests."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gracekv.cache.base import RaggedEntries
from gracekv.cache.serialization import read_cache
from gracekv.errors import StoreError
from gracekv.prefill.fingerprint import differences
from gracekv.vllm.header import HEADER, PARAMETER, ContextHeader, check_name, is_name, is_served
from gracekv.vllm.stored_context import LoadedContexts, StoredContext

# The default limit is a quarter of the machine's memory, or a twenty-fifth of a GPU's: half of what
# vLLM leaves; the other half is for documents that are being read. Source: ours.
_SHARE, _SHARE_OF_GPU = 4, 25
# Maximum bytes of an entries file's header. Positions and scores take less than keys and values.
_HEADER = 2**24


@dataclass(slots=True)
class _Known:
    """A context's header or refusal, valid as long as its files do not change.

    Attributes:
        state: state of the files.
        header: the header in the files.
        refusal: why the context cannot be used.
    """

    state: object
    header: ContextHeader | None = None
    refusal: str | None = None


class ContextStore:
    """The contexts in a folder, by name, and unsaved ones that were made in this process.

    Files are read again when they change, even those of refused contexts. Each context's entries
    are read once into private memory and shared. Beyond the limit, the least recently used contexts
    are dropped, except for those that requests read; a replaced context is dropped as soon as no
    request reads it. Thread-safe.

    Args:
        root: the folder.
        model: facts of the served model, which contexts must match; by default any model will do.
        limit: maximum bytes of entries in memory, and of one context; by default a quarter of the
            machine's memory, or a twenty-fifth of the GPU's.
        heads: KV heads that this process serves, (first, last + 1); by default all.
        device: device of the entries; by default the CPU.
        allow: whether a request may use a context, from its name and the request's
            `kv_transfer_params`; by default every request may.

    Attributes:
        model: as given.
        loaded: the contexts in memory.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        model: Mapping[str, Any] | None = None,
        limit: int | None = None,
        heads: tuple[int, int] | None = None,
        device: torch.device | None = None,
        allow: Callable[[str, Mapping[str, Any]], object] | None = None,
    ) -> None:
        self.root = Path(root)
        self.model, self._heads, self._allow = model, heads, allow
        device = device or torch.device("cpu")
        self.loaded = LoadedContexts(_default_limit(device) if limit is None else limit, device)
        self._known: dict[str, _Known] = {}
        self._lock = threading.RLock()

    def names(self) -> list[str]:
        """Names of all contexts, saved or not."""
        saved = filter(is_name, (path.parent.name for path in self.root.glob(f"*/{HEADER}")))
        return sorted({*saved, *self.loaded.made})

    def folder(self, name: object) -> Path:
        """The context's folder; raises `StoreError` if its name leads outside the store."""
        path = self.root / check_name(name)
        if not path.resolve().is_relative_to(self.root.resolve()):
            raise StoreError(f"Context {name!r} lies outside the store. Use a copy, not a link.")
        return path

    def admit(self, parameters: Mapping[str, Any]) -> ContextHeader:
        """The header of the context that a request's `kv_transfer_params` name.

        Raises `StoreError` as `header` does, or if the request may not use the context; and any
        error of `allow`.
        """
        return self.header(self.check_allowed(check_name(parameters.get(PARAMETER)), parameters))

    def check_allowed(self, name: str, parameters: Mapping[str, Any]) -> str:
        """Return `name`; raise `StoreError` if such `kv_transfer_params` may not use it."""
        if self._allow is not None and not self._allow(name, parameters):
            raise StoreError(f"This request may not use the context {name!r}.")
        return name

    def put(
        self,
        header: ContextHeader,
        name: str,
        context: StoredContext | None = None,
        saved: bool = False,
    ) -> None:
        """Serve a context that was made in this process, replacing the one of this name.

        Args:
            header: header of the context.
            name: name of the context.
            context: the context, or None if this process reads headers only. If it is dropped and
                was not saved, it is lost: see `dropped`.
            saved: whether its files are in the folder.

        Raises `StoreError` if it is larger than the limit.
        """
        with self._lock:
            if context is not None:
                self.loaded.hold(name, context)
            if saved:
                self.loaded.made.pop(name, None)
            else:
                self.loaded.made[name] = header

    def forget(self, name: str, digest: str | None = None) -> bool:
        """Forget an unsaved context; return whether there was one, with `digest` if it is given.

        The name then means the context in the folder, which is read when a request needs it.
        """
        with self._lock:
            made = self.loaded.made.get(name)
            if digest is not None and (made is None or made.digest != digest):
                return False
            self._known.pop(name, None)
            return self.loaded.forget(name)

    def dropped(self) -> set[tuple[str, str]]:
        """Names and digests of unsaved contexts that were dropped since the last call."""
        with self._lock:
            found, self.loaded.dropped = self.loaded.dropped, set()
            return found

    def retain(self, used: Set[str]) -> None:
        """Keep the contexts with these digests, even replaced ones, until the next call."""
        with self._lock:
            self.loaded.retain(used)

    def header(self, name: object) -> ContextHeader:
        """The context's header.

        Raises `StoreError` if the context is missing or damaged, or was made with another model.
        """
        return self._look(name, entries=False)

    def load(self, name: object, digest: str | None = None) -> StoredContext:
        """The context, from memory or from its file.

        Args:
            name: name of the context.
            digest: the digest that the request was admitted with; any other is refused.

        Raises `StoreError` as `header` does, or if the context was replaced.
        """
        with self._lock:
            if digest is None or digest not in self.loaded.digests:
                header = self._look(name, entries=True)
                if digest not in (None, header.digest):
                    raise StoreError(f"Context {name!r} was replaced while a request was using it.")
                digest = header.digest
            return self.loaded.get(digest)

    def _look(self, name: object, entries: bool) -> ContextHeader:
        """The header, with `entries` loaded if True; refusals stand until the files change."""
        with self._lock:
            folder = self.folder(name)
            if folder.name in self.loaded.made:
                return self.loaded.made[folder.name]
            state = _files_state(folder)
            cached = self._known.pop(folder.name, None)
            if cached is None or cached.state != state:
                cached = _Known(state)
            # Do not remember names without files: clients may send any number of them.
            if state:
                self._known[folder.name] = cached
            if cached.refusal is not None:
                raise StoreError(cached.refusal)
            try:
                header = cached.header = cached.header or self._checked_header(folder)
                if entries and header.digest not in self.loaded.digests:
                    self.loaded.hold(folder.name, self._read(folder.name, header))
                if entries:
                    self.loaded.rename(folder.name, header.digest)
            except StoreError as error:
                if _files_state(folder) != state:
                    # It was replaced while it was read.
                    return self._look(name, entries)
                # A file that is missing or cannot be opened may come back.
                if not _is_of_system(error):
                    cached.refusal = str(error)
                raise
            return header

    def _checked_header(self, folder: Path) -> ContextHeader:
        header = ContextHeader.read(folder / HEADER, folder.name)
        if other := differences(header.model, self.model or {}):
            raise StoreError(
                f"Context {folder.name!r} was made with another model: {', '.join(other)} differ. "
                f"Serve the same weights in {header.dtype}, or compress with the served model."
            )
        # Digests of all weights take much room, and they were compared.
        header.model.pop("weights", None)
        return header

    def _read(self, name: str, header: ContextHeader) -> StoredContext:
        path, model = self.folder(name) / header.entries_file, header.model
        if self._heads is None:  # for some heads only, the bytes are not in the header
            self.loaded.check(name, header.bytes)
        try:
            # Before anything is read: the file is as large as the header says.
            if not header.bytes <= path.stat().st_size <= 2 * header.bytes + _HEADER:
                raise ValueError("the header's bytes are not those of the file")
            cache = read_cache(path, [torch.device("cpu")] * model["layers"], header.digest)
            layers = tuple(x for x in cache.layers if isinstance(x, RaggedEntries))
            if len(layers) < len(cache.layers):
                raise ValueError("exported entries are not quantised")
        except MemoryError:
            raise
        # Whatever error a crafted file leads to, refuse the file.
        except Exception as error:
            raise StoreError(f"The entries of {name!r} are damaged. Export it again.") from error
        facts = (cache.length, cache.sequences, int(cache.entries().sum()), cache.kv_bytes)
        shapes = {(x.heads, x.dim, str(x.dtype).removeprefix("torch.")) for x in layers}
        own = model["kv_heads"], model.get("head_dim"), header.dtype
        if facts != (header.length, 1, header.entries, header.bytes) or shapes != {own}:
            raise StoreError(f"Context {name!r} is damaged: its header does not match its entries.")
        if self._heads is not None:
            # A copy, so that the other heads are freed.
            layers = tuple(layer.rows(*self._heads).mapped(torch.clone) for layer in layers)
        return StoredContext.of(header, layers, int(cache.entries().max()))


def _default_limit(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory // _SHARE_OF_GPU
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _SHARE


def _files_state(folder: Path) -> object:
    """A value that changes when a file of the context changes; () if there are no files.

    Raises `StoreError` if one is not a regular file: links may lead out of the store, pipes block.
    """
    try:
        with os.scandir(folder) as files:
            served = [(x.name, x.stat(follow_symlinks=False)) for x in files if is_served(x.name)]
    except OSError:
        return ()
    if not all(stat.S_ISREG(x.st_mode) for _, x in served):
        raise StoreError(f"Context {folder.name!r} holds links or devices. Use copies of files.")
    return sorted((n, x.st_ino, x.st_size, x.st_mtime_ns, x.st_ctime_ns) for n, x in served)


def _is_of_system(error: BaseException | None) -> bool:
    """Whether a missing file, or one that cannot be opened, caused an error."""
    return isinstance(error, OSError) or (error is not None and _is_of_system(error.__cause__))
