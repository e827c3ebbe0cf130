"""A packed cache with fitted values."""

import dataclasses


def fitted_cache(fitter, prefill, region, cache, scores=None):
    """`cache` of one sequence, with the entries of `region` fitted as by a pipeline."""
    memory = {}
    prefill = prefill.with_queries(fitter.asks(prefill, region, memory))
    layers = []
    for capture, packed in zip(prefill, cache.layers, strict=True):
        known = fitter.reference(capture, region, memory)
        if scores is not None:
            known = dataclasses.replace(known, scores=scores[capture.number])
        layers.append(fitter.layer(packed, known, region))
    return dataclasses.replace(cache, layers=tuple(layers))
