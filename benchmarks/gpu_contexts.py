"""The part of `gpu.py` about serving: ragged contexts next to pages like vLLM's, without vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from decode_shapes import GEOMETRIES
from decode_steps import graphed, interleaved
from gpu_bench import FLOAT32_ON_GPU, Bench
from gpu_report import Case, Row

from gracekv.kernels.device import obstacle
from support.paged_contexts import LAYOUTS, check_step, paged_step, step_attention

# Tokens of a page, and of a request's question and answer so far.
_PAGE, _OWN = 16, 100


def paged(bench: Bench) -> Iterator[Case]:
    """Attention over contexts and pages against float64, and its speed against a copy.

    Repeated on the same entries, so those that fit are read from the GPU's cache.
    """
    options, device = bench.options, bench.options.device
    reason = obstacle(torch.device(device), "another part")
    if reason is not None:
        yield Case({"what": "none"}, lambda: {"status": f"left out: {reason}"}, 1)
        return
    requests = [("a", 33, 1), (None, 20, 20), ("b", 140, 130), ("a", 300, 1), ("b", 40, 3)]
    for (dim, dtype), layout in product(
        [(64, torch.float32), (80, torch.float16), (128, torch.bfloat16)],
        LAYOUTS[: 1 if options.tiny else None],
    ):

        def right(dim: int = dim, dtype: torch.dtype = dtype, layout: str = layout) -> Row:
            step = paged_step(
                dim, {"a": [900, 0], "b": [3, 60]}, requests, dim=dim, group=4, block=_PAGE,
                dtype=dtype, layout=layout, device=device,
            )  # fmt: skip
            exact = bench.cuda and dtype == torch.float32
            check_step(step, FLOAT32_ON_GPU if exact else None)
            return {}

        labels = {"dim": dim, "dtype": str(dtype)[6:], "pages": layout}
        yield Case(labels, right, 10)
    geometry = GEOMETRIES[options.geometry]
    for length, batch in product(options.lengths, options.batches):

        def fast(length: int = length, batch: int = batch) -> Row:
            mean = length // options.ratio
            skewed = [mean // 2 if g % 2 else mean + mean // 2 for g in range(geometry.kv_heads)]
            step = paged_step(
                length, {"a": skewed}, [("a", _OWN, 1)] * batch, dim=geometry.dim,
                group=geometry.heads // geometry.kv_heads, block=_PAGE, dtype=bench.dtype,
                device=device,
            )  # fmt: skip
            own = batch * _OWN * geometry.kv_heads * 2 * geometry.dim * bench.dtype.itemsize
            size = step.contexts["a"].layers[1].kv_bytes + own
            runs = {"launched": step_attention(step)}
            if bench.cuda:
                runs["graph"] = graphed(runs["launched"], device)
            seconds = interleaved(runs, device, options.rounds)
            speed = size / min(seconds.values())
            row: Row = {f"{name} us a layer": 1e6 * took for name, took in seconds.items()}
            return {**row, "GB/s": speed / 1e9, "of copy": speed / bench.copied}

        yield Case({"context": length, "requests": batch}, fast, 10)
