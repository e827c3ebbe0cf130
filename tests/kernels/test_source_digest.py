"""The disk cache of a kernel depends on all sources that it is compiled from."""

import ast
import importlib
from pathlib import Path

import pytest

pytest.importorskip("numba")

import torch

from gracekv.backends import numba_kernel as attention_kernel
from gracekv.kernels.intrinsics import digest
from gracekv.tree.engines import numba_kernel
from gracekv.vllm import numba_kernel as paged_kernel

KERNELS = {
    attention_kernel: lambda: attention_kernel.attend(torch.float32),
    numba_kernel: numba_kernel.distortion_kernel,
    paged_kernel: lambda: paged_kernel.work_kernel(torch.float32),
}


def compiled(module):
    """The kernel modules that `module` imports compiled code from, and theirs."""
    words = ast.walk(ast.parse(Path(module.__file__).read_text(encoding="utf-8")))
    names = {node.module for node in words if isinstance(node, ast.ImportFrom)}
    folders = ("gracekv.kernels.", "gracekv.tree.engines.", "gracekv.backends.")
    # `kernels.compiled` holds no code that a kernel is compiled from.
    names = {n for n in names - {"gracekv.kernels.compiled"} if n.startswith(folders)}
    found = {importlib.import_module(name) for name in names}
    return found.union(*(compiled(other) for other in found))


@pytest.mark.parametrize("module", KERNELS, ids=lambda module: module.__name__)
def test_a_kernel_closes_over_all_that_it_is_compiled_from(module):
    # numba's cache depends on what the function closes over.
    closed = KERNELS[module]().__wrapped__.__closure__
    assert compiled(module)
    assert digest(*compiled(module)) in [cell.cell_contents for cell in closed]


def test_each_file_counts(monkeypatch):
    modules = sorted(compiled(numba_kernel), key=lambda module: module.__name__)
    read = Path.read_bytes
    before = digest(*modules)
    assert digest(*reversed(modules)) == before
    for module in modules:
        file = Path(module.__file__)
        monkeypatch.setattr(Path, "read_bytes", lambda x, y=file: read(x) + b"#" * (x == y))
        assert digest(*modules) != before
    # There is no such file in an archive.
    monkeypatch.setattr(modules[0], "__file__", "archive.zip/gracekv/kernels/intrinsics.py")
    assert digest(*modules) == ""
