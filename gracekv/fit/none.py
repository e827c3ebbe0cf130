"""`none`: entries are not changed."""

from __future__ import annotations

from gracekv.cache.base import RaggedEntries
from gracekv.fit.base import FITTERS, Fitter
from gracekv.prefill import Region


@FITTERS.register("none", works_sharded=True)
class NoFit(Fitter):
    """Entries stay as packed, bit for bit.

    Source: the paper.

    Cost: none.
    """

    def layer(self, packed: RaggedEntries, reference: None, region: Region) -> RaggedEntries:
        return packed
