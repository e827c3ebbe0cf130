"""`ContextStore`: a folder of contexts, loaded once a process and shared by all requests."""

from __future__ import annotations

import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gracekv.cache.quantised import dequantised
from gracekv.cache.serialization import read_cache
from gracekv.errors import StoreError
from gracekv.vllm.equal_shares import equal_share
from gracekv.vllm.header import HEADER, PARAMETER, ContextHeader, check_name, is_name, is_served
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
        whole: whether the entries were read, and are those of the header.
        refusal: why the context cannot be used.
    """

    state: object
    header: ContextHeader | None = None
    whole: bool = False
    refusal: str | None = None


class ContextStore:
    """The contexts in a folder, by name.

    Files are read again when they change, refused ones too. Entries are read into memory of their
    own, once, and shared; the least recently used are dropped beyond the limit, but for those that
    are asked to stay, and those that a later export replaced as soon as no request reads them. Safe
    to use from several threads.

    Args:
        root: the folder.
        model: facts of the served model, which contexts must agree with; None: any will do.
        limit: most bytes of entries in memory, and of one context; None: a quarter of the machine's
            memory, or a tenth of the GPU's.
        heads: KV heads that this process serves, (first, last + 1); None: all.
        ragged: whether ragged contexts can be served, or those with equal shares only.
        device: where the entries of ragged contexts lie; equal shares stay on the CPU until they
            are written into pages.
        allow: which context a request may use, from its name and the request's
            `kv_transfer_params`; None: every one.
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
        allow: Callable[[str, Mapping[str, Any]], object] | None = None,
    ) -> None:
        self.root = Path(root)
        self._model, self._heads, self._allow = model, heads, allow
        self.ragged, self._device = ragged, device or torch.device("cpu")
        self.limit = _default_limit(self._device) if limit is None else limit
        self._known: dict[str, _Known] = {}
        # By digest, with the name under which it was read; the digest last read of a name.
        self._loaded: OrderedDict[str, tuple[str, StoredContext]] = OrderedDict()
        self._newest: dict[str, str] = {}
        self._used: Collection[str] = ()
        self._lock = threading.RLock()

    def names(self) -> list[str]:
        """Of all contexts in the folder."""
        found = self.root.glob(f"*/{HEADER}")
        return sorted(p.parent.name for p in found if is_name(p.parent.name))

    def folder(self, name: object) -> Path:
        """Where the context lies; raises `StoreError` if its name leads outside the store."""
        path = self.root / check_name(name)
        if not path.resolve().is_relative_to(self.root.resolve()):
            raise StoreError(f"Context {name!r} lies outside the store. Use a copy, not a link.")
        return path

    def admit(self, parameters: Mapping[str, Any]) -> ContextHeader:
        """The header of the context that a request's `kv_transfer_params` name, as of `verify`.

        Raises `StoreError` as `verify` does, and if the request may not use the context; and
        whatever `allow` raises.
        """
        name = check_name(parameters.get(PARAMETER))
        if self._allow is not None and not self._allow(name, parameters):
            raise StoreError(f"This request may not use the context {name!r}.")
        return self.verify(name)

    def header(self, name: object) -> ContextHeader:
        """The context's header.

        Raises `StoreError` if the context is missing or damaged, was made with another model, or is
        ragged where that cannot be served.
        """
        return self._look(name, entries=False)

    def verify(self, name: object) -> ContextHeader:
        """The header, once all entries were read and compared with their checksums.

        Raises `StoreError` as `load` does. Files that have not changed are not read again.
        """
        return self._look(name, entries=True)

    def _look(self, name: object, entries: bool) -> ContextHeader:
        with self._lock:
            folder = self.folder(name)
            state = _state(folder)
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
                if entries and not known.whole:
                    self._read(folder.name, known.header)
                    known.whole = True
            except StoreError as error:
                if _state(folder) != state:
                    # Replaced while it was read.
                    return self._look(name, entries)
                # That files are missing or cannot be opened may pass.
                if not _is_of_system(error):
                    known.refusal = str(error)
                raise
            return known.header

    def _checked_header(self, folder: Path) -> ContextHeader:
        known = folder.name
        header = ContextHeader.read(folder / HEADER, known)
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
            meant = digest
            if digest is None or digest not in self._loaded:
                header = self.header(name)
                digest = header.digest
                if meant not in (None, digest):
                    raise StoreError(f"Context {name!r} was replaced while a request was using it.")
                if digest not in self._loaded:
                    try:
                        context = self._read(str(name), header)
                    except StoreError:
                        if self.header(name).digest == digest:
                            raise
                        # Replaced between its header and its entries.
                        return self.load(name, meant, keep)
                    self._make_room(context.bytes, keep)
                    if header.kind == "ragged":
                        context = context.to(self._device)
                    self._loaded[digest] = str(name), context
                self._newest[str(name)] = digest
                self._drop_replaced(keep)
            self._loaded.move_to_end(digest)
            return self._loaded[digest][1]

    def retain(self, used: Collection[str]) -> None:
        """Keep replaced contexts as long as their digests are in `used`, and no longer."""
        with self._lock:
            self._used = used
            self._drop_replaced()

    @property
    def loaded_bytes(self) -> int:
        """Of the entries in memory."""
        return sum(context.bytes for _, context in self._loaded.values())

    def _is_replaced(self, digest: str) -> bool:
        return self._newest[self._loaded[digest][0]] != digest

    def _drop_replaced(self, keep: Collection[str] = ()) -> None:
        for digest in list(self._loaded):
            if self._is_replaced(digest) and digest not in self._used and digest not in keep:
                del self._loaded[digest]

    def _make_room(self, room: int, keep: Collection[str]) -> None:
        """Drop contexts until `room` more bytes are below the limit."""
        for digest in list(self._loaded):
            if self.loaded_bytes + room <= self.limit:
                return
            # A replaced one could not be read again.
            if digest not in keep and not (self._is_replaced(digest) and digest in self._used):
                del self._loaded[digest]

    def _read(self, name: str, header: ContextHeader) -> StoredContext:
        path = self.folder(name) / header.entries_file
        devices = [torch.device("cpu")] * header.model["layers"]
        try:
            cache = read_cache(path, devices, header.digest)
            entries = dequantised(cache)
        # Whatever a crafted file leads to, it is the file that is refused.
        except Exception as error:
            if isinstance(error, MemoryError):
                raise
            raise StoreError(f"The entries of context {name!r} are damaged. {AGAIN}") from error
        facts = (cache.length, cache.sequences, int(cache.entries().sum()), cache.kv_bytes)
        if facts != (header.length, 1, header.entries, header.bytes) or (
            header.kind == "equal" and equal_share(entries) != header.share
        ):
            raise StoreError(f"Context {name!r} is damaged: its header is of other entries.")
        layers = entries.layers
        if self._heads is not None:
            layers = tuple(of_heads(layer, *self._heads) for layer in layers)
        context = StoredContext(header, layers)
        if context.bytes > self.limit:
            raise StoreError(
                f"Context {name!r} takes {context.bytes:,} bytes of memory, and contexts have "
                f"{self.limit:,}. Compress it more, or start with a larger limit_bytes."
            )
        return context


def _default_limit(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory // _SHARE_OF_GPU
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _SHARE


def _state(folder: Path) -> object:
    """Changes when a file of the context is replaced or written to; false if there is none.

    Raises `StoreError` if one is no regular file: a link leads out of the store, a pipe waits.
    """
    try:
        with os.scandir(folder) as files:
            found = [(x.name, x.stat(follow_symlinks=False)) for x in files if is_served(x.name)]
    except OSError:
        return ()
    if not all(stat.S_ISREG(x.st_mode) for _, x in found):
        raise StoreError(f"Context {folder.name!r} holds links or devices. Use copies of files.")
    return sorted((n, x.st_ino, x.st_size, x.st_mtime_ns, x.st_ctime_ns) for n, x in found)


def _is_of_system(error: BaseException | None) -> bool:
    """Whether a file that is missing or cannot be opened is behind an error."""
    while error is not None:
        if isinstance(error, OSError):
            return True
        error = error.__cause__
    return False
