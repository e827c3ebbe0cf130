"""`CaptureOptions`: how a prefill runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gracekv.registry import Configurable, bounded

# Tokens of a chunk, and of a prompt that runs in one pass all the same: its keys and values are
# then those of the stock model to the bit. Layer by layer 2,000 tokens by 512 take a tenth of the
# prefill less than in one pass, since less memory goes back to the system and is got again.
_CHUNK, _ONE_PASS = 512, 2048
# On GPUs each pass pays for its launches: 32K tokens of a 7B model take 5.3 s by 512, 4.0 by 2,048
# and 3.6 by 8,192, for 0.2 and 0.9 GiB more (ours, one H100). Passes beyond 16,384 tokens would
# only raise the peak: their products fill any GPU.
_GPU_LEAST, _GPU_MOST = 512, 2**14


@dataclass(frozen=True, slots=True)
class CaptureOptions(Configurable):
    """How a prefill runs. The options change what is captured only by rounding.

    Attributes:
        chunk: tokens that run at once; None: 512, on a GPU as many as its free memory holds, 512 to
            16,384. Where everything is read first, a prompt of at most 2,048 tokens runs in one
            pass.
        memory_limit: most bytes of held queries; None: 256 MiB, or a quarter of keys and values if
            that is more. 0 holds only probes and windows, and recomputes all others when they are
            read. A model with layers that are not compressed cannot recompute queries, so it holds
            all that are needed.
        progress: called after each chunk with the number of tokens done and in total.
        beyond_positions: accept prompts longer than the model was trained or extended for, with a
            `LengthWarning`; they are refused otherwise.
        stream: read and compress layer by layer, so that the full cache is never held; the same
            entries are kept. None: if recipe and model allow it. True: required. False: read
            everything first. `capture` itself returns the full cache, so it does not stream.
        trim: on a CPU, return freed memory to the system every few layers and at the end, which
            takes milliseconds and works on Linux with glibc; otherwise the process keeps its peak
            for later allocations. `capture` itself frees nothing.

    Raises:
        ConfigError: an option has a wrong type, `chunk` is below 1 or `memory_limit` below 0.
    """

    chunk: int | None = bounded(
        None, at_least=1, hint=f"In tokens; leave it out for {_CHUNK}, more on GPUs."
    )
    memory_limit: int | None = bounded(
        None, at_least=0, hint="In bytes of queries; 0 recomputes all but those of windows."
    )
    progress: Callable[[int, int], None] | None = None
    beyond_positions: bool = False
    stream: bool | None = None
    trim: bool = True

    def chunk_of(
        self, length: int, *, splits: bool, by_layers: bool, room: int | None = None
    ) -> int:
        """The number of tokens of a prompt that run at once.

        Args:
            length: tokens of the prompt.
            splits: whether the model can run in parts.
            by_layers: whether all chunks go through one layer before the next.
            room: tokens whose activations a GPU has memory for, or None on a CPU.
        """
        size = self.chunk or (_CHUNK if room is None else max(_GPU_LEAST, min(room, _GPU_MOST)))
        whole = size if self.chunk or by_layers else max(size, _ONE_PASS)
        return size if length > whole and (self.chunk or splits) else length


DEFAULTS = CaptureOptions()
"""The defaults of `capture` and `compress`."""
