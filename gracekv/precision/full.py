"""`full`: entries stay in the model's dtype."""

from __future__ import annotations

from gracekv.precision.base import PRECISIONS, Precision


@PRECISIONS.register("full", works_sharded=True)
class FullPrecision(Precision):
    """Entries stay in the model's dtype, bit for bit.

    Source: the paper.

    Cost: none.
    """
