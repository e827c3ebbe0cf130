"""The Triton distortion kernel compiled for real GPUs, without one: registers and memory suffice.

Compiles the paper's 64 probes for every architecture; other head dimensions, partial rotation and
few probes for one large and one small architecture.
"""

import pytest

from gracekv.tree.engines.triton import constants

pytest.importorskip("support.cubin")  # skips if kernels cannot be compiled

from gracekv.tree.engines.triton_kernel import interval_costs
from support.covering import covering
from support.cubin import SHARED_KIB, check_fits, compiled

INDICES = ("tree", "begin", "length", "slot_start", "first_probe")
COUNTS = ("tokens", "nodes", "width", "slots", "region_start")
NUMBERS = ("lambda_z", "lambda_m", "epsilon", "uniform_base", "rule_epsilon")


def costs_kernel(dim, arch, *, probes=64, half=None):
    fixed = constants(probes, dim, dim // 2 if half is None else half, multiplicity=True)
    options = {"num_warps": fixed.pop("num_warps")}
    names = [x for x in interval_costs.arg_names if x not in (*fixed, *COUNTS, *NUMBERS)]
    pointers = {name: "*i64" if name in INDICES else "*fp32" for name in names}
    unaligned = [x.name for x in interval_costs.params if x.do_not_specialize_on_alignment]
    return compiled(interval_costs, pointers, NUMBERS, fixed, arch, unaligned, **options)


ALL = [(128, arch, {}) for arch in SHARED_KIB]
ALL += [(dim, arch, {}) for dim in (64, 80, 96, 256) for arch in (89, 90)]
ALL += [(80, 89, {"half": 16}), (128, 120, {"probes": 9}), (128, 80, {"probes": 30})]


@pytest.mark.parametrize(("dim", "arch", "changes"), covering(ALL))
def test_fits(tmp_path, dim, arch, changes):
    check_fits(costs_kernel(dim, arch, **changes), tmp_path, arch)


def test_products_keep_float32():
    code = costs_kernel(128, 90).asm["ptx"]
    assert "mma" not in code
    assert "tf32" not in code
    # A thread sums its own numbers before it exchanges sums; no warp waits for another.
    assert code.count("shfl") <= 64
