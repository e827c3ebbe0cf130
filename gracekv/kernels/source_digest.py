"""A digest of source files, for compiled kernels that are kept on disk."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import ModuleType


def digest(*modules: ModuleType) -> str:
    """A digest of the modules that are compiled into a kernel beside its own file, in any order.

    numba's cache only detects changes in the file of the compiled function and in the values that
    it closes over, so a kernel closes over this digest.
    """
    files = sorted(Path(module.__file__ or "") for module in modules)
    texts = [file.read_bytes() for file in files]
    return hashlib.sha256(b"".join(texts)).hexdigest()
