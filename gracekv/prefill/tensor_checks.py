"""Whether the tensors of a `Prefill` fit one another."""

from __future__ import annotations

from typing import Any

from gracekv.errors import NonFiniteError, ShapeError
from gracekv.prefill.finite import is_finite


def check_tensors(prefill: Any) -> None:
    """Raise `ShapeError` if they do not, and `NonFiniteError` if one holds NaN or infinity."""
    if not len(prefill.keys) == len(prefill.values) == len(prefill.queries) > 0:
        raise ShapeError(
            f"Prefill takes keys, values and queries of the same L > 0 layers; got "
            f"{len(prefill.keys)}, {len(prefill.values)} and {len(prefill.queries)}."
        )
    heads, dim = prefill.keys[0].shape[0], prefill.keys[0].shape[-1]
    kv_shape = (heads, prefill.spans.length, dim)
    for layer, (k, v, q) in enumerate(
        zip(prefill.keys, prefill.values, prefill.queries, strict=True)
    ):
        if tuple(k.shape) != kv_shape or tuple(v.shape) != kv_shape:
            raise ShapeError(
                f"Keys and values of every layer must be [G, T, d] = {list(kv_shape)} for one "
                f"sequence; layer {layer} has {list(k.shape)} and {list(v.shape)}. Compress "
                f"the sequences of a batch one by one, without padding."
            )
        asked = (len(prefill.query_positions), dim)
        if q.ndim != 3 or q.shape[0] % heads or tuple(q.shape[1:]) != asked:
            raise ShapeError(
                f"Queries must be [H, {len(prefill.query_positions)}, {dim}] with H a multiple of "
                f"G = {heads}; layer {layer} has {list(q.shape)}."
            )
        for name, tensor in (("keys", k), ("values", v), ("queries", q)):
            if not is_finite(tensor):
                raise NonFiniteError(
                    f"The {name} of layer {layer} hold NaN or infinity. Check the model's "
                    f"weights and dtype (float16 overflows in some models: try bfloat16)."
                )
    if prefill.rope.cos.shape[0] < prefill.spans.length:
        raise ShapeError(
            f"The RoPE table covers {prefill.rope.cos.shape[0]} positions, the prompt has "
            f"{prefill.spans.length}."
        )
