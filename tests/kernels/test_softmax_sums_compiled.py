"""The Triton kernels of softmax columns compiled for real GPUs, without one."""

import pytest

pytest.importorskip("support.cubin")  # skips if kernels cannot be compiled

from gracekv.kernels import bytes_triton, softmax_sums_triton
from support.covering import covering
from support.cubin import BF16, F16, F32, TYPES, check_fits, compiled

# Sinks are views of one number, or rows of any length.
UNALIGNED = ("sink_head_stride", "sink_row_stride")
KERNELS = [softmax_sums_triton.row_logsumexp, softmax_sums_triton.reduce_columns]


def compiled_columns(kernel, dim, dtype, arch, parts, maximum=False):
    sizes = softmax_sums_triton.block_sizes(dim, dtype, divmod(arch, 10), count=1000)
    sizes = sizes[KERNELS.index(kernel)]
    options = {name: sizes.pop(name) for name in ("num_warps", "num_stages")}
    constants = {"GROUP": 7, "D": dim, "PARTS": parts, "SPLITS": 4} | sizes
    if kernel is softmax_sums_triton.reduce_columns:
        constants |= {"MAXIMUM": maximum, "CHUNK": 1024}
    pointers = {"queries": TYPES[dtype], "keys": TYPES[dtype], "seen": "*i64"}
    pointers |= dict.fromkeys(("lse", "weights", "sinks", "output"), "*fp32")
    return compiled(kernel, pointers, {"power", "scale"}, constants, arch, UNALIGNED, **options)


ALL = [(128, dtype, arch) for dtype in (BF16, F32) for arch in (80, 90, 120)]
ALL += [(64, BF16, 120), (80, F16, 90), (96, BF16, 80), (256, BF16, 120), (256, F32, 90)]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
@pytest.mark.parametrize(("dim", "dtype", "arch"), covering(ALL))
@pytest.mark.parametrize("rotated", [True, False])
def test_fits(tmp_path, kernel, dim, dtype, arch, rotated):
    # Rotated queries come in float32 and are split; others have the model's dtype.
    parts = 2 if rotated and dtype != F32 else 1
    binary = compiled_columns(kernel, dim, dtype, arch, parts, maximum=not rotated)
    check_fits(binary, tmp_path, arch)
    # Half precision runs on tensor cores; float32 stays float32.
    code = binary.asm["ptx"]
    assert ("mma" in code) == (dtype != F32)
    assert "tf32" not in code


def test_bytes_are_read_from_anywhere():
    pointers = {"addresses": "*i64", "found": "*u8"}
    binary = compiled(bytes_triton.read_bytes, pointers, (), {"BLOCK": 1024}, 90)
    assert "ld.global.b8" in binary.asm["ptx"]
