"""Small prefills, and prefills with some of their content removed."""

import dataclasses

from gracekv.testing import synthetic_prefill


def small(**changes):
    sizes = {"layers": 2, "prefix": 2, "context": 20, "question": 3, "tail": 1}
    return synthetic_prefill(dim=8, **(sizes | changes))


def without_context_queries(prefill):
    """The prefill as captured for direct probes only."""
    probes = prefill.spans.direct_probes()
    queries, at = tuple(x[:, probes] for x in prefill.queries), prefill.query_positions[probes]
    return dataclasses.replace(prefill, queries=queries, query_positions=at)


def without_queries(prefill):
    """The prefill without queries."""
    none = tuple(x[:, :0].clone() for x in prefill.queries)
    return dataclasses.replace(prefill, queries=none, query_positions=prefill.query_positions[:0])
