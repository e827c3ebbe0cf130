"""`CaptureOptions`: how a prefill runs, whatever is captured from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gracekv.errors import ConfigError

# Prompts of at most this many tokens run in one pass unless told otherwise, others in chunks.
_ONE_PASS, _CHUNK = 2048, 512
# On GPUs each pass pays for its launches: 32K tokens of a 7B model take 5.3 s by 512, 4.0 by 2,048
# and 3.6 by 8,192, for 0.2 and 0.9 GiB more (ours, one H100).
_GPU_CHUNK = 4096


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """How a prefill runs. None of it changes what is captured, beyond rounding.

    Attributes:
        chunk: tokens that run at once; None: all of a prompt of at most 2,048 tokens, else 512; on
            a GPU 4,096.
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
        trim: on a CPU, return freed memory to the system, after each layer and in the end, which
            takes milliseconds and works on Linux with glibc; else the process keeps its peak for
            later allocations. `capture` itself, whose result is held, frees nothing.

    Raises:
        ConfigError: `chunk` or `memory_limit` is no whole number of at least 1 and 0.
    """

    chunk: int | None = None
    memory_limit: int | None = None
    progress: Callable[[int, int], None] | None = None
    beyond_positions: bool = False
    stream: bool | None = None
    trim: bool = True

    def __post_init__(self) -> None:
        if not _is_whole(self.chunk, 1):
            raise ConfigError(
                f"chunk is the number of prompt tokens that run at once, a whole number of at "
                f"least 1; got {self.chunk!r}. Leave it out for {_CHUNK}, {_GPU_CHUNK} on GPUs."
            )
        if not _is_whole(self.memory_limit, 0):
            raise ConfigError(
                f"memory_limit is the most bytes of queries that are held, a whole number of at "
                f"least 0 (0 computes all but the windows' again); got {self.memory_limit!r}."
            )

    def chunk_of(self, length: int, *, splits: bool, on_gpu: bool) -> int:
        """Tokens of one pass over a prompt of `length`; `splits`: the model can run in parts."""
        if self.chunk is not None:
            return min(self.chunk, length)
        size = _GPU_CHUNK if on_gpu else _CHUNK
        return size if splits and length > max(size, _ONE_PASS) else length


def _is_whole(number: object, least: int) -> bool:
    """Whether `number` is None or a whole number of at least `least`."""
    if number is None:
        return True
    return isinstance(number, int) and not isinstance(number, bool) and number >= least


DEFAULTS = CaptureOptions()
"""What `capture` and `compress` do unless told otherwise."""
