"""Where keys and values lie in vLLM's pages, found by writing numbers into one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gracekv.errors import ShapeError

# Digits that every dtype holds exactly.
_BASE = 128


@dataclass(frozen=True, slots=True, eq=False)
class PageLayout:
    """Places inside one head's part of one block, counted in elements from its start.

    Attributes:
        keys: int32 [block, d], where feature i of the key in slot t lies.
        values: int32 [block, d].
    """

    keys: Tensor
    values: Tensor


def find_layout(write: Callable[[Tensor, Tensor, Tensor], None], page: Tensor) -> PageLayout:
    """The layout that `write` uses; kernels for different processors pack keys differently.

    Args:
        write: called with keys [block, G, d], values [block, G, d] and a page like `page`, which it
            fills as the engine would.
        page: zeros [1, G, block, 2d], contiguous.

    Raises `ShapeError` if the page then does not hold every number once.

    Source: ours.
    """
    _, heads, block, width = page.shape
    dim = width // 2
    numbers = torch.arange(1, block * width + 1)
    read = torch.zeros(block * width, dtype=torch.int64)
    place = 1
    while place <= block * width:
        digits = (numbers // place % _BASE).to(page.dtype).view(2, block, 1, dim)
        keys, values = digits.expand(2, block, heads, dim).contiguous().unbind()
        write(keys, values, page.zero_())
        flat = page.view(heads, -1)
        if not bool((flat == flat[0]).all()):
            raise ShapeError("The engine's pages are laid out differently in each head.")
        read += flat[0].long() * place
        place *= _BASE
    if not torch.equal(read.sort().values, numbers):
        raise ShapeError(
            "The engine's pages do not hold keys and values as they are (a quantised cache?)."
        )
    where = read.argsort().to(torch.int32).view(2, block, dim)
    return PageLayout(where[0].contiguous(), where[1].contiguous())
