"""`HeadShard`: which KV heads a process holds, and what it asks the other processes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gracekv.errors import RankError


class Exchange(Protocol):
    """How the processes of one model exchange small tensors."""

    def __call__(self, tensor: Tensor) -> list[Tensor]:
        """The tensors [...] that all processes gave, in rank order; of one shape and dtype.

        `tensor` is on the CPU. Raises `RankError` if a process fails, leaves, is too late, or gives
        another shape.
        """

    def fail(self) -> None:
        """Tell the others, at their next exchange, that this process has failed; does not wait."""


@dataclass(frozen=True, slots=True, eq=False)
class HeadShard:
    """The part of a model's KV heads that this process holds.

    Process r of R holds the KV heads r G .. (r + 1) G - 1 of every layer. What is asked of the
    others is gathered and then combined in rank order, so every process gets the same bits.

    Attributes:
        rank: r, from 0.
        ranks: R.
        exchange: reaches the other processes; None: there are none, as by default.
    """

    rank: int = 0
    ranks: int = 1
    exchange: Exchange | None = None

    def gather(self, tensor: Tensor) -> Tensor:
        """[R, ...]: `tensor` [...] of every process, on its device."""
        if self.exchange is None:
            return tensor[None]
        parts = self.exchange(tensor.detach().cpu().contiguous())
        return torch.stack(parts).to(tensor.device)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over processes, as `tensor` [...]."""
        return self.gather(tensor).sum(dim=0)

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean over processes, as `tensor` [...]."""
        return self.sum(tensor) / self.ranks

    def total(self, count: int) -> int:
        """The sum of a whole number over processes."""
        return int(self.sum(torch.tensor(count)))

    def maximum(self, tensor: Tensor) -> Tensor:
        """The largest of all processes, as `tensor` [...]."""
        return self.gather(tensor).amax(dim=0)

    def from_first(self, tensor: Tensor) -> Tensor:
        """What process 0 gave: [...], of any shape there; others give the same dtype and rank."""
        shape = self.gather(torch.tensor(tensor.shape))[0].tolist()
        sent = tensor if self.rank == 0 else tensor.new_zeros(shape)
        return self.gather(sent)[0]

    def all_heads(self, tensor: Tensor, dim: int) -> Tensor:
        """[.., R G, ..]: all processes' heads along `dim` of `tensor` [.., G, ..], with its own."""
        return torch.cat(self.gather(tensor).unbind(), dim=dim)

    def own_heads(self, tensor: Tensor, dim: int) -> Tensor:
        """[.., G, ..]: this process's part of `tensor` [.., R G, ..], all heads along `dim`."""
        heads = tensor.shape[dim] // self.ranks
        return tensor.narrow(dim, self.rank * heads, heads)

    def among_all(self, units: Tensor, heads: int) -> Tensor:
        """int64 [n]: layer * R G + head in the whole model, of `units` [n], layer * G + head here.

        `heads` is G.
        """
        layer, head = units // heads, units % heads
        return (layer * self.ranks + self.rank) * heads + head

    def agree(self, **facts: bytes) -> None:
        """Raise `RankError` on every process unless all give the same `facts`."""
        digests = [hashlib.sha256(fact).digest() for fact in facts.values()]
        rows = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8)
        every = self.gather(rows.view(len(facts), -1))
        same = (every == every[0]).all(dim=2)
        for number, name in enumerate(facts):
            if not bool(same[:, number].all()):
                others = (~same[:, number]).nonzero().flatten().tolist()
                raise RankError(
                    f"The processes of a sharded model must make the same call; {name} of process "
                    f"{', '.join(map(str, others))} is not that of process 0. Give every process "
                    f"the same arguments."
                )


WHOLE = HeadShard()
"""All KV heads, of a model in one process."""
