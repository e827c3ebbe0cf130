"""Prefills of narrower captures."""

import dataclasses

import pytest


@pytest.fixture
def without_context_queries():
    """A function: the prefill as captured for direct probes alone."""

    def narrow(prefill):
        probes = prefill.spans.direct_probes()
        return dataclasses.replace(
            prefill,
            queries=tuple(queries[:, probes] for queries in prefill.queries),
            query_positions=prefill.query_positions[probes],
        )

    return narrow
