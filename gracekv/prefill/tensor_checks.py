"""Checks that the tensors of a prefill fit one another and are finite."""

from __future__ import annotations

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


def check_tensors(prefill: Any, checks: FiniteChecks | None = None) -> None:
    """Raise `ShapeError` or `NonFiniteError` unless the tensors of `prefill` are sound.

    Args:
        prefill: a `Prefill`.
        checks: is given what must be finite, and finished by the caller; None: all is checked here.
    """
    own = FiniteChecks() if checks is None else checks
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
        if not k.shape[1] and not v.shape[1] and not q.shape[1]:
            # Where layers come one after the other, the others have no tokens.
            continue
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
            own.add(
                tensor,
                f"The {name} of layer {layer} hold NaN or infinity. Check the model's weights and "
                f"dtype (float16 overflows in some models: try bfloat16).",
            )
    if prefill.rope.cos.shape[0] < prefill.spans.length:
        raise ShapeError(
            f"The RoPE table covers {prefill.rope.cos.shape[0]} positions, the prompt has "
            f"{prefill.spans.length}."
        )
    for observer, tensor in prefill.observed.items():
        _check_observation(prefill, observer, tensor, own)
    if checks is None:
        own.finish()


def _check_observation(
    prefill: Any, observer: Observer, tensor: Tensor, checks: FiniteChecks
) -> None:
    wanted, got = observer.shape(prefill), list(tensor.shape)
    if len(wanted) != len(got) or any(
        size not in (None, other) for size, other in zip(wanted, got, strict=True)
    ):
        shown = ", ".join("*" if size is None else str(size) for size in wanted)
        raise ShapeError(f"{observer!r} must observe a tensor [{shown}] here; it gave {got}.")
    # One layer's that stands for all has a stride of 0.
    checks.add(
        tensor if tensor.stride(0) else tensor[:1],
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
