"""The fused distortion compiled for real GPUs, without one: registers suffice, memory fits.

The paper's 64 probes run on every architecture; other head dimensions, partial rotation and few
probes on one roomy and one small architecture.
"""

import re
import subprocess
from pathlib import Path

import pytest

from gracekv.kernels.device import interpreted
from gracekv.kernels.ends_tiles import padded, tiles

triton = pytest.importorskip("triton")
if interpreted():
    pytest.skip("the interpreter does not compile", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from gracekv.kernels.ends_triton import node_ends  # noqa: E402

# Shared memory that one block may use, in KiB (CUDA programming guide, compute capabilities).
SHARED_KIB = {80: 163, 89: 99, 90: 227, 120: 99}
INDICES = ("head", "first", "length", "before")
COUNTS = ("tokens", "nodes", "width", "region_start", "features", "halves")
NUMBERS = ("lambda_z", "lambda_m", "epsilon", "uniform_base", "rule_epsilon")


def compiled(dim, width, arch, *, probes=64, half=None):
    tile = tiles(width, probes)
    constants = {
        "P": probes,
        "D": dim,
        "HALF": dim // 2 if half is None else half,
        "MULTIPLICITY": True,
        "BLOCK_T": tile.tokens,
        "BLOCK_C": tile.past,
        "BLOCK_P": tile.probes,
        "BLOCK_D": padded(dim),
        "BLOCK_F": tile.features,
    }
    signature, values, attributes = {}, {}, {}
    for index, name in enumerate(node_ends.arg_names):
        if name in constants:
            signature[name], values[(index,)] = "constexpr", constants[name]
        elif name in COUNTS or name in NUMBERS:
            signature[name] = "i32" if name in COUNTS else "fp32"
        else:
            signature[name] = "*i64" if name in INDICES else "*fp32"
            attributes[(index,)] = [["tt.divisibility", 16]]
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": True}
    source = ASTSource(node_ends, signature, values, attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def resources(binary, folder):
    """Registers, stack and local bytes of a compiled kernel, by NVIDIA's own tool."""
    path = folder / "kernel.cubin"
    path.write_bytes(binary.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    told = subprocess.run(
        [str(tool), "-res-usage", str(path)], capture_output=True, text=True, check=True
    ).stdout
    return {key: int(re.search(rf"{key}:(\d+)", told)[1]) for key in ("REG", "STACK", "LOCAL")}


ALL = [(128, width, arch, {}) for width in (16, 64) for arch in SHARED_KIB]
ALL += [(dim, width, arch, {}) for dim in (64, 80, 96, 256) for width, arch in ((16, 89), (64, 90))]
ALL += [(80, 64, 89, {"half": 16}), (128, 64, 120, {"probes": 9}), (128, 16, 80, {"probes": 30})]


@pytest.mark.parametrize(("dim", "width", "arch", "changes"), ALL)
def test_fits(tmp_path, dim, width, arch, changes):
    binary = compiled(dim, width, arch, **changes)
    used = resources(binary, tmp_path)
    assert used["STACK"] == used["LOCAL"] == 0, "registers spill"
    assert binary.metadata.shared <= SHARED_KIB[arch] * 1024


def test_products_keep_float32():
    code = compiled(128, 64, 90).asm["ptx"]
    assert "mma" not in code
    assert "tf32" not in code
