"""A digest of source files, for compiled kernels that are kept on disk."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import ModuleType


def digest(*modules: ModuleType) -> str:
    """Of the files that are compiled into a kernel beside its own.

    numba looks for changes in the file of the compiled function alone; what that function closes
    over counts too, so a kernel closes over this. The order of the modules does not matter.
    """
    files = sorted(Path(module.__file__ or "") for module in modules)
    texts = [file.read_bytes() for file in files]
    return hashlib.sha256(b"".join(texts)).hexdigest()
