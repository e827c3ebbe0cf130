"""Pipelines that keep or drop single tokens, as packers that merge dropped tokens expect."""

from gracekv import Pipeline


def pipeline(pack, **changes):
    """The best tokens of each head by attention received, packed by `pack`."""
    return Pipeline.from_dict({"quota": "per_head", "pack": pack, **changes}, base="h2o")
