"""The memory of a compression on a CPU for `construction.py`, measured in a separate process."""

from __future__ import annotations

import argparse
import ctypes
import gc
import re
import subprocess
import sys
from pathlib import Path

import torch
from construction_inputs import GEOMETRIES, prompt_of, synthetic

from gracekv import Budget, Pipeline


class Resident:
    """Resident memory of this process in MiB: now, and its peak since the last `reset`."""

    def reset(self) -> float:
        gc.collect()
        # Freed memory that the allocator keeps would otherwise count as used.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        return self._mib("VmRSS")

    def peak(self) -> float:
        return self._mib("VmHWM")

    def _mib(self, name: str) -> float:
        found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert found is not None, "peak memory is read from Linux's /proc"
        return int(found[1]) / 1024


_COMMAND = Path(__file__).with_name("construction.py")


def memory_of(length: int, args: argparse.Namespace) -> tuple[float, float]:
    """`measured_memory` in a separate process, whose heap other lengths have not fragmented."""
    call = [sys.executable, str(_COMMAND), "--memory", str(length), "--ratio", args.ratio]
    done = subprocess.run(
        [*call, "--engine", args.engine], capture_output=True, text=True, check=True
    )
    captured, extra = done.stdout.split()[-2:]
    return float(captured), float(extra)


def measured_memory(length: int, ratio: str, pipeline: Pipeline) -> tuple[float, float]:
    """Peak MiB of model and capture, and MiB that construction adds."""
    from gracekv.hf.capture import capture
    from gracekv.hf.smollm2 import load_smollm2

    resident = Resident()
    # Kernels and libraries are loaded once, not per prompt.
    pipeline.run(synthetic(GEOMETRIES["tiny"], 256, "cpu", torch.float32), Budget.ratio(4))
    baseline = resident.reset()
    model, tokenizer = load_smollm2()
    capture(model, prompt_of(tokenizer, 256), pipeline.needs())
    resident.reset()
    prefill = capture(model, prompt_of(tokenizer, length), pipeline.needs())
    captured = resident.peak() - baseline
    before = resident.reset()
    pipeline.run(prefill, Budget.ratio(ratio))
    return captured, resident.peak() - before
