"""A packed cache with fitted values."""

import dataclasses


def fitted_cache(fitter, prefill, region, cache):
    """`cache` of one sequence, whose entries of `region` are fitted as a pipeline does it."""
    memory = {}
    prefill = prefill.with_queries(fitter.asks(prefill, region, memory))
    layers = (
        fitter.layer(packed, fitter.reference(capture, region, memory), region)
        for capture, packed in zip(prefill, cache.layers, strict=True)
    )
    return dataclasses.replace(cache, layers=tuple(layers))
