"""Which part of the work is this process's."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from gracekv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shard:
    """One process's part of a run.

    Attributes:
        index: which part, from 0.
        count: of how many parts.
    """

    index: int = 0
    count: int = 1

    @property
    def name(self) -> str:
        """Names the shard's file of rows."""
        return "main" if self.count == 1 else f"{self.index}of{self.count}"

    def owns(self, number: int) -> bool:
        """Whether unit `number` of the plan is this shard's."""
        return number % self.count == self.index


def parse_shard(text: str | None, environment: Mapping[str, str] = os.environ) -> Shard:
    """``i/n`` with i from 0; without it torchrun's RANK and WORLD_SIZE; without those everything.

    Raises `ConfigError` if it cannot be read or i is not below n.
    """
    if text is None:
        rank, size = environment.get("RANK"), environment.get("WORLD_SIZE")
        if rank is None or size is None:
            return Shard()
        text = f"{rank}/{size}"
    match = re.fullmatch(r"(\d+)/(\d+)", text.strip())
    if match is None or int(match[1]) >= int(match[2]):
        raise ConfigError(
            f"A shard is i/n with i from 0 to n-1, such as 0/4; got {text!r} (from --shard, or "
            f"from RANK and WORLD_SIZE)."
        )
    return Shard(int(match[1]), int(match[2]))


def local_device() -> str | None:
    """torchrun's LOCAL_RANK as a GPU, or None where there is no GPU or no torchrun."""
    import torch

    rank = os.environ.get("LOCAL_RANK")
    return f"cuda:{rank}" if rank is not None and torch.cuda.is_available() else None
