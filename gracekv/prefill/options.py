"""`CaptureOptions`: how a prefill runs, whatever is captured from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gracekv.registry import Configurable, bounded

# Tokens of a chunk, and of a prompt that runs in one pass all the same: its keys and values are
# then those of the stock model to the bit. Layer by layer 2,000 tokens by 512 take a tenth of the
# prefill less than in one pass, since less memory goes back to the system and is got again.
_CHUNK, _ONE_PASS = 512, 2048
# On GPUs each pass pays for its launches: 32K tokens of a 7B model take 5.3 s by 512, 4.0 by 2,048
# and 3.6 by 8,192, for 0.2 and 0.9 GiB more (ours, one H100).
_GPU_CHUNK = 4096


@dataclass(frozen=True, slots=True)
class CaptureOptions(Configurable):
    """How a prefill runs. None of it changes what is captured, beyond rounding.

    Attributes:
        chunk: tokens that run at once; None: 512, on a GPU 4,096. Where everything is read first, a
            prompt of at most 2,048 tokens runs in one pass.
        memory_limit: most bytes of queries that are held; None: 256 MiB, or a quarter of keys and
            values if that is more. 0 holds only probes and windows and computes all others again
            when they are read. A model whose layers are not all compressed cannot compute queries
            again, and all that are needed are held.
        progress: called with the tokens done and the tokens in all after each chunk.
        beyond_positions: also read prompts longer than what the model was trained or stretched for,
            with a `LengthWarning`; they are refused otherwise.
        stream: read and compress layer by layer, so that the full cache is never held; what is kept
            is the same. None: wherever recipe and model allow it. True: refuse others. False: read
            all first. `capture` itself, whose result is all of the cache, does not stream.
        trim: on a CPU, return freed memory to the system, every few layers and in the end, which
            takes milliseconds and works on Linux with glibc; else the process keeps its peak for
            later allocations. `capture` itself, whose result is held, frees nothing.

    Raises:
        ConfigError: `chunk` or `memory_limit` is no whole number of at least 1 and 0, or an option
            is of another type.
    """

    chunk: int | None = bounded(
        None, at_least=1, hint=f"In tokens; leave it out for {_CHUNK}, {_GPU_CHUNK} on GPUs."
    )
    memory_limit: int | None = bounded(
        None, at_least=0, hint="In bytes of queries; 0 computes all but the windows' again."
    )
    progress: Callable[[int, int], None] | None = None
    beyond_positions: bool = False
    stream: bool | None = None
    trim: bool = True

    def chunk_of(self, length: int, *, splits: bool, on_gpu: bool, by_layers: bool) -> int:
        """Tokens that run at once, of a prompt of `length`.

        Args:
            length: tokens.
            splits: whether the model can run in parts.
            on_gpu: where it runs.
            by_layers: whether all of them go through one layer before the next.
        """
        size = self.chunk or (_GPU_CHUNK if on_gpu else _CHUNK)
        whole = size if self.chunk or by_layers else max(size, _ONE_PASS)
        return size if length > whole and (self.chunk or splits) else length


DEFAULTS = CaptureOptions()
"""What `capture` and `compress` do unless told otherwise."""
