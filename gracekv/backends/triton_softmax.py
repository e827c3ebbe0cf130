"""What the kernels that attend to splits share: the running softmax, and capped logits."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def capped(logits, softcap):
    """softcap * tanh(logits / softcap) to float32's last bits; a NaN stays one."""
    x = logits / softcap
    size = tl.minimum(tl.abs(x), 20.0)
    far = 1.0 - 2.0 / (tl.exp(2.0 * size) + 1.0)
    square = x * x
    # Cephes' polynomial: near 0 the quotient would cancel.
    p = -5.70498872745e-3 * square + 2.06390887954e-2
    p = p * square - 5.37397155531e-2
    p = p * square + 1.33314422036e-1
    p = p * square - 3.33332819422e-1
    near = p * square * x + x
    return softcap * tl.where(tl.abs(x) >= 0.625, tl.where(x < 0, -far, far), near)


@triton.jit
def add_entries(logits, v, top, total, acc, PRECISION: tl.constexpr):
    """The running maximum, sum and output [BLOCK_M, BLOCK_D] with entries of values `v` added."""
    new_top = tl.maximum(top, tl.max(logits, 1))
    # A row that has seen nothing yet has -inf - -inf, which is NaN.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp(logits - base[:, None])
    decay = tl.exp(top - base)
    total = total * decay + tl.sum(weights, 1)
    acc = acc * decay[:, None]
    acc += tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    return new_top, total, acc


@triton.jit
def normalised(top, total, acc):
    """Output and log-sum-exp; 0 and -inf of rows that see nothing."""
    safe = tl.where(total > 0, total, 1.0)
    return acc / safe[:, None], tl.where(total > 0, top + tl.log(safe), float("-inf"))
