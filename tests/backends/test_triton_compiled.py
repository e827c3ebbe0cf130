"""The kernels compiled for GPUs, without one: at most a few bytes spill, and shared memory fits.

Compiles the table's decoding tile on every architecture, its larger query tiles on one large and
one small architecture, and each kind of mask and of merging once.
"""

import pytest

from gracekv.backends.triton_tiles import padded_dim, tiles

pytest.importorskip("support.cubin")  # skips if kernels cannot be compiled

from gracekv.backends import triton_codes_kernel, triton_merge_kernel, triton_split_kernel
from gracekv.kernels.block_queries_triton import block_sizes, turn_and_look_back
from support.covering import covering
from support.cubin import BF16, F16, F32, SHARED_KIB, TYPES, check_fits, compiled

MASK = ("mask_batch_stride", "mask_token_stride", "mask_key_stride")
# Bytes per thread: with a mask or a softcap, Triton 3.7, which torch 2.13 requires, spills two
# registers. Triton 3.9 spills none.
TWO_REGISTERS = 8
# Spills without either. The float32 tile takes every available register, and neighbouring sizes
# spill no less.
SPILLS = {
    (256, BF16, 1, 89): TWO_REGISTERS,
    (128, BF16, 32, 90): TWO_REGISTERS,
    (128, F32, 32, 89): 24,
    (128, F32, 32, 90): 32,
}


def constants_of(dim, tile):
    return {
        "D": dim, "BLOCK_D": padded_dim(dim), "BLOCK_M": tile.queries, "BLOCK_N": tile.keys,
        "PRECISION": tile.precision,
    }  # fmt: skip


def splits(kernel, pointers, constants, dim, tile, arch, unaligned=()):
    """The kernel that attends in splits, for a tile."""
    pointers |= dict.fromkeys(("bias", "part_output", "part_lse"), "*fp32")
    constants |= constants_of(dim, tile)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return compiled(kernel, pointers, {"scale", "softcap"}, constants, arch, unaligned, **options)


def split(dim, dtype, queries, arch, kind=triton_split_kernel.CAUSAL, *, capped=False, absent=()):
    tile = tiles(dim, dtype, divmod(arch, 10), queries)
    element = TYPES[dtype]
    mask = {0: element, 1: element, 2: "*i1", 3: "*fp32"}[kind.value]
    pointers = dict.fromkeys(("query", "keys", "values", "tail_keys", "tail_values"), element)
    pointers |= dict.fromkeys(("items", "item_first", "rows", "tail_length"), "*i64")
    pointers |= {"mask": mask}
    constants = {"KIND": kind.value, "CAPPED": capped} | dict.fromkeys(absent)
    return splits(triton_split_kernel.attend_splits, pointers, constants, dim, tile, arch, MASK)


def codes(dim, dtype, arch, bits, size):
    tile = tiles(dim, dtype, divmod(arch, 10), 1)
    half = "*fp16" if dtype == F32 else TYPES[dtype]
    pointers = dict.fromkeys(("key_scale", "key_zero", "value_scale", "value_zero"), half)
    pointers |= dict.fromkeys(("key_codes", "value_codes"), "*u8")
    pointers |= dict.fromkeys(("items", "item_first", "rows"), "*i64")
    pointers |= {"query": TYPES[dtype]}
    constants = {"BITS": bits, "SIZE": size, "CAPPED": True}
    return splits(triton_codes_kernel.attend_coded_splits, pointers, constants, dim, tile, arch)


CODED = [
    (64, BF16, 80, 8), (128, BF16, 80, 4), (128, BF16, 90, 8), (256, BF16, 90, 4),
    (128, F16, 120, 4), (64, F32, 120, 8), (128, F32, 90, 4), (80, BF16, 89, 8),
    (128, BF16, 90, 2),
]  # fmt: skip


