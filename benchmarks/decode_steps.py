"""How `decode.py` and `gpu.py` time steps: CUDA graphs, rounds in turn, and whole models."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from decode_shapes import Step
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from gracekv.hf import GraceCache, attach, detach

# Warm-up runs before a graph is recorded, and warm-up rounds.
WARM_UP = 3
UNCOUNTED = 2
_NO_MASK = "benchmark_sdpa_without_mask"


def graphed(step: Step, device: str) -> Step:
    """The step as a CUDA graph; on the CPU, the step itself.

    The step is warmed up before it is recorded, on the recording stream: compiling a kernel or
    initialising a library during recording fails or is recorded wrongly.
    """
    if device != "cuda":
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def interleaved(
    steps: dict[str, Step],
    device: str,
    rounds: int,
    before: Callable[[str], None] | None = None,
    chosen: Callable[[list[float]], float] = statistics.median,
) -> dict[str, float]:
    """Median seconds of each step; each round runs all of them in turn, after `before`(name).

    `chosen` reduces the rounds' seconds: use `min` on machines that are not idle.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + UNCOUNTED):
        for name, step in steps.items():
            if before is not None:
                before(name)
            if device == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter()
            step()
            if device == "cuda":
                torch.cuda.synchronize()
            if turn >= UNCOUNTED:  # the first rounds build cached tensors and touch new memory
                seconds[name].append(time.perf_counter() - begin)
    return {name: chosen(taken) for name, taken in seconds.items()}


def copy_speed(device: str, size: int = 256 << 20) -> float:
    """Bytes read and written per second by a copy of `size` bytes."""
    source = torch.empty(size, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    return 2 * len(source) / interleaved({"": lambda: target.copy_(source)}, device, 9)[""]


def attend_for(model: Any, cache: Cache) -> None:
    """Switch the model to the attention that reads `cache`.

    A stock cache is read by torch's sdpa without a mask, since one token needs none:
    transformers 5.17 makes one while a graph is recorded, and then repeats keys and values.
    """
    if isinstance(cache, GraceCache):
        if model.config._attn_implementation == _NO_MASK:
            model.set_attn_implementation("sdpa")
        attach(model)
        return
    AttentionInterface.register(_NO_MASK, sdpa_attention_forward)
    AttentionMaskInterface.register(_NO_MASK, lambda **_: None)
    detach(model)
    model.set_attn_implementation(_NO_MASK)


def timed_caches(
    model: Any,
    caches: dict[str, Cache],
    batch: int,
    device: str,
    rounds: int,
    *,
    graphs: bool = True,
    static: bool | None = None,
) -> dict[str, float]:
    """Median seconds of a forward pass of one token over each cache.

    Our caches use a preallocated tail if `static` (default: on GPUs); on GPUs all steps are CUDA
    graphs unless `graphs` is False.
    """
    static = device == "cuda" if static is None else static
    token = torch.full((batch, 1), 7, device=device)
    steps: dict[str, Step] = {}
    for name, cache in caches.items():
        if static and isinstance(cache, GraceCache):
            cache.warm_up(model)
            # Every run appends a token.
            cache = cache.with_static_tail(WARM_UP + UNCOUNTED + rounds + 1, rows=batch)
            # Positions are known to be right, and a check would synchronise with the device.
            cache.is_replayed = True
        # Graphs need it at a fixed address; otherwise it grows with the cache, which checks it.
        position = None
        if static:
            position = torch.full((batch, 1), int(cache.get_seq_length()), device=device)

        def step(cache: Cache = cache, position: torch.Tensor | None = position) -> object:
            return model(
                token, past_key_values=cache, position_ids=position, logits_to_keep=1
            ).logits

        attend_for(model, cache)
        steps[name] = graphed(step, device) if graphs else step
    try:
        return interleaved(steps, device, rounds, lambda name: attend_for(model, caches[name]))
    finally:
        if model.config._attn_implementation == _NO_MASK:
            model.set_attn_implementation("sdpa")
