"""`Pretended`: a tensor that claims to be on cuda:0 but is computed on the CPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from pretend_counts import FREE, LAUNCHES, READS_A_PART, SYNCS, Ledger, size
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

CUDA = torch.device("cuda", 0)


class State:
    """The counted run; `emulated` while the CPU computes in the GPU's place."""

    ledger = Ledger()
    emulated = False


@contextmanager
def emulating() -> Iterator[None]:
    """Do not count the block: in it, the CPU computes what a GPU would."""
    before, State.emulated = State.emulated, True
    try:
        yield
    finally:
        State.emulated = before


class Pretended(torch.Tensor):
    """Wraps the CPU tensor `inner`."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Pretended:
        made: Pretended = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(),
            dtype=inner.dtype, device=CUDA, requires_grad=False,
        )  # fmt: skip
        made.inner = inner
        return made

    def __init__(self, inner: torch.Tensor) -> None:
        pass

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __repr__(self, **_: Any) -> str:
        return f"Pretended({tuple(self.shape)}, {self.dtype})"

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert a tensor on cuda:0 to numpy")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


def unwrapped(values: Any) -> Any:
    """A tree of values with pretended tensors replaced by their CPU tensors."""
    return tree_map(lambda x: x.inner if isinstance(x, Pretended) else x, values)


def dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on the inner tensors and count it."""
    name, asked = func._schema.name.split("::")[1], kwargs.get("device")
    target = None if asked is None else torch.device(asked).type
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    pretended = [x for x in tensors if isinstance(x, Pretended)]
    if not pretended and target != "cuda":
        started = time.perf_counter()
        output = func(*args, **kwargs)
        if not State.emulated:
            State.ledger.note_host(time.perf_counter() - started)
        return output
    if func._can_decompose() and name != "_to_copy":
        with PretendMode():
            return func.decompose(*args, **kwargs)
    inner_kwargs = {**unwrapped(kwargs), **({} if asked is None else {"device": "cpu"})}
    if inner_kwargs.get("pin_memory"):
        inner_kwargs["pin_memory"] = False
    inner_args = unwrapped(args)
    output = func(*inner_args, **inner_kwargs)
    to_host = name == "_to_copy" and target == "cpu"
    to_host = to_host or (name == "copy_" and not isinstance(args[0], Pretended))
    plain = [x for x in tensors if not isinstance(x, Pretended)]
    if to_host or (name == "_to_copy" and not pretended) or (name == "copy_" and plain):
        moved = size(next(x for x in tree_leaves(output) if isinstance(x, torch.Tensor)))
        label = "device to host" if to_host else "host to device"
        # PCIe moves 20 GB/s.
        # CUDA has read uploads from pageable memory before the call returns.
        waits = to_host or not kwargs.get("non_blocking")
        State.ledger.note(label, syncs=int(waits), moved=moved, seconds=moved / 2e10)
    else:
        _count(func, name, args, kwargs, (inner_args, inner_kwargs), output, plain)
    if to_host:
        return args[0] if name == "copy_" else output
    known = {id(x.inner): x for x in pretended}

    def wrapped(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        # An in-place operation returns its argument.
        return known[id(x)] if id(x) in known else Pretended(x)

    return tree_map(wrapped, output)


def _count(
    func: Any, name: str, args: Any, kwargs: Any, inner: Any, output: Any,
    plain: list[torch.Tensor],
) -> None:  # fmt: skip
    """Count an operation on the GPU; CPU tensors among its arguments are `plain`."""
    # Imports triton, which decides only then whether it interprets.
    from torch.utils.flop_counter import flop_registry

    base = name.rstrip("_")
    if name == "_local_scalar_dense":
        State.ledger.note("item", syncs=1)
        return
    if getattr(func, "is_view", False) or name in FREE:
        return
    syncs = SYNCS.get(name, SYNCS.get(base, 0))
    launches = LAUNCHES.get(base, 1)
    outputs = [x for x in tree_leaves(output) if isinstance(x, torch.Tensor)]
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        at = [x for x in tree_leaves(args[1:2]) if isinstance(x, torch.Tensor)]
        masks = sum(x.dtype in (torch.bool, torch.uint8) for x in at)
        # A number written under a mask is a `masked_fill`.
        filled = name != "index" and not isinstance(args[2], Pretended) and args[2].numel() == 1
        if masks and not filled:
            syncs, launches = syncs + masks, launches + 3
        if name in ("index_put", "index_put_") and len(args) > 3 and args[3]:
            launches += 9
    if name == "repeat_interleave" and kwargs.get("output_size") is None:
        syncs += 1
    if base == "cumsum" and outputs[0].is_floating_point():
        State.ledger.refuse("cumsum of floats under torch.use_deterministic_algorithms")
    for tensor in plain:
        # CPU scalars are free and indices are uploaded; anything else raises on CUDA.
        if tensor.dim() and name.startswith(("index", "_index")):
            syncs += 1
        elif tensor.dim():
            State.ledger.refuse(f"{name}: a CPU tensor beside a CUDA one")
    moved = sum(x.numel() * x.element_size() for x in outputs)
    if name in READS_A_PART:
        moved *= 2
    else:
        read = {id(x): x for x in tree_leaves(inner) if isinstance(x, torch.Tensor)}
        moved += sum(map(size, read.values()))
    flops, kind, seconds = 0, "product", 0.0
    formula = flop_registry.get(func._overloadpacket)
    if formula is not None:
        flops = formula(*inner[0], **inner[1], out_val=output)
        kind = "float32" if outputs[0].dtype == torch.float32 else kind
    elif name == "linalg_cholesky_ex":
        flops, kind = inner[0][0].numel() * inner[0][0].shape[-1] // 3, "float64"
    elif name == "cholesky_solve":
        flops, kind = 2 * inner[0][1].numel() * inner[0][0].shape[-1], "float64"
    elif name == "kthvalue":
        # A single block reads everything once per two bits, at 50 GB/s.
        seconds = size(inner[0][0]) * inner[0][0].element_size() * 4 / 5e10
    State.ledger.note(
        name, launches=launches, syncs=syncs, moved=moved, flops=flops, kind=kind, seconds=seconds
    )


class PretendMode(TorchDispatchMode):
    """Also counts operations that create tensors on cuda:0, and those of the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


class AttentionMode(TorchFunctionMode):
    """Counts attention as one call of the kernel that CUDA would choose, and uploads of lists."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func in (torch.tensor, torch.as_tensor) and "cuda" in str(kwargs.get("device"))
        if made and not isinstance(args[0], torch.Tensor):
            values = func(*args, **{**kwargs, "device": "cpu"})
            if values.numel():
                State.ledger.note("host to device", syncs=1, moved=size(values))
            return Pretended(values)
        item = func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
        if item and isinstance(args[0], Pretended):
            at = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(x, list) for x in at):
                at = tuple(_uploaded(x) if isinstance(x, list) else x for x in at)
                return func(args[0], at, *args[2:])
        elif func is scaled_dot_product_attention and isinstance(args[0], Pretended):
            return _attend(func, args, kwargs)
        return func(*args, **kwargs)


