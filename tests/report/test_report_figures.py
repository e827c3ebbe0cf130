"""Figures show the numbers of the results, and leave matplotlib as it was."""

import subprocess
import sys

import pytest
import torch

from gracekv.errors import ReportError
from gracekv.report import plot_auction, plot_entries, plot_map, plot_resolution
from gracekv.report.data import report_column
from gracekv.report.entries import kept_entries


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


def test_resolution(pair, tmp_path):
    figure = plot_resolution(pair)
    (axis,) = figure.axes
    for bars, result in zip(axis.containers, pair.values(), strict=True):
        heights = [bar.get_height() for bar in bars]
        assert sum(heights) == pytest.approx(100)
        made = report_column("x", result)
        counts = made.resolution().double()
        shares = counts / counts.sum() * 100
        assert heights[:3] == pytest.approx(torch.cat([shares, torch.zeros(1)])[:3].tolist())
        assert heights[3] == pytest.approx(float(shares[3:5].sum()))
    assert [text.get_text() for text in axis.get_legend().get_texts()] == list(pair)
    assert saved(figure, tmp_path)


def test_resolution_counts_every_token_of_every_head(pair):
    for result in pair.values():
        counts = report_column("x", result).resolution()
        lengths_of = kept_entries(result).entry_lengths()
        assert torch.equal(counts, torch.bincount(lengths_of.flatten(), minlength=len(counts)))


def test_map(pair, tmp_path):
    result = pair["Grace"]
    figure = plot_map(result)
    (image,) = figure.axes[0].images
    lengths_of = kept_entries(result).entry_lengths()
    expected = torch.where(lengths_of > 0, 1.0 / lengths_of.clamp(min=1), 0.0)
    shown = torch.from_numpy(image.get_array().filled().copy())
    torch.testing.assert_close(shown.float(), expected)
    assert saved(figure, tmp_path)


def test_auction(pair, tmp_path):
    figure = plot_auction(pair)
    bought, bound = figure.axes[0].lines
    kept = pair["Grace"].accounting
    assert bought.get_ydata()[-1] == pytest.approx(kept.utility)
    assert bound.get_ydata()[-1] == pytest.approx(kept.bound)
    assert len(figure.axes[1].lines) == 1
    assert saved(figure, tmp_path)


def test_what_has_no_figure(make):
    with pytest.raises(ReportError, match="no auction to draw for 'custom'"):
        plot_auction(make("fullkv", 1))
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
