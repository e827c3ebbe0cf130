"""`ContextStore`: a folder of contexts, loaded once a process and shared by all requests."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gracekv.cache.quantised import dequantised
from gracekv.cache.serialization import read_cache
from gracekv.errors import StoreError
from gracekv.vllm.context_folder import files_state, is_of_system
from gracekv.vllm.header import HEADER, PARAMETER, ContextHeader, check_name, is_name
from gracekv.vllm.loaded_contexts import LoadedContexts
from gracekv.vllm.model_facts import differences
from gracekv.vllm.stored_context import StoredContext, of_heads

AGAIN = "Export it again."
"""How every error about a damaged context ends."""

# The default limit as a share of the machine's memory, or of a GPU's, which vLLM fills with pages.
# Source: ours.
_SHARE, _SHARE_OF_GPU = 4, 10


@dataclass(slots=True)
class _Known:
    """What was found out about a context, as long as its files stay as they are.

    Attributes:
        state: of the files.
        header: what they say.
        refusal: why the context cannot be used.
    """

    state: object
    header: ContextHeader | None = None
    refusal: str | None = None


class ContextStore:
    """The contexts in a folder, by name, and those that were made here and are in no file.

    Files are read again when they change, refused ones too. Entries are read into memory of their
    own, once, and shared; the least recently used are dropped beyond the limit, but for those that
    requests read, and those that a later export replaced as soon as none does. Safe to use from
    several threads.

    Args:
        root: the folder.
        model: facts of the served model, which contexts must agree with; None: any will do.
        limit: most bytes of entries in memory, and of one context; None: a quarter of the machine's
            memory, or a tenth of the GPU's.
        heads: KV heads that this process serves, (first, last + 1); None: all.
        device: where the entries lie; None: on the CPU.
        allow: which context a request may use, from its name and the request's
            `kv_transfer_params`; None: every one.

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
        """Of all contexts in the folder, and of those that are in memory alone."""
        found = {path.parent.name for path in self.root.glob(f"*/{HEADER}")}
        return sorted({name for name in found if is_name(name)} | self.loaded.made.keys())

    def folder(self, name: object) -> Path:
        """Where the context lies; raises `StoreError` if its name leads outside the store."""
        path = self.root / check_name(name)
        if not path.resolve().is_relative_to(self.root.resolve()):
            raise StoreError(f"Context {name!r} lies outside the store. Use a copy, not a link.")
        return path

    def admit(self, parameters: Mapping[str, Any]) -> ContextHeader:
        """The header of the context that a request's `kv_transfer_params` name.

        Raises `StoreError` as `header` does, and if the request may not use the context; and
        whatever `allow` raises.
        """
        name = check_name(parameters.get(PARAMETER))
        self.check_allowed(name, parameters)
        return self.header(name)

    def check_allowed(self, name: str, parameters: Mapping[str, Any]) -> None:
        """Raise `StoreError` if a request with these `kv_transfer_params` may not use `name`."""
        if self._allow is not None and not self._allow(name, parameters):
            raise StoreError(f"This request may not use the context {name!r}.")

    def put(
        self,
        header: ContextHeader,
        name: str,
        context: StoredContext | None = None,
        saved: bool = False,
    ) -> None:
        """Serve a context that was made here, in the place of what the name meant before.

        Args:
            header: of the context.
            name: of the context.
            context: it; None where only headers are read. It goes as others that were read do, and
                if it is not saved, it is gone then: see `dropped`.
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
        """Whether the name meant a context in no file, with this digest if one is given.

        It means what is in the folder now, which is read again when it is asked for.
        """
        with self._lock:
            made = self.loaded.made.get(name)
            if digest is not None and (made is None or made.digest != digest):
                return False
            return self.loaded.forget(name)

    def dropped(self) -> set[tuple[str, str]]:
        """Names and digests of contexts in no file that went since the last call."""
        with self._lock:
            found, self.loaded.dropped = self.loaded.dropped, set()
            return found

    def header(self, name: object) -> ContextHeader:
        """The context's header.

        Raises `StoreError` if the context is missing or damaged, or was made with another model.
        """
        return self._look(name, lambda header: None)

    def _look(self, name: object, use: Callable[[ContextHeader], None]) -> ContextHeader:
        """The header, after `use` of it; a refusal stands until the context's files change."""
        with self._lock:
            folder = self.folder(name)
            if folder.name in self.loaded.made:
                use(self.loaded.made[folder.name])
                return self.loaded.made[folder.name]
            state = files_state(folder)
            known = self._known.get(folder.name)
            if known is None or known.state != state:
                known = _Known(state)
                # Names that anybody may ask for take no memory.
                if state:
                    self._known[folder.name] = known
            if known.refusal is not None:
                raise StoreError(known.refusal)
            try:
                if known.header is None:
                    known.header = self._checked_header(folder)
                use(known.header)
            except StoreError as error:
                if files_state(folder) != state:
                    # Replaced while it was read.
                    return self._look(name, use)
                # That files are missing or cannot be opened may pass.
                if not is_of_system(error):
                    known.refusal = str(error)
                raise
            return known.header

    def _checked_header(self, folder: Path) -> ContextHeader:
        known = folder.name
        header = ContextHeader.read(folder / HEADER, known)
        other = differences(header.model, self.model or {})
        if other:
            raise StoreError(
                f"Context {known!r} was made with another model: {', '.join(other)} differ. Serve "
                f"the same weights in {header.dtype}, or compress with the model that is served."
            )
        return header

    def load(self, name: object, digest: str | None = None) -> StoredContext:
        """The context, from memory if it is there.

        Args:
            name: of the context.
            digest: of the entries that are meant; another file of that name is refused.

        Raises `StoreError` if it is missing, damaged, of another model, or not the one meant.
        """
        with self._lock:
            if digest is None or digest not in self.loaded.digests:
                header = self._look(name, lambda header: self._hold(str(name), header))
                if digest not in (None, header.digest):
                    raise StoreError(f"Context {name!r} was replaced while a request was using it.")
                digest = header.digest
            return self.loaded.get(digest)

    def _hold(self, name: str, header: ContextHeader) -> None:
        if header.digest not in self.loaded.digests:
            self.loaded.hold(name, self._read(name, header))
        self.loaded.rename(name, header.digest)

    def retain(self, used: Set[str]) -> None:
        """Keep contexts as long as their digests are in `used`; replaced ones no longer."""
        with self._lock:
            self.loaded.retain(used)

    def _read(self, name: str, header: ContextHeader) -> StoredContext:
        path = self.folder(name) / header.entries_file
        devices = [torch.device("cpu")] * header.model["layers"]
        try:
            cache = read_cache(path, devices, header.digest)
            layers = dequantised(cache).layers
        # Whatever a crafted file leads to, it is the file that is refused.
        except Exception as error:
            if isinstance(error, MemoryError):
                raise
            raise StoreError(f"The entries of context {name!r} are damaged. {AGAIN}") from error
        facts = (cache.length, cache.sequences, int(cache.entries().sum()), cache.kv_bytes)
        if facts != (header.length, 1, header.entries, header.bytes):
            raise StoreError(f"Context {name!r} is damaged: its header is of other entries.")
        if self._heads is not None:
            layers = tuple(of_heads(layer, *self._heads) for layer in layers)
        return StoredContext(header, layers)


def _default_limit(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory // _SHARE_OF_GPU
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _SHARE
