"""Checks that the tensors of a prefill fit one another and are finite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gracekv.errors import NonFiniteError, ShapeError
from gracekv.prefill.observer import Observer

# Tokens that are summed at once.
_TOKENS = 1024


class FiniteChecks:
    """Checks for NaN and infinity, which a GPU's host looks at once, in `finish`."""

    def __init__(self) -> None:
        self._held: dict[tuple[torch.device, torch.dtype], list[tuple[str, Tensor, Tensor]]] = {}

    def add(self, tensor: Tensor, message: str) -> None:
        """Raise `NonFiniteError(message)` if `tensor` [...] is not finite; on GPUs in `finish`."""
        if tensor.device.type == "cpu":
            if not is_finite(tensor):
                raise NonFiniteError(message)
        elif tensor.numel():
            # Both are NaN if one element is.
            low, high = tensor.aminmax()
            self._held.setdefault((tensor.device, tensor.dtype), []).append((message, low, high))

    def finish(self) -> None:
        """Raise `NonFiniteError` for the first tensor that is not finite. Waits for GPUs."""
        for held in self._held.values():
            messages, low, high = zip(*held, strict=True)
            finite = torch.stack([*low, *high]).isfinite().view(2, -1).all(dim=0).tolist()
            for message, fits in zip(messages, finite, strict=True):
                if not fits:
                    raise NonFiniteError(message)
        self._held.clear()


def check_tensors(prefill: Any) -> None:
    """Raise `ShapeError` or `NonFiniteError` unless the tensors of a `Prefill` are sound."""
    if not len(prefill.keys) == len(prefill.values) == len(prefill.queries) > 0:
        raise ShapeError(
            f"Prefill takes keys, values and queries of the same L > 0 layers; got "
            f"{len(prefill.keys)}, {len(prefill.values)} and {len(prefill.queries)}."
        )
    if prefill.rope.cos.shape[0] < prefill.spans.length:
        raise ShapeError(
            f"The RoPE table covers {prefill.rope.cos.shape[0]} positions, the prompt has "
            f"{prefill.spans.length}."
        )
    checks = FiniteChecks()
    for capture in prefill:
        check_layer(capture, checks)
    for observer, seen in prefill.observed.items():
        _check_observation(observer, observer.shape(prefill), seen, checks)
    checks.finish()


def check_layer(capture: Any, checks: FiniteChecks) -> None:
    """Raise `ShapeError` unless keys, values and queries of a `LayerCapture` fit the others.

    `checks` is given what must be finite; the caller finishes it.
    """
    info, number = capture.info, capture.number
    keys, values, queries = capture.keys, capture.values, capture.queries
    wanted = [info.kv_heads, info.spans.length, info.head_dim]
    if list(keys.shape) != wanted or list(values.shape) != wanted:
        raise ShapeError(
            f"Keys and values of every layer must be [G, T, d] = {wanted} for one sequence; layer "
            f"{number} has {list(keys.shape)} and {list(values.shape)}. Compress the sequences of "
            f"a batch one by one, without padding."
        )
    asked = [len(info.query_positions), info.head_dim]
    if queries.ndim != 3 or len(queries) % info.kv_heads or list(queries.shape[1:]) != asked:
        raise ShapeError(
            f"Queries must be [H, {asked[0]}, {asked[1]}] with H a multiple of G = "
            f"{info.kv_heads}; layer {number} has {list(queries.shape)}."
        )
    for name, tensor in (("keys", keys), ("values", values), ("queries", queries)):
        checks.add(
            tensor,
            f"The {name} of layer {number} hold NaN or infinity. Check the model's weights and "
            f"dtype (float16 overflows in some models: try bfloat16).",
        )


def check_observed(capture: Any, checks: FiniteChecks) -> None:
    """Raise `ShapeError` unless the observations of a `LayerCapture` have the right shapes."""
    for observer, seen in capture.observed.items():
        _check_observation(observer, observer.shape(capture.info)[1:], seen, checks)


def _check_observation(
    observer: Observer, wanted: Sequence[int | None], seen: Tensor, checks: FiniteChecks
) -> None:
    got = list(seen.shape)
    if len(wanted) != len(got) or any(
        size not in (None, other) for size, other in zip(wanted, got, strict=True)
    ):
        shown = ", ".join("*" if size is None else str(size) for size in wanted)
        raise ShapeError(f"{observer!r} must observe a tensor [{shown}] here; it gave {got}.")
    checks.add(
        seen,
        f"{observer!r} observed NaN or infinity. Check the model's weights and dtype, or the "
        f"observer.",
    )


def is_finite(tensor: Tensor) -> bool:
    """Whether all of `tensor` [...] is finite, without a copy of its size."""
    # A NaN or an infinity survives a sum. One that overflows is looked at again.
    if tensor.dtype == torch.float32 and bool(tensor.sum().isfinite()):
        return True
    # float64, since long float16 sums overflow; in parts, since torch copies what it sums in
    # another dtype.
    axis = max(range(tensor.ndim), key=lambda i: tensor.shape[i])
    sums = [part.sum(dtype=torch.float64) for part in tensor.split(_TOKENS, dim=axis)]
    return not sums or bool(torch.isfinite(torch.stack(sums)).all())
