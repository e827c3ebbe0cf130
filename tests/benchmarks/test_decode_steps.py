"""The steps that `benchmarks/decode.py` times pass the checks that decoding has."""

from pathlib import Path

import torch


def test_growing_and_fixed_tails_are_timed(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    from decode_shapes import GEOMETRIES, compressed, full_cache, model_of
    from decode_steps import timed_caches

    geometry, like = GEOMETRIES["tiny"], torch.empty(0)
    model = model_of(geometry, torch.float32, "cpu")
    for static in (False, True):
        caches = {
            "ours": compressed(geometry, 1, 64, 4, like),
            "full": full_cache(geometry, 1, 64, like),
        }
        seconds = timed_caches(model, caches, 1, "cpu", 1, static=static)
        assert set(seconds) == {"ours", "full"}
        assert min(seconds.values()) > 0
