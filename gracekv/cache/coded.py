"""`CodedEntries`: entries whose keys and values are small integers with scales and zero points."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Self

import numpy as np
import torch
from torch import Tensor

from gracekv.errors import ShapeError
from gracekv.kernels import ragged


@dataclass(frozen=True, slots=True)
class Coding:
    """How numbers are quantised to codes.

    Keys are grouped by channel: `group` consecutive entries of a head share a scale and a zero
    point in each channel. Values are grouped by token: `group` consecutive channels of an entry
    share them, or all of its channels if there are fewer. That is KIVI's layout
    (arXiv:2402.02750).

    Attributes:
        bits: width of a code, 8, 4 or 2.
        group: how many numbers share a scale and a zero point.
    """

    bits: int
    group: int

    @property
    def most(self) -> int:
        """The largest code."""
        return int(2**self.bits) - 1

    def check(self, dim: int) -> None:
        """Raise `ShapeError` unless heads of dimension `dim` can be stored with this coding."""
        if dim % min(self.group, dim):
            fits = ", ".join(str(size) for size in range(1, dim) if dim % size == 0)
            raise ShapeError(
                f"Groups of {self.group} channels do not fit a head dimension of {dim}. Use one of "
                f"{fits}, or at least {dim} for one group per entry."
            )
        if dim * self.bits % 8:
            raise ShapeError(
                f"{dim} codes of {self.bits} bits do not fill whole bytes. Use the precision "
                f"'uniform' with 8 bits, or 'full'."
            )


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """Numbers [E, d]: zero + scale * code.

    Attributes:
        codes: uint8 [E, n], n = d * bits / 8. Byte j holds channels j, j + n, j + 2 n and so on,
            the first in its lowest bits.
        scale: 16-bit numbers: [N, d] for keys, one row per block of entries, and [E, d / group] for
            values.
        zero: [N, d] or [E, d / group], like `scale`.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor

    def numbers(self, first: int, stop: int, bits: int, block: Tensor | None) -> Tensor:
        """float32 [n, d] of the n entries [first, stop).

        `block` int64 [n] holds the row of `scale` of each entry, or is None if each has its own.
        """
        codes = self.codes[first:stop]
        if bits < 8:
            shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)[:, None]
            codes = ((codes[:, None] >> shifts) & (2**bits - 1)).flatten(1)
        if block is None:
            scale, zero = self.scale[first:stop, :, None], self.zero[first:stop, :, None]
        else:
            at = block.to(codes.device)
            scale, zero = self.scale[at][..., None], self.zero[at][..., None]
        grouped = codes.float().unflatten(1, (scale.shape[1], -1))
        numbers: Tensor = zero.float() + scale.float() * grouped
        return numbers.flatten(1)

    @property
    def bytes(self) -> int:
        """Bytes of codes, scales and zero points."""
        return sum(t.nbytes for t in (self.codes, self.scale, self.zero))


