"""These tests run kernels in Triton's interpreter, so they need a process of their own.

The interpreter is chosen when triton is first imported: TRITON_INTERPRET=1 pytest
tests/triton_kernels.
"""

import os

import pytest
import torch

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


@pytest.fixture(autouse=True)
def poisoned_workspace():
    """Fill `torch.empty` with NaN: reading a place that nobody wrote shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
