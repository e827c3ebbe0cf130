"""`CaptureOptions`: how a prefill runs; and checks that it fits into memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

from gracekv.errors import CaptureMemoryError, required
from gracekv.prefill.needs import CaptureSizes
from gracekv.registry import Configurable, bounded


@dataclass(frozen=True, slots=True)
class CaptureOptions(Configurable):
    """How a prefill runs. Options change the results only by rounding.

    Attributes:
        chunk: tokens that run at once; by default 512, on a GPU 512 to 16,384 as free memory
            allows. If everything is read first, a prompt of at most 2,048 tokens runs in one pass.
        memory_limit: maximum bytes of held queries; by default 256 MiB, or a quarter of keys and
            values if that is more. 0 holds only probes and windows, and recomputes all others when
            they are read. With uncompressed layers in the model, queries cannot be recomputed, so
            all that are needed are held.
        progress: called after each chunk with the number of tokens done and the total.
        beyond_positions: accept prompts longer than the model was trained or extended for, with a
            `LengthWarning`; by default they are rejected.
        stream: read and compress layer by layer, so the full cache is never held; the same entries
            are kept. None: if recipe and model allow it. True: required. False: read everything
            first. `capture` itself returns the full cache, so it does not stream.
        trim: on a CPU, return freed memory to the system every few layers and at the end; takes
            milliseconds and works on Linux with glibc. Otherwise the process keeps its peak memory
            for later allocations. `capture` itself frees nothing.

    Raises:
        ConfigError: an option has a wrong type, `chunk` is below 1 or `memory_limit` below 0.
    """

    chunk: int | None = bounded(None, at_least=1, hint="In tokens; omit it for 512, more on GPUs.")
    memory_limit: int | None = bounded(
        None, at_least=0, hint="In bytes of queries; 0 recomputes all but those of windows."
    )
    progress: Callable[[int, int], None] | None = None
    beyond_positions: bool = False
    stream: bool | None = None
    trim: bool = True


DEFAULTS = CaptureOptions()
"""The defaults of `capture` and `compress`."""


# The chunk that error messages suggest.
_LEAST_CHUNK = 128


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` is a failed allocation, on any device."""
    signs = ("not enough memory", "can't allocate memory", "out of memory", "ALLOC_FAILED")
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return known or any(sign in str(error) for sign in signs)


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on `device`."""
    unused = 0
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        # Where an NVIDIA GPU shares the host's memory, CUDA counts the page cache as used.
        shared = torch.cuda.get_device_properties(device).is_integrated
        if not shared or torch.version.hip is not None:
            return int(torch.cuda.mem_get_info(device)[0]) + unused
    psutil = required("psutil", "hf")
    free = int(psutil.virtual_memory().available)
    if psutil.LINUX:
        process = psutil.Process()
        if (limit := process.rlimit(psutil.RLIMIT_AS)[0]) != psutil.RLIM_INFINITY:
            free = max(0, min(free, limit - process.memory_info().vms))
    return free + unused


def chunk_room(length: int, queries: int, sizes: CaptureSizes, free: int) -> int:
    """The number of tokens whose activations fit into `free` bytes; see `memory_error`.

    Uses at most half of the bytes left by held tensors, since allocators keep blocks and scores
    need memory, too.
    """
    return max(0, free - sizes.held(length, queries)) // (2 * max(1, sizes.activations))


def check_memory(length: int, chunk: int, queries: int, sizes: CaptureSizes, free: int) -> None:
    """Raise `CaptureMemoryError` if a capture exceeds `free` bytes; see `memory_error`."""
    if sizes.held(length, queries) + min(chunk, length) * sizes.activations > free:
        opening = f"Capturing {length} tokens needs more memory than is free"
        raise memory_error(opening, length, chunk, queries, sizes, free)


def memory_error(
    opening: str, length: int, chunk: int, queries: int, sizes: CaptureSizes, free: int
) -> CaptureMemoryError:
    """An error whose message says what did not fit and what would.

    Args:
        opening: what happened.
        length: T, tokens.
        chunk: tokens per pass.
        queries: number of positions whose queries are held.
        sizes: bytes per token.
        free: free bytes, after a failed capture was released.
    """
    mib, by_layer = 2**20, sizes.stream > 0
    kv = sizes.kv * sizes.at_once
    text = (
        f"{opening}: keys and values "
        f"{'of one layer and of all kept entries ' if by_layer else ''}take "
        f"{length * kv / mib:,.0f} MiB, held queries {queries * sizes.queries / mib:,.0f} MiB, and "
        f"{min(chunk, length)} tokens run at once. The model is unchanged."
    )
    options = []
    if min(chunk, length) > _LEAST_CHUNK:
        options.append(f"chunk={_LEAST_CHUNK}")
    if queries and not by_layer:
        options.append("memory_limit=0")
    if options:
        text += f" Try {' and '.join(options)}."
    # A fifth is left for one chunk's activations and the allocator.
    fits = int(0.8 * free / (kv + sizes.stream))
    enough = f"a prompt of about {fits:,} tokens" if fits < length else "this prompt"
    text += f" {free / mib:,.0f} MiB are free, which is enough for {enough}."
    return CaptureMemoryError(text)


def trim_memory() -> None:
    """Return freed heap memory to the system, on Linux with glibc; otherwise do nothing.

    glibc keeps freed memory for later allocations: after a compression, several times the size of
    the compressed cache. Takes milliseconds. GPU memory belongs to torch's allocator and is not
    touched.
    """
    # Another C library lacks it, and Windows does not open None.
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
