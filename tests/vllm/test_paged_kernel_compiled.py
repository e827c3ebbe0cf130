"""The kernels over contexts and pages compiled for real GPUs, without one."""

import re

import pytest

from gracekv.backends.triton_tiles import padded_dim

pytest.importorskip("support.cubin")  # skips if kernels cannot be compiled

from gracekv.vllm import triton_kernel
from gracekv.vllm.triton_attention import unit_tile
from support.covering import covering
from support.cubin import BF16, F16, F32, SHARED_KIB, TYPES, check_fits, compiled

UNALIGNED = ("units", "addresses", "first_slot", "blocks", "blocks_row_stride")
CASES = [
    *((128, BF16, 1, 4, arch) for arch in SHARED_KIB),
    *((128, BF16, 64, 4, arch) for arch in SHARED_KIB),
    *((64, dtype, 1, 7, 89) for dtype in (F16, F32)),
    *((64, dtype, 64, 7, 90) for dtype in (F16, F32)), (80, F16, 1, 1, 80), (96, BF16, 32, 3, 90),
    (128, F32, 1, 8, 120), (256, BF16, 1, 2, 90), (256, BF16, 64, 2, 120),
]  # fmt: skip


def attention(dim, dtype, queries, group, arch):
    tile = unit_tile(dim, dtype, divmod(arch, 10), queries)
    pointers = dict.fromkeys(("query", "pages", "output"), TYPES[dtype])
    pointers |= dict.fromkeys(("part_output", "part_lse"), "*fp32")
    names = ("units", "addresses", "places", "positions", "rows", "first_slot")
    pointers |= dict.fromkeys(names, "*i64") | {"blocks": "*i32"}
    constants = {"GROUP": group, "D": dim, "BLOCK_D": padded_dim(dim), "BLOCK": 16, "UPCAST": False}
    constants |= {"BLOCK_M": tile.queries, "BLOCK_N": tile.keys, "PRECISION": tile.precision}
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    kernel = triton_kernel.attend_units
    return compiled(kernel, pointers, {"scale"}, constants, arch, UNALIGNED, **options)


@pytest.mark.parametrize(("dim", "dtype", "queries", "group", "arch"), covering(CASES))
def test_attention_fits(tmp_path, dim, dtype, queries, group, arch):
    check_fits(attention(dim, dtype, queries, group, arch), tmp_path, arch)


def test_entries_behind_addresses_are_read_16_bytes_at_a_time():
    """The compiler knows the alignment of addresses; otherwise it would read single numbers."""
    text = attention(128, BF16, 1, 4, 80).asm["ptx"]
    read = {int(x, 0) for x in re.findall(r"cp\.async\.c[ag]\S+ \[[^]]*\], \[[^]]*\], (\w+)", text)}
    assert read <= {16, 4}, read
    assert not re.findall(r"ld\.global\.b16", text)


@pytest.mark.parametrize(("dim", "arch"), [(80, 80), (128, 90), (256, 120)])
def test_merge_fits(tmp_path, dim, arch):
    pointers = dict.fromkeys(("part_output", "part_lse"), "*fp32") | {"output": "*bf16"}
    pointers |= dict.fromkeys(("places", "first_slot"), "*i64")
    constants = {"D": dim, "BLOCK_D": padded_dim(dim), "BLOCK_S": 2048 // padded_dim(dim)}
    binary = compiled(triton_kernel.merge_units, pointers, set(), constants, arch, UNALIGNED)
    check_fits(binary, tmp_path, arch)
