"""Resources of a compiled Triton kernel, read without a GPU.

Importing this skips a test module if kernels cannot be compiled.
"""

import re
import subprocess
from pathlib import Path

import pytest
import torch

from gracekv.kernels.device import interpreted

pytest.importorskip("triton")
if interpreted():
    pytest.skip("the interpreter does not compile", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
TYPES = {F32: "*fp32", F16: "*fp16", BF16: "*bf16"}
# Shared memory that one block may use, in KiB (CUDA programming guide, compute capabilities).
SHARED_KIB = {80: 163, 89: 99, 90: 227, 120: 99}


def compiled(kernel, pointers, floats, constants, arch, unaligned=(), **options):
    """`kernel` for a GPU, with pointers and strides divisible by 16, as in real use.

    Args:
        kernel: Triton kernel.
        pointers: types of arguments that are pointers, by name.
        floats: names of arguments that are float32; the others are integers.
        constants: by name.
        arch: compute capability, as in 90.
        unaligned: names of pointers and strides that may not be divisible by 16.
        options: compiler options.
    """
    signature, values, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[(index,)] = "constexpr", constants[name]
            continue
        signature[name] = pointers.get(name, "fp32" if name in floats else "i32")
        if (name in pointers or name.endswith("stride")) and name not in unaligned:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, values, attributes)
    return triton.compile(
        source, target=GPUTarget("cuda", arch, 32), options={**options, "enable_fp_fusion": True}
    )


def resources(binary, folder):
    """Registers, stack and local bytes of a compiled kernel, from NVIDIA's own tool."""
    path = folder / "kernel.cubin"
    path.write_bytes(binary.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    output = subprocess.run(
        [str(tool), "-res-usage", str(path)], capture_output=True, text=True, check=True
    ).stdout
    return {key: int(re.search(rf"{key}:(\d+)", output)[1]) for key in ("REG", "STACK", "LOCAL")}


def check_fits(binary, folder, arch, stack=0):
    """Check that at most `stack` bytes per thread spill, and that shared memory suffices."""
    used = resources(binary, folder)
    assert used["LOCAL"] == 0, "registers spill"
    assert used["STACK"] <= stack, "registers spill"
    assert binary.metadata.shared <= SHARED_KIB[arch] * 1024
