"""Memory that was freed goes back to the system."""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any


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
