"""Makes torch, Triton and gracekv believe that there is one H100, whose tensors are `Pretended`.

Triton kernels count as one launch each. Those that are slow in Triton's interpreter are computed
here in torch, from their arguments by name; any other kernel is interpreted.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from pretend_tensors import Pretended, State, emulating, unwrapped

_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
using Guard = c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>;
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
"""


def pretend() -> None:
    """Patch this process irreversibly; needs g++ and Triton, not yet imported."""
    assert "triton" not in sys.modules
    os.environ["TRITON_INTERPRET"] = "1"
    _load_device_guard()
    _patch_cuda()
    from triton.runtime import interpreter

    interpreter.GridExecutor.__call__ = _launch_with(interpreter.GridExecutor.__call__)
    _patch_gracekv()


def to_pretended(model: torch.nn.Module) -> torch.nn.Module:
    """Put a model's parameters and buffers on the pretended GPU."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                inner = Pretended(parameter.data)
                module._parameters[name] = torch.nn.Parameter(inner, requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = Pretended(buffer)
    return model


def _load_device_guard() -> None:
    """Load a no-op guard for CUDA devices: slicing needs one, and CPU builds have none."""
    path = Path(tempfile.gettempdir()) / f"pretended_cuda_guard_{torch.__version__}.so"
    if not path.exists():
        home = torch.__path__[0]
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder, path.name)
            subprocess.run(
                [
                    "g++", "-O0", "-shared", "-fPIC", "-std=c++20", f"-I{home}/include", "-x",
                    "c++", "-", "-o", str(made), f"-L{home}/lib", "-lc10",
                ],
                input=_GUARD.encode(), check=True,
            )  # fmt: skip
            made.replace(path)
    ctypes.CDLL(str(path))


class _Stream:
    """Stand-in for a stream or an event."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def synchronize(self) -> None:
        State.ledger.note("synchronize", syncs=1)

    def elapsed_time(self, _: Any) -> float:
        return 0.0

    def query(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def _patch_cuda() -> None:
    cuda: Any = torch.cuda
    properties = SimpleNamespace(
        multi_processor_count=132, total_memory=80 << 30, major=9, minor=0, is_integrated=False,
        name="a pretended H100",
    )  # fmt: skip
    for name, value in {
        "is_available": True, "device_count": 1, "current_device": 0, "_lazy_init": None,
        "mem_get_info": (70 << 30, 80 << 30), "memory_reserved": 0, "memory_allocated": 0,
        "get_device_capability": (9, 0), "get_device_properties": properties,
        "is_current_stream_capturing": False,
    }.items():  # fmt: skip
        setattr(cuda, name, lambda *_, value=value: value)
    torch.backends.cuda.can_use_flash_attention = lambda x, debug=False: x.query.element_size() == 2
    cuda.synchronize = lambda *_: State.ledger.note("synchronize", syncs=1)
    cuda.current_stream = cuda.default_stream = cuda.Event = cuda.Stream = _Stream
    cuda.device_of = cuda.stream = cuda.device = lambda *_, **__: nullcontext()


def _patch_gracekv() -> None:
    from gracekv.kernels import softmax_sums
    from gracekv.prefill import fingerprint, projection
    from gracekv.prefill.observations import Clock
    from gracekv.tree.engines import base, numba, triton
    from gracekv.value import block_replay

    # They accept plain tensors only, and check `type(x) is Tensor`.
    for module in (softmax_sums, block_replay, fingerprint, projection, base):
        module.Tensor = Pretended  # type: ignore[misc]
    time = Clock.time

    def staged(self: Any, name: Any, device: torch.device) -> AbstractContextManager[None]:
        label = name if isinstance(name, str) else f"observer {getattr(name, 'name', name)}"
        return _Both(State.ledger.stage(label), time(self, name, device))

    Clock.time = staged  # type: ignore[method-assign]
    begin, evaluate = triton.TritonEvaluator.__init__, triton.TritonEvaluator.__call__

    def begun(self: Any, inputs: Any) -> None:
        begin(self, inputs)
        with emulating():
            self._twin = numba.NumbaEvaluator(_unwrapped_fields(inputs))

    def evaluated(self: Any, nodes: Any) -> Any:
        with emulating():
            _KERNELS["interval_costs"] = _costs(self._twin(_unwrapped_fields(nodes)))
        return evaluate(self, nodes)

    triton.TritonEvaluator.__init__ = begun  # type: ignore[method-assign]
    triton.TritonEvaluator.__call__ = evaluated  # type: ignore[method-assign]


class _Both:
    """Two context managers in one."""

    def __init__(self, *managers: AbstractContextManager[None]) -> None:
        self._managers = managers

    def __enter__(self) -> None:
        for manager in self._managers:
            manager.__enter__()

    def __exit__(self, *error: Any) -> None:
        for manager in reversed(self._managers):
            manager.__exit__(*error)


def _unwrapped_fields(value: Any) -> Any:
    """`value` with pretended tensors replaced by CPU tensors, also in the fields of ours."""
    if is_dataclass(value) and not isinstance(value, type):
        inner = {x.name: _unwrapped_fields(getattr(value, x.name)) for x in fields(value) if x.init}
        return replace(value, **inner)
    if type(value).__module__.startswith("gracekv.tree.engines."):
        made = copy(value)
        vars(made).update((name, unwrapped(x)) for name, x in vars(value).items())
        return made
    return unwrapped(value)


def _launch_with(interpret: Any) -> Any:
    """A kernel launcher: counts one launch and, if possible, computes by `_KERNELS`."""

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        name = self.fn.__name__
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        moved = sum(x.numel() * x.element_size() for x in tensors)
        flops = 0
        with emulating():
            args, kwargs = unwrapped(args), unwrapped(kwargs)
            if name in _KERNELS:
                flops = _KERNELS[name](**dict(zip(self.arg_names, args, strict=False)), **kwargs)
            else:
                interpret(self, *args, **kwargs)
        State.ledger.note(f"kernel {name}", launches=1, moved=moved, flops=flops, kind="triton")

    return launch


def _log2_weights(queries: Any, keys: Any, seen: Any, scale: float) -> torch.Tensor:
    """The logits [H, Q, T] of the softmax-sum kernels, in base 2."""
    queries = queries.float().sum(0) * scale
    grouped = queries.unflatten(0, (len(keys), -1)) @ keys.float().mT[:, None]
    hidden = torch.arange(keys.shape[1]) >= seen[:, None]
    return grouped.flatten(0, 1).masked_fill_(hidden, -torch.inf)


def _row_logsumexp(
    *, queries: Any, keys: Any, seen: Any, sinks: Any, lse: Any, scale: float, **_: Any
) -> int:
    logits = _log2_weights(queries, keys, seen, scale) * _LN_2
    lse.fill_(-torch.inf)  # all keys are in the first part
    lse[0] = torch.logsumexp(torch.cat([logits, sinks[..., None]], dim=-1), dim=-1) / _LN_2
    return 2 * len(queries) * queries.shape[1] * int(seen.sum()) * queries.shape[-1]


def _reduce_columns(
    *, queries: Any, keys: Any, seen: Any, lse: Any, weights: Any, output: Any, CHUNK: int,
    power: float, scale: float, MAXIMUM: bool, **_: Any,
) -> int:  # fmt: skip
    shares = (power * (_log2_weights(queries, keys, seen, scale) - lse[0, ..., None])).exp2_()
    shares *= weights[:, None]
    for part, rows in zip(output, shares.split(CHUNK, dim=1), strict=True):
        part.copy_(rows.amax(1) if MAXIMUM else rows.sum(1))
    return 2 * len(queries) * queries.shape[1] * int(seen.sum()) * queries.shape[-1]


def _turn_and_look_back(
    *, queries: Any, keys: Any, cos: Any, sin: Any, moved: Any, lse: Any, near: int, scale: float,
    SHARED: int, **_: Any,
) -> int:  # fmt: skip
    from gracekv.kernels.rope import Rope
    from gracekv.value.block_replay import near_logits

    Rope(cos, sin, interleaved=SHARED == 2).rotate(queries.float(), None, moved)
    lse.copy_(near_logits(queries.float() * (scale * _LN_2), keys, near))
    return 2 * len(queries) * queries.shape[1] * near * queries.shape[-1]


def _costs(found: Any) -> Any:
    """The trees' kernel, with results in `found`: the first part of the probes gets them all."""

    def compute(*, sums: Any, **_: Any) -> int:
        sums.zero_()[0] = torch.cat([found.costs.flatten(), found.mass.flatten(), found.drop])
        return 0

    return compute


_LN_2 = 0.6931471805599453
_KERNELS: dict[str, Any] = {
    "row_logsumexp": _row_logsumexp, "reduce_columns": _reduce_columns,
    "turn_and_look_back": _turn_and_look_back,
}  # fmt: skip
