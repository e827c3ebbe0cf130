"""Exact comparisons of results."""

import dataclasses

import torch


def assert_same_entries(got, want):
    """Two packed caches hold the same entries, bit for bit, in the same codings."""
    assert got.sequences == want.sequences
    for one, other in zip(got.layers, want.layers, strict=True):
        assert one.codings == other.codings
        torch.testing.assert_close(one.tensors(), other.tensors(), rtol=0, atol=0)


def assert_same_accounting(got, want):
    """All numbers are equal, except for the memory that a result keeps alive."""
    assert torch.equal(got.entries, want.entries)
    for name in {x.name for x in dataclasses.fields(got)} - {"entries", "held_bytes"}:
        assert getattr(got, name) == getattr(want, name), name
