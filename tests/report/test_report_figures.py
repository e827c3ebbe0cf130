"""Figures show the numbers of the results, and leave matplotlib as it was."""

import subprocess
import sys

import pytest
import torch

from gracekv.errors import ReportError
from gracekv.report import plot_entries


@pytest.fixture(scope="module")
def pair(make):
    return {"Grace": make("gracekv", 3, fields={"certify": True}), "Snap": make("snapkv", 3)}


def saved(figure, tmp_path):
    figure.savefig(tmp_path / "figure.png", dpi=40)
    return (tmp_path / "figure.png").read_bytes()[:4] == b"\x89PNG"


def test_entries(pair, tmp_path):
    figure = plot_entries(pair)
    maps = [axis for axis in figure.axes if axis.images]
    for axis, result in zip(maps, pair.values(), strict=True):
        shown = torch.from_numpy(axis.images[0].get_array().filled().copy())
        assert torch.equal(shown, result.accounting.entries)
    assert saved(figure, tmp_path)
    assert saved(plot_entries(pair["Snap"]), tmp_path)


def test_nothing_has_no_figure():
    with pytest.raises(ReportError, match="at least one result"):
        plot_entries({})


def test_nothing_global_is_touched():
    code = (
        "import sys, torch, gracekv.report as r; from types import SimpleNamespace as N\n"
        "assert 'matplotlib' not in sys.modules\n"
        "entries = torch.ones(2, 2).long()\n"
        "r.plot_entries({'a': N(accounting=N(entries=entries))})\n"
        "print('matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "False", done.stderr