def _uploaded(index: list[Any]) -> Pretended:
    State.ledger.note("host to device", syncs=1)
    return Pretended(torch.tensor(index))


def _attend(func: Any, args: Any, kwargs: Any) -> Pretended:
    q, k, v = args[:3]
    mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
    rows, keys, dim = q.shape[-2], k.shape[-2], q.shape[-1]
    lower_right = type(mask).__name__ == "CausalBias"
    causal = lower_right or kwargs.get("is_causal", False)
    masked = mask is not None and not lower_right
    half = q.dtype in (torch.bfloat16, torch.float16)
    kernel = "flash" if half and not masked and dim <= 256 else "efficient"
    seen = 1 - rows / keys / 2 if causal else 1.0
    # A block has 64 rows; an H100's 132 multiprocessors need a few blocks each.
    filled = 1.0 if kernel == "flash" else -(-rows // 64) * q.shape[:-2].numel() / 450
    shape = f"rows {rows} keys {keys}" + (" mask" if masked else " causal" if causal else "")
    State.ledger.note_attention(kernel, shape)
    State.ledger.note(
        f"attention {kernel}",
        launches=1,
        moved=2 * size(q) + size(k) + size(v) + (size(mask) if masked else 0),
        flops=int(4 * q.shape[:-2].numel() * rows * keys * dim * seen / min(1.0, filled)),
        kind=kernel,
    )
    with emulating():
        return Pretended(func(*unwrapped(args), **unwrapped(kwargs)))
