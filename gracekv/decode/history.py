"""`CutHistory`: what became of the tokens that were written under a limit, cut by cut."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class CutHistory:
    """What a cache with a limit read after its packed prompt, and what its cuts left.

    On the CPU, but for `keys`.

    Attributes:
        first: position of the first token of `ids`, which is the prompt's last one, fed again.
        ids: int64 [n] tokens that were read since; -1 for those given as embeddings.
        held: for each cut int32 [tokens so far], in how many heads of all layers a token has an
            entry of its own.
        keys: [E, d] of the last layer's entries that it began with, which depend on all of the
            prompt, and so tell whose history it is; None if that is not known.
    """

    first: int
    ids: Tensor
    held: tuple[Tensor, ...]
    keys: Tensor | None = None
