"""The interface of precisions, which change how entries are stored, never which are kept."""

from __future__ import annotations

import abc
from collections.abc import Iterable

from torch import Tensor

from gracekv.allocate.entry_bytes import EntryBytes
from gracekv.cache.base import RaggedCache
from gracekv.cache.entries import CompressedCache
from gracekv.prefill import PromptSpans, Region
from gracekv.registry import Registry, Strategy


class Precision(Strategy, abc.ABC):
    """Store the kept entries of the compressible region with fewer bits.

    Positions, multiplicities and the number of entries stay. Entries outside the region (prefix,
    recent window, question) stay bit for bit unless a strategy's fields say otherwise.
    Deterministic.
    """

    def entry_bytes(self, dim: int, itemsize: int, spans: PromptSpans) -> EntryBytes | None:
        """What entries cost, if budgets count bytes; None: they count entries.

        Args:
            dim: d.
            itemsize: bytes of a number in the model's dtype.
            spans: of the prompt.

        Raises `ShapeError` if heads of dimension `dim` cannot be stored so.
        """
        return None

    @abc.abstractmethod
    def __call__(
        self, cache: RaggedCache, starts: Iterable[Tensor], region: Region
    ) -> CompressedCache:
        """Store the entries of `region`.

        Args:
            cache: the packed and fitted cache of one sequence.
            starts: for each layer int64 [E], the first position that each entry stands for.
            region: the compressible positions; an empty one leaves everything as it is.

        Raises `NonFiniteError` if numbers cannot be quantised.
        """


PRECISIONS: Registry[Precision] = Registry(
    "precision", "how many bits the numbers of an entry take"
)
Precision.registry = PRECISIONS
