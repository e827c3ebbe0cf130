"""Prefills that hold less than they were made with."""

import dataclasses


def without_queries(prefill):
    """The prefill as one that holds no query."""
    none = tuple(x[:, :0].clone() for x in prefill.queries)
    return dataclasses.replace(prefill, queries=none, query_positions=prefill.query_positions[:0])
