"""`CutHistory`: which tokens were read under a limit, and which of them each cut left."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class CutHistory:
    """The tokens that a cache with a limit read after its packed prompt, and those its cuts left.

    All tensors but `keys` are on the CPU.

    Attributes:
        first: position of the first token of `ids`, which is the prompt's last one, fed again.
        ids: int64 [n] tokens that were read since; -1 for those given as embeddings.
        held: for each cut int32 [tokens so far], in how many heads of all layers a token has an
            entry of its own.
        keys: [E, d] of the last layer's entries at the start. They depend on the whole prompt, and
            so identify the result; None if unknown.
    """

    first: int
    ids: Tensor
    held: tuple[Tensor, ...]
    keys: Tensor | None = None
