"""Kernels on disk are looked up by all the sources that they are compiled from."""

import ast
import importlib
from pathlib import Path

import pytest

pytest.importorskip("numba")

import torch

from gracekv.backends import numba_kernel
from gracekv.kernels import ends_cpu
from gracekv.kernels.source_digest import digest
from gracekv.prefill import logsumexp_numba

KERNELS = {
    numba_kernel: lambda: numba_kernel.attend(torch.float32),
    ends_cpu: ends_cpu.ends,
    logsumexp_numba: logsumexp_numba.accumulate,
}


def compiled(module):
    """The kernel modules that `module` takes compiled code from, and theirs."""
    words = ast.walk(ast.parse(Path(module.__file__).read_text(encoding="utf-8")))
    names = {node.module for node in words if isinstance(node, ast.ImportFrom)}
    names = {n for n in names if n.startswith("gracekv.kernels.")} - {
        "gracekv.kernels.source_digest"
    }
    found = {importlib.import_module(name) for name in names}
    return found.union(*(compiled(other) for other in found))


@pytest.mark.parametrize("module", KERNELS, ids=lambda module: module.__name__)
def test_a_kernel_closes_over_all_that_it_is_compiled_from(module):
    # What the function closes over is part of what numba looks it up by.
    closed = KERNELS[module]().__wrapped__.__closure__
    assert compiled(module)
    assert digest(*compiled(module)) in [cell.cell_contents for cell in closed]


def test_each_file_counts(monkeypatch):
    modules, read = sorted(compiled(ends_cpu), key=lambda module: module.__name__), Path.read_bytes
    before = digest(*modules)
    assert digest(*reversed(modules)) == before
    for module in modules:
        file = Path(module.__file__)
        monkeypatch.setattr(
            Path, "read_bytes", lambda path, file=file: read(path) + b"#" * (path == file)
        )
        assert digest(*modules) != before
