"""`none`: entries stay as they were packed."""

from __future__ import annotations

from gracekv.cache.base import RaggedEntries
from gracekv.fit.base import FITTERS, Fitter
from gracekv.prefill import Region


@FITTERS.register("none", works_sharded=True)
class NoFit(Fitter):
    """Entries stay as they were packed, bit for bit.

    Source: the paper.

    Cost: none.
    """

    def layer(self, packed: RaggedEntries, reference: None, region: Region) -> RaggedEntries:
        return packed
