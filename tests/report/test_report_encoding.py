"""The packed bytes match the report's data, when read back by a slow but obvious decoder."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gracekv.pipeline.run import CodedRelevance
from gracekv.report import encoding
from gracekv.report.data import ReportData
from gracekv.report.entries import KeptEntries
from support.report_pages import entry_lengths

RECIPES = ["gracekv", "snapkv", "chunkkv", "gracekv-no-multiresolution", "fullkv"]


def part(header, block, name):
    offset, size = header["parts"][name]
    assert offset % 4 == 0
    return block[offset : offset + size]


def u32(data):
    return np.frombuffer(data, dtype="<u4").tolist()


def encoded(data, entries):
    """The data with other entries in its only column."""
    column = dataclasses.replace(data.columns[0], entries=entries)
    return encoding.encode(dataclasses.replace(data, columns=(column,)))


def test_fitted_entries_bring_their_change_and_their_multiplicity(make):
    fields = {"fit": "values_and_mass", "precision": {"name": "uniform", "bits": 4}}
    data = ReportData.of({"x": make("snapkv", 6, seed=4, fields=fields)})
    header, block = encoding.encode(data)
    entries = data.columns[0].entries
    changes = torch.tensor(list(part(header, block, "changes.0"))) / 100
    masses = torch.tensor(list(part(header, block, "masses.0"))).float()
    torch.testing.assert_close(changes, entries.value_change)
    assert list(part(header, block, "bits.0")) == entries.bits.tolist()
    # Half a sixteenth of an octave.
    assert ((masses - 128) / 16 - entries.multiplicity.log2()).abs().max() < 0.032
    assert entries.multiplicity.max() > 1.05
    # A loaded result knows its multiplicities, and no changes.
    header, again = encoded(data, dataclasses.replace(entries, value_change=None))
    assert part(header, again, "masses.0") == bytes(masses.byte().tolist())
    assert "changes.0" not in header["parts"]
    whole = ReportData.of({"x": make("snapkv", 3, seed=4)})
    assert not {"changes.0", "masses.0"} & set(encoding.encode(whole)[0]["parts"])


@pytest.mark.parametrize("recipe", RECIPES)
@settings(max_examples=6)
@given(seed=st.integers(0, 99), ratio=st.sampled_from([1.2, 3, 8]))
def test_gaps_and_sizes_tell_every_tokens_fate(make, recipe, seed, ratio):
    data = ReportData.of({"x": make(recipe, ratio, seed=seed, context=72)})
    header, block = encoding.encode(data)
    entries = data.columns[0].entries
    width = entries.region[1] - entries.region[0]
    names = ("gaps.0", "sizes.0", "entryStarts.0")
    gaps, sizes, starts = (u32(part(header, block, name)) for name in names)
    weights = list(part(header, block, "weights.0")) if entries.value_change is None else None
    origins = list(part(header, block, "origins.0")) if "origins.0" in header["parts"] else None
    for unit, wanted in enumerate(entry_lengths(entries).tolist()):
        lengths = []
        for entry in range(starts[unit], starts[unit + 1]):
            lengths += [0] * gaps[entry] + [sizes[entry]] * sizes[entry]
            if origins is not None:
                depth, floor = int(entries.depth[entry]), bool(entries.floor[entry])
                assert origins[entry] == (127 if depth < 0 else depth) + 128 * floor
            if weights is not None:
                share = float(entries.multiplicity[entry]) / sizes[entry]
                assert abs(weights[entry] / 255 - share) <= 0.5 / 255 + 1e-6
        assert lengths + [0] * (width - len(lengths)) == wanted


@settings(max_examples=10)
@given(seed=st.integers(0, 99))
def test_relevance_is_off_by_half_a_step_at_most(make, seed):
    scores = make("gracekv", 3, seed=seed).run.relevance.scores.double()
    scaled = scores / scores.mean(-1, keepdim=True)
    coded = CodedRelevance.of(scores)
    step, back = (coded.high - coded.low) / 254, coded.decoded()
    # A margin, within which rounding decides whether a score is still visible.
    least = scaled.max() * 1e-7
    assert ((coded.codes > 0) == (scaled >= least))[(scaled / least - 1).abs() > 1e-9].all()
    seen = coded.codes > 0
    assert ((back[seen] / scaled[seen]).log().abs() <= step / 2 + 1e-5).all()
    token = scores.shape[-1] // 2
    want = back[..., token] * scores.mean(-1).float()
    torch.testing.assert_close(coded.at(token), want, rtol=1e-5, atol=0)
    # At most seventeen powers of e, so a few percent.
    assert math.exp(step / 2) < 1.04


def test_relevance_of_nothing():
    nothing = CodedRelevance.of(torch.zeros(1, 1, 5))
    assert (nothing.codes.tolist(), nothing.low, nothing.high) == ([[[0] * 5]], 0.0, 0.0)
    assert CodedRelevance.of(torch.full((1, 1, 3), 2.0)).codes.tolist() == [[[1, 1, 1]]]


@pytest.mark.parametrize(("limit", "shape"), [(10**9, (2, 2)), (400, (2, 1))])
def test_relevance_is_averaged_until_it_fits(make, monkeypatch, limit, shape):
    monkeypatch.setattr(encoding, "_RELEVANCE_BYTES", limit)
    header, block = encoding.encode(ReportData.of({"x": make("gracekv", 3, context=110)}))
    found = header["columns"][0]["relevance"]
    assert (found["layers"], found["heads"]) == shape
    assert len(part(header, block, "relevance.0")) == shape[0] * shape[1] * found["length"]


def test_text_and_slots_come_back(make, words):
    result = make("gracekv", 3, tokenizer=words({5: "<script>", 6: "emoji 🙂", 7: "\u2028", 8: ""}))
    data = ReportData.of({"x": result})
    header, block = encoding.encode(data)
    text = part(header, block, "text").decode()
    lengths = u32(part(header, block, "textLengths"))
    assert len(lengths) == data.spans.length
    units, at = text.encode("utf-16-le"), 0
    for token, length in zip(data.tokens, lengths, strict=True):
        assert units[2 * at : 2 * (at + length)].decode("utf-16-le") == token
        at += length
    assert u32(part(header, block, "slots.0")) == result.run.partition.bounds.tolist()


def test_heads_without_entries_pack(make):
    data = ReportData.of({"x": make("gracekv", 3)})
    (column,), none = data.columns, torch.zeros(0, dtype=torch.int64)
    heads = column.entries.offsets
    # The context is the prompt's last token, which the cache does not cover; and all dropped.
    for region in ((5, 5), (5, 8)):
        empty = KeptEntries(2, 2, region, torch.zeros_like(heads), none, none, none.float())
        header, block = encoded(data, empty)
        assert u32(part(header, block, "entryStarts.0")) == [0] * 5
        assert part(header, block, "gaps.0") == part(header, block, "sizes.0") == b""
    offsets, ends = torch.tensor([0, 0, 2, 2, 3]), torch.tensor([8, 11, 7])
    three = KeptEntries(2, 2, (5, 20), offsets, torch.tensor([7, 9, 6]), ends, torch.ones(3))
    header, block = encoded(data, three)
    assert u32(part(header, block, "gaps.0")) == [2, 1, 1]
    assert u32(part(header, block, "sizes.0")) == [1, 2, 1]
