"""What a capture holds in memory: which queries stay, and what to say when it does not fit."""

from __future__ import annotations

import ctypes
import functools
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gracekv.prefill.model_layers import compressed_layers, head_sizes, kept_layers
from gracekv.prefill.needs import Needs
from gracekv.prefill.prompt import PromptSpans

QUERY_BYTES = 256 * 2**20
"""Bytes of queries that a capture may always hold; a quarter of keys and values, if that is more.
Source: ours."""

# What running out of memory suggests.
_LEAST_CHUNK = 128


@dataclass(frozen=True, slots=True)
class CaptureSizes:
    """Bytes of one token in all layers, from a model's config.

    Attributes:
        kv: keys and values.
        queries: queries; layer by layer those of one layer.
        again: whether queries can be computed again later.
        at_once: share of keys and values that is held while the prompt is read: 1, or layer by
            layer that of one layer and of what stays.
        stream: the residual stream and the embeddings, where all of them are held.
    """

    kv: int
    queries: int
    again: bool = True
    at_once: float = 1.0
    stream: int = 0

    @classmethod
    def of(cls, model: Any, stays: float | None = None) -> CaptureSizes:
        """Sizes for `model`, in its dtype.

        Args:
            model: as for `capture`.
            stays: layer by layer, the share of keys and values that is kept; None: all layers are
                held.
        """
        heads, groups, dim = head_sizes(model)
        layers, size = len(compressed_layers(model)), model.dtype.itemsize
        unit = layers * dim * size
        # Layers that are not compressed would need their states of all tokens for it.
        whole = cls(kv=2 * groups * unit, queries=heads * unit, again=not kept_layers(model))
        if stays is None:
            return whole
        stream = 2 * model.get_input_embeddings().embedding_dim * size
        at_once, queries = min(1.0, stays + 1 / layers), whole.queries // layers
        return replace(whole, again=False, at_once=at_once, queries=queries, stream=stream)


def held_positions(
    needs: Needs, spans: PromptSpans, sizes: CaptureSizes, memory_limit: int | None
) -> Tensor:
    """Positions whose queries the capture holds: int64 [n] ascending.

    All positions if some are known only later, else those known before the pass, if their queries
    take at most `memory_limit` bytes; failing both, direct probes and observation windows. What is
    missing then is computed again when it is asked for. Where that cannot be, all that is needed.
    """
    if not sizes.again:
        return (
            torch.arange(spans.past, spans.length)
            if needs.later_queries
            else (needs.known_positions(spans))
        )
    limit = max(QUERY_BYTES, spans.length * sizes.kv // 4) if memory_limit is None else memory_limit
    if needs.later_queries and (spans.length - spans.past) * sizes.queries <= limit:
        return torch.arange(spans.past, spans.length)
    known = needs.known_positions(spans)
    return known if len(known) * sizes.queries <= limit else needs.window_positions(spans)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on whatever device."""
    text = str(error)
    return (
        isinstance(error, MemoryError | torch.OutOfMemoryError)
        or "not enough memory" in text
        or "can't allocate memory" in text
    )


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated on `device`; None where that cannot be known."""
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + reserved
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            sizes = dict(line.split(":", 1) for line in lines)
        available = int(sizes["MemAvailable"].split()[0]) * 1024
        import resource  # Where there is /proc, there is this.

        with open("/proc/self/statm", encoding="ascii") as pages:
            mapped = int(pages.read().split()[0]) * resource.getpagesize()
    except (OSError, KeyError, ValueError):
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return available if limit == resource.RLIM_INFINITY else max(0, min(available, limit - mapped))


def out_of_memory_message(
    length: int, chunk: int, held: int, sizes: CaptureSizes, free: int | None
) -> str:
    """What did not fit, and what would.

    Args:
        length: T, tokens.
        chunk: tokens of one pass.
        held: positions whose queries were held.
        sizes: of a token.
        free: bytes before the capture, or None if unknown.
    """
    mib, by_layer = 2**20, sizes.stream > 0
    kv = sizes.kv * sizes.at_once
    text = (
        f"Capturing {length} tokens ran out of memory: keys and values "
        f"{'of one layer and what stays of all ' if by_layer else ''}take "
        f"{length * kv / mib:,.0f} MiB, held queries {held * sizes.queries / mib:,.0f} MiB, "
        f"and {chunk} tokens ran at once. The model is as it was before."
    )
    options = []
    if chunk > _LEAST_CHUNK:
        options.append(f"chunk={_LEAST_CHUNK}")
    if held and not by_layer:
        options.append("memory_limit=0")
    if options:
        text += f" Try {' and '.join(options)}."
    if free is not None:
        # A fifth is left to what is not counted here: one chunk's activations, and the allocator.
        fits = int(0.8 * free / (kv + sizes.stream))
        text += (
            f" {free / mib:,.0f} MiB were free, enough for a prompt of about {fits:,} tokens so."
            if fits < length
            else f" {free / mib:,.0f} MiB were free, enough for this prompt so."
        )
    return text


def trim_memory() -> bool:
    """Return freed heap memory to the system; whether there was a way to do so.

    glibc keeps what was freed for later allocations: after a compression several times what the
    compressed cache takes. Costs milliseconds. Only Linux with glibc has it; memory of GPUs belongs
    to torch's own allocator and is not touched.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)
    return trim is not None


@functools.cache
def _malloc_trim() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