@dataclass(frozen=True, slots=True, eq=False)
class CodedEntries:
    """Quantised entries of one layer, head after head as in `RaggedEntries`.

    Attributes:
        keys: codes of E keys.
        values: codes of E values.
        positions: int32 [E], ascending within a head.
        log_multiplicity: float32 [E].
        offsets: int64 [S*G+1] on the CPU.
        coding: how to read the codes.
        sequences: S.

    Raises `ShapeError` if the tensors' shapes do not match.
    """

    keys: Codes
    values: Codes
    positions: Tensor
    log_multiplicity: Tensor
    offsets: Tensor
    coding: Coding
    sequences: int = 1

    def __post_init__(self) -> None:
        # Dynamo cannot read numbers from tensors; what is stacked in a step was checked before.
        if torch.compiler.is_compiling():
            return
        entries, blocks = (int(x.numpy()[-1]) for x in (self.offsets, self.block_offsets))
        dim = self.dim
        self.coding.check(dim)
        shapes = {"keys": (blocks, dim), "values": (entries, dim // min(self.coding.group, dim))}
        for name, shape in shapes.items():
            part: Codes = getattr(self, name)
            if part.codes.shape != (entries, dim * self.coding.bits // 8) or not (
                part.scale.shape == part.zero.shape == shape
            ):
                raise ShapeError(
                    f"Coded {name} of {entries} entries take codes [{entries}, "
                    f"{dim * self.coding.bits // 8}] and scales and zero points {list(shape)}; got "
                    f"{[list(x.shape) for x in (part.codes, part.scale, part.zero)]}."
                )
        if self.positions.shape != (entries,) or self.log_multiplicity.shape != (entries,):
            raise ShapeError(
                f"Coded entries take positions and log_multiplicity [{entries}]; got "
                f"{list(self.positions.shape)} and {list(self.log_multiplicity.shape)}."
            )

    @property
    def entries(self) -> int:
        """E."""
        return len(self.positions)

    @property
    def dim(self) -> int:
        """d."""
        return self.keys.codes.shape[1] * 8 // self.coding.bits

    @property
    def lengths(self) -> Tensor:
        """int64 [S*G], entries per row."""
        return torch.from_numpy(np.diff(self.offsets.numpy()))

    @property
    def block_offsets(self) -> Tensor:
        """int64 [S*G+1]: blocks [block_offsets[r], block_offsets[r + 1]) are row r's."""
        # With NumPy, since torch is several times slower for so few numbers.
        counts = -(-np.diff(self.offsets.numpy()) // self.coding.group)
        return torch.from_numpy(np.append(0, counts.cumsum()))

    def numbers(self, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values float32 [stop - first, d] of entries [first, stop), of any rows."""
        entry = torch.arange(first, stop, device="cpu")
        row = torch.searchsorted(self.offsets, entry, right=True) - 1
        block = self.block_offsets[row] + (entry - self.offsets[row]) // self.coding.group
        keys = self.keys.numbers(first, stop, self.coding.bits, block)
        return keys, self.values.numbers(first, stop, self.coding.bits, None)

    @staticmethod
    def by_block(name: str) -> bool:
        """Whether the tensor `name` of `tensors` has one row per block instead of per entry."""
        return name in ("keys.scale", "keys.zero")

    def rows(self, begin: int, end: int) -> CodedEntries:
        """Views of rows [begin, end), as one sequence."""
        at, blocks = (slice(*x.numpy()[[begin, end]]) for x in (self.offsets, self.block_offsets))
        parts = {n: x[blocks if self.by_block(n) else at] for n, x in self.columns().items()}
        parts["offsets"] = self.offsets[begin : end + 1] - at.start
        return CodedEntries.of_tensors(parts, self.coding, sequences=1)

    @classmethod
    def stack(cls, parts: Sequence[CodedEntries]) -> CodedEntries:
        """Join the sequences of all `parts`, which share one coding."""
        if len(parts) == 1:
            return parts[0]
        columns = [part.columns() for part in parts]
        joined = {name: torch.cat([each[name] for each in columns]) for name in columns[0]}
        joined["offsets"] = ragged.offsets(torch.cat([part.lengths for part in parts]))
        return cls.of_tensors(joined, parts[0].coding, sum(part.sequences for part in parts))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> CodedEntries:
        """The same entries with `change` applied to each tensor [...] except offsets, in order."""
        tensors = {n: x if n == "offsets" else change(x) for n, x in self.tensors().items()}
        return CodedEntries.of_tensors(tensors, self.coding, self.sequences)

    def tensors(self) -> Mapping[str, Tensor]:
        """All stored tensors by name: [E, bytes] codes, their scales [N, d] and so on."""
        return {**self.columns(), "offsets": self.offsets}

    def columns(self) -> dict[str, Tensor]:
        """All tensors but the offsets by name: [E, ...], or [N, d] if `by_block`."""
        columns: dict[str, Tensor] = {}
        for name in ("keys", "values"):
            made: Codes = getattr(self, name)
            columns |= {f"{name}.{x}": getattr(made, x) for x in ("codes", "scale", "zero")}
        return columns | {x: getattr(self, x) for x in ("positions", "log_multiplicity")}

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor], coding: Coding, sequences: int) -> Self:
        """The inverse of `tensors`, of [E, bytes] codes and so on.

        Raises `KeyError` if one is missing, `ShapeError` if their shapes do not match.
        """

        def codes(name: str) -> Codes:
            return Codes(*(tensors[f"{name}.{x}"] for x in ("codes", "scale", "zero")))

        index = tensors["positions"], tensors["log_multiplicity"], tensors["offsets"]
        return cls(codes("keys"), codes("values"), *index, coding, sequences)

    @property
    def kv_bytes(self) -> int:
        """Bytes of codes, scales and zero points."""
        return self.keys.bytes + self.values.bytes


def by_coding(parts: Sequence[CodedEntries]) -> tuple[tuple[CodedEntries, ...], ...]:
    """The parts of each coding, which are neighbours.

    A context that was extended has many small parts, which are faster to dequantise when stacked.
    """
    return tuple(tuple(same) for _, same in groupby(parts, attrgetter("coding")))
