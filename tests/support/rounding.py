"""A pytest plugin that rounds as another CPU might: it disturbs the last bit of torch's results.

`pytest -p support.rounding tests/...` shows which tests depend on the last bits of one CPU. Each
number of a matrix product, an exponential or a sum moves by up to one unit in the last place,
depending on its place and on the size of the result: the same call repeats exactly, a call of
another shape does not. Exact results, whose low bits are 0, stay as they are.
"""

from __future__ import annotations

import re
import zlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

INEXACT = re.compile(
    "mm|bmm|addmm|baddbmm|mv|addmv|dot|_softmax|_log_softmax|_safe_softmax|logsumexp|mean|sum"
    "|cumsum|prod|var|std|norm|linalg_vector_norm|native_layer_norm|_cdist_forward|_euclidean_dist"
    "|exp|exp2|expm1|log|log2|log1p|sin|cos|tanh|sigmoid|softplus|silu|gelu|pow|rsqrt"
    "|_scaled_dot_product_flash_attention_for_cpu|_scaled_dot_product_attention_math"
)
# One unit in the last place of a number just above 1, and the integer type of the same size.
LAST_BIT = {
    torch.float64: (2.0**-52, torch.int64),
    torch.float32: (2.0**-23, torch.int32),
    torch.bfloat16: (2.0**-7, None),
    torch.float16: (2.0**-10, None),
}
# Half precision is rounded from float32 sums: one result in so many falls to the other side.
RARE = 64


class OtherRounding(TorchDispatchMode):
    """Adds -1, 0 or 1 units in the last place, by an operation's name, its size and the place."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if INEXACT.fullmatch(name):
            _disturb(result if isinstance(result, Tensor) else result[0], zlib.crc32(name.encode()))
        return result


def _disturb(x: Tensor, seed: int) -> None:
    if x.dtype not in LAST_BIT or not x.numel() or x.requires_grad or x.device.type != "cpu":
        return
    if 0 in x.stride() and x.numel() > 1:
        return
    unit, bits = LAST_BIT[x.dtype]
    rng = torch.Generator().manual_seed(seed % 1009 + x.numel())
    sign = torch.randint(-1, 2, x.shape, generator=rng)
    if bits is None:
        sign = sign * (torch.randint(0, RARE, x.shape, generator=rng) == 0)
    else:
        sign = sign * ((x.contiguous().view(bits) & 0xFFF) != 0)
    x.mul_(1 + sign.to(x.dtype) * unit)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    """Fixtures included: what tests compare is all computed by the same rules."""
    with OtherRounding():
        yield