@pytest.mark.parametrize(("dim", "dtype", "arch", "bits"), covering(CODED))
def test_split_of_codes_fits(tmp_path, dim, dtype, arch, bits):
    check_fits(codes(dim, dtype, arch, bits, 16 if dim == 80 else 32), tmp_path, arch)


DECODING = [
    (dim, dtype, 1, arch) for dim in (64, 128, 256) for dtype in (BF16, F32) for arch in SHARED_KIB
]
OTHER_DIMENSIONS = [(80, F16, 1, 90), (96, BF16, 1, 89), (32, F16, 1, 80), (20, F32, 1, 90)]
LARGER = [
    (dim, dtype, queries, arch)
    for dim, dtype, largest in [(64, BF16, 64), (128, BF16, 64), (256, BF16, 64), (64, F32, 64)]
    for queries in (32, largest)
    for arch in (89, 90)
]
LARGER += [(128, F32, 32, arch) for arch in (89, 90)]


@pytest.mark.parametrize(
    ("dim", "dtype", "queries", "arch"),
    covering(DECODING) + covering(OTHER_DIMENSIONS) + covering(LARGER),
)
def test_split_fits(tmp_path, dim, dtype, queries, arch):
    binary = split(dim, dtype, queries, arch)
    check_fits(binary, tmp_path, arch, SPILLS.get((dim, dtype, queries, arch), 0))


@pytest.mark.parametrize("kind", [triton_split_kernel.BOOLEAN, triton_split_kernel.ADDITIVE])
@pytest.mark.parametrize("arch", [89, 90])
def test_split_with_a_mask_fits(tmp_path, kind, arch):
    check_fits(split(128, BF16, 1, arch, kind), tmp_path, arch, TWO_REGISTERS)


@pytest.mark.parametrize(("dim", "arch"), [(128, 80), (256, 90), (64, 120)])
def test_split_of_capped_logits_fits(tmp_path, dim, arch):
    check_fits(split(dim, BF16, 1, arch, capped=True), tmp_path, arch, TWO_REGISTERS)


def test_split_without_rows_and_lengths_fits(tmp_path):
    check_fits(split(128, BF16, 1, 90, absent=("rows", "tail_length")), tmp_path, 90)


@pytest.mark.parametrize("arch", SHARED_KIB)
def test_two_decoding_programs_share_a_processor(arch):
    # Half of a multiprocessor's shared memory, less what each block reserves.
    assert split(128, BF16, 1, arch).metadata.shared <= (SHARED_KIB[arch] / 2 - 1) * 1024


@pytest.mark.parametrize(("dim", "arch", "absent"), [
    (64, 80, ()), (128, 90, ("rows", "sink_logits")), (256, 120, ()),
])  # fmt: skip
def test_merge_fits(tmp_path, dim, arch, absent):
    pointers = dict.fromkeys(("part_output", "part_lse", "sink_logits"), "*fp32")
    pointers |= {"output": "*bf16", "row_first": "*i64", "rows": "*i64"}
    constants = {"D": dim, "BLOCK_D": dim, "BLOCK_S": 2048 // dim} | dict.fromkeys(absent)
    binary = compiled(triton_merge_kernel.merge_splits, pointers, set(), constants, arch)
    check_fits(binary, tmp_path, arch)


@pytest.mark.parametrize(("dim", "dtype"), [(128, BF16), (128, F32), (264, BF16)])
def test_queries_of_a_block_fit(tmp_path, dim, dtype):
    constants = block_sizes(dtype) | {"GROUP": 7, "D": dim, "UPCAST": False}
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    constants |= {"ROTARY": 128, "PARTNER": 64, "SHARED": 1}
    pointers = dict.fromkeys(("cos", "sin", "moved", "lse"), "*fp32")
    pointers |= dict.fromkeys(("queries", "keys"), TYPES[dtype])
    binary = compiled(turn_and_look_back, pointers, {"scale"}, constants, 90, **options)
    check_fits(binary, tmp_path, 90)
    code = binary.asm["ptx"]
    assert ["mma" in code, "tf32" in code] == [dtype != F32, False]
