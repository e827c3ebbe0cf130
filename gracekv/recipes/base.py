"""`Recipe`, and the fields that recipes share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PAPER: Mapping[str, Any] = {
    "segment": "curvature_dp",
    "value": "multi_hop",
    "sensitivity": "output_projection",
    "distortion": "prototype",
    "refine": "binary_extract",
    "prototype": {},
    "floor": "singleton",
    "quota": "global",
    "allocate": "greedy",
    "pack": "prototype",
    "window": {},
}
"""The paper's method, stage by stage; its strategies' defaults are the paper's numbers."""

TOKENS: Mapping[str, Any] = {
    "segment": "tokens",
    "distortion": "unit",
    "refine": "leaf_only",
    "floor": "none",
    "pack": "evict",
}
"""The fields shared by all selections of single tokens: each token is a slot."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """One named pipeline.

    Attributes:
        summary: a description in one line.
        source: where it was published, or "ours".
        pipeline: fields for `Pipeline.from_dict`.
    """

    summary: str
    source: str
    pipeline: Mapping[str, Any] = field(default_factory=dict)
