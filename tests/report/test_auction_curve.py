"""The curve ends where the auction ended, and stays below its bound."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gracekv.allocate import curve


def curve_of(result):
    record = result.run.recorded()
    return None if record is None else record.curve


@settings(max_examples=10)
@given(seed=st.integers(0, 99), ratio=st.sampled_from([2, 4, 8]), bits=st.booleans())
def test_ends_at_the_accounting(make, seed, ratio, bits):
    # Allocating bits buys more than the auction offered, so the auction's bound does not apply.
    fields = {"precision": "allocated", "certify": True} if bits else None
    result = make("gracekv", ratio, seed=seed, fields=fields)
    curve, kept = curve_of(result), result.accounting
    assert (int(curve.entries[0]), float(curve.utility[0])) == (0, 0.0)
    assert int(curve.entries[-1]) == kept.spent - kept.entries.numel() * kept.recent
    assert float(curve.utility[-1]) == pytest.approx(kept.utility, rel=1e-12)
    assert (curve.entries.diff() > 0).all()
    assert (curve.utility.diff() >= -1e-15).all()
    assert curve.floor_entries == (0 if bits else kept.floor_spent)
    assert bits or kept.floor_spent in curve.entries.tolist()
    assert curve.bound is kept.certified_ratio is None


@settings(max_examples=5)
@given(seed=st.integers(0, 99), recipe=st.sampled_from(["gracekv", "gracekv-no-global"]))
def test_stays_below_its_bound(make, seed, recipe):
    result = make(recipe, 3, seed=seed, fields={"certify": True})
    curve = curve_of(result)
    assert curve.bound == result.accounting.bound
    assert float(curve.utility[-1]) <= curve.bound * (1 + 1e-9)


def test_is_subsampled_to_what_a_screen_shows(make, monkeypatch):
    result = make("snapkv", 2)
    whole = curve_of(result)
    monkeypatch.setattr(curve, "_POINTS", 12)
    thin = curve_of(result)
    assert len(thin.entries) <= 15 < len(whole.entries)
    assert thin.entries[-1] == whole.entries[-1]
    assert torch.isin(thin.entries, whole.entries).all()


def test_fullkv_held_no_auction(make):
    assert curve_of(make("fullkv", 1)) is None
