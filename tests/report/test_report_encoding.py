"""The packed bytes hold what the report's data say; read back by a slow and obvious decoder."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gracekv.report import encoding
from gracekv.report.data import ReportData
from gracekv.value.coded import CodedRelevance

RECIPES = ["gracekv", "snapkv", "chunkkv", "gracekv-no-multiresolution", "fullkv"]


def numbers(data):
    """Variable-length integers, one by one."""
    found, value, shift = [], 0, 0
    for byte in data:
        value += (byte & 127) << shift
        shift += 7
        if byte < 128:
            found.append(value)
            value, shift = 0, 0
    assert shift == 0
    return found


def part(header, block, name):
    offset, size = header["parts"][name]
    assert offset % 4 == 0
    return block[offset : offset + size]


def u32(data):
    return np.frombuffer(data, dtype="<u4").tolist()


def test_fitted_entries_bring_their_change_and_their_multiplicity(make):
    data = ReportData.of({"x": make("snapkv", 3, seed=4, fields={"fit": "values_and_mass"})})
    header, block = encoding.encode(data)
    entries = data.columns[0].entries
    changes = torch.tensor(list(part(header, block, "changes.0"))) / 100
    masses = torch.tensor(list(part(header, block, "masses.0"))).float()
    torch.testing.assert_close(changes, entries.value_change)
    # Half a sixteenth of an octave.
    assert ((masses - 128) / 16 - entries.multiplicity.log2()).abs().max() < 0.032
    assert entries.multiplicity.max() > 1.05
    whole = ReportData.of({"x": make("snapkv", 3, seed=4)})
    assert not {"changes.0", "masses.0"} & set(encoding.encode(whole)[0]["parts"])


@given(st.lists(st.integers(0, 2**35 - 1)))
def test_varints_come_back(values):
    assert numbers(encoding.varints(np.array(values, dtype=np.int64))) == values


@pytest.mark.parametrize("recipe", RECIPES)
@settings(max_examples=6)
@given(seed=st.integers(0, 99), ratio=st.sampled_from([1.2, 3, 8]))
def test_chains_tell_every_tokens_fate(make, recipe, seed, ratio):
    result = make(recipe, ratio, seed=seed, context=72)
    data = ReportData.of({"x": result})
    header, block = encoding.encode(data)
    entries = data.columns[0].entries
    lengths_of = entries.entry_lengths()
    stream, starts = (
        part(header, block, "runs.0"), u32(part(header, block, "runStarts.0"))
    )  # fmt: skip
    entry_starts = u32(part(header, block, "entryStarts.0"))
    merged_starts = u32(part(header, block, "mergedStarts.0"))
    weights = list(part(header, block, "weights.0"))
    origins = list(part(header, block, "origins.0")) if "origins.0" in header["parts"] else None
    for unit in range(entries.layers * entries.heads):
        entry, merged, lengths = entry_starts[unit], merged_starts[unit], []
        for piece in numbers(stream[starts[unit] : starts[unit + 1]]):
            tokens, kind = piece >> 2, piece & 3
            assert tokens > 0
            lengths += [tokens if kind == encoding.MERGED else kind] * tokens
            for _ in range({0: 0, 1: tokens, 2: 1}[kind]):
                if origins is not None:
                    depth, floor = int(entries.depth[entry]), bool(entries.floor[entry])
                    assert origins[entry] == (127 if depth < 0 else depth) + 128 * floor
                if kind == encoding.MERGED:
                    share = float(entries.multiplicity[entry]) / tokens
                    assert abs(weights[merged] / 255 - share) <= 0.5 / 255 + 1e-6
                    merged += 1
                entry += 1
        assert lengths == lengths_of[unit].tolist()
        assert (entry, merged) == (entry_starts[unit + 1], merged_starts[unit + 1])


@settings(max_examples=10)
@given(seed=st.integers(0, 99))
def test_relevance_is_off_by_half_a_step_at_most(make, seed):
    scores = make("gracekv", 3, seed=seed)._run.relevance.scores.double()
    scaled = scores / scores.mean(-1, keepdim=True)
    coded = CodedRelevance.of(scores)
    step, back = (coded.high - coded.low) / 254, coded.decoded()
    # A margin where rounding decides whether a score is still seen.
    least = scaled.max() * 1e-7
    assert ((coded.codes > 0) == (scaled >= least))[(scaled / least - 1).abs() > 1e-9].all()
    seen = coded.codes > 0
    assert ((back[seen] / scaled[seen]).log().abs() <= step / 2 + 1e-5).all()
    token = scores.shape[-1] // 2
    torch.testing.assert_close(
        coded.at(token), back[..., token] * scores.mean(-1).float(), rtol=1e-5, atol=0
    )
    # Seventeen powers of e at most, so a few percent.
    assert math.exp(step / 2) < 1.04


def test_relevance_of_nothing():
    nothing = CodedRelevance.of(torch.zeros(1, 1, 5))
    assert (nothing.codes.tolist(), nothing.low, nothing.high) == ([[[0] * 5]], 0.0, 0.0)
    assert CodedRelevance.of(torch.full((1, 1, 3), 2.0)).codes.tolist() == [[[1, 1, 1]]]


@pytest.mark.parametrize(("limit", "shape"), [(10**9, (2, 2)), (400, (2, 1)), (200, (1, 1))])
def test_relevance_is_averaged_until_it_fits(make, monkeypatch, limit, shape):
    monkeypatch.setattr(encoding, "_RELEVANCE_BYTES", limit)
    result = make("gracekv", 3, context=110)
    header, block = encoding.encode(ReportData.of({"x": result}))
    found = header["columns"][0]["relevance"]
    assert (found["layers"], found["heads"]) == shape
    assert len(part(header, block, "relevance.0")) == shape[0] * shape[1] * found["length"]


def test_text_and_slots_come_back(make, words):
    tokenizer = words({5: "<script>", 6: "emoji 🙂", 7: "\u2028", 8: ""})
    result = make("gracekv", 3, tokenizer=tokenizer)
    data = ReportData.of({"x": result})
    header, block = encoding.encode(data)
    text = part(header, block, "text").decode()
    lengths = numbers(part(header, block, "textLengths"))
    assert len(lengths) == data.spans.length
    units, at = text.encode("utf-16-le"), 0
    for token, length in zip(data.tokens, lengths, strict=True):
        assert units[2 * at : 2 * (at + length)].decode("utf-16-le") == token
        at += length
    assert u32(part(header, block, "slots.0")) == result._run.partition.bounds.tolist()


def test_accounting_is_copied(make):
    result = make("gracekv", 3, fields={"certify": True})
    header, _ = encoding.encode(ReportData.of({"x": result}, {"x": "an answer"}))
    kept, ours = header["columns"][0]["accounting"], result.accounting
    assert kept["entries"] == ours.entries.tolist()
    assert (kept["spent"], kept["bytes"]) == (ours.spent, ours.bytes)
    assert (kept["full_bytes"], kept["floor_spent"]) == (ours.full_bytes, ours.floor_spent)
    assert (kept["utility"], kept["bound"]) == (ours.utility, ours.bound)
    assert kept["certified_ratio"] == ours.certified_ratio
    assert header["columns"][0]["answer"] == "an answer"


def test_an_empty_region_packs():
    # One token of context, the last of the prompt: the cache covers none of it.
    none = torch.zeros(0, dtype=torch.int64)
    entries = encoding.KeptEntries(1, 2, (5, 5), torch.zeros(3).long(), none, none, none.float())
    stream, starts = encoding.run_lengths(entries)
    assert (stream, starts.tolist()) == (b"", [0, 0, 0])
    gone = dataclasses.replace(entries, region=(5, 8))
    stream, starts = encoding.run_lengths(gone)
    assert numbers(stream) == [12, 12]
    assert starts.tolist() == [0, 1, 2]
