"""What a compiled Triton kernel takes of a GPU, read without one."""

import re
import subprocess
from pathlib import Path

import triton


def resources(binary, folder):
    """Registers, stack and local bytes of a compiled kernel, by NVIDIA's own tool."""
    path = folder / "kernel.cubin"
    path.write_bytes(binary.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    output = subprocess.run(
        [str(tool), "-res-usage", str(path)], capture_output=True, text=True, check=True
    ).stdout
    return {key: int(re.search(rf"{key}:(\d+)", output)[1]) for key in ("REG", "STACK", "LOCAL")}
