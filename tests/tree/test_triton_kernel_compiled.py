"""The Triton distortion kernel compiled for real GPUs, without one: registers and memory suffice.

The paper's 64 probes run on every architecture; other head dimensions, partial rotation and few
probes on one roomy and one small architecture.
"""

import pytest

from gracekv.kernels.device import interpreted
from gracekv.tree.engines.triton import constants

triton = pytest.importorskip("triton")
if interpreted():
    pytest.skip("the interpreter does not compile", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from gracekv.tree.engines.triton_kernel import interval_costs  # noqa: E402
from support.covering import covering  # noqa: E402
from support.cubin import resources  # noqa: E402

# Shared memory that one block may use, in KiB (CUDA programming guide, compute capabilities).
SHARED_KIB = {80: 163, 89: 99, 90: 227, 120: 99}
INDICES = ("tree", "begin", "length", "slot_start", "first_probe")
COUNTS = ("tokens", "nodes", "width", "slots", "region_start")
NUMBERS = ("lambda_z", "lambda_m", "epsilon", "uniform_base", "rule_epsilon")


def compiled(dim, arch, *, probes=64, half=None):
    fixed = constants(probes, dim, dim // 2 if half is None else half, multiplicity=True)
    options = {"num_warps": fixed.pop("num_warps")}
    signature, values, attributes = {}, {}, {}
    for index, name in enumerate(interval_costs.arg_names):
        if name in fixed:
            signature[name], values[(index,)] = "constexpr", fixed[name]
        elif name in COUNTS or name in NUMBERS:
            signature[name] = "i32" if name in COUNTS else "fp32"
        else:
            signature[name] = "*i64" if name in INDICES else "*fp32"
            if not interval_costs.params[index].do_not_specialize_on_alignment:
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(interval_costs, signature, values, attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


ALL = [(128, arch, {}) for arch in SHARED_KIB]
ALL += [(dim, arch, {}) for dim in (64, 80, 96, 256) for arch in (89, 90)]
ALL += [(80, 89, {"half": 16}), (128, 120, {"probes": 9}), (128, 80, {"probes": 30})]


@pytest.mark.parametrize(("dim", "arch", "changes"), covering(ALL))
def test_fits(tmp_path, dim, arch, changes):
    binary = compiled(dim, arch, **changes)
    used = resources(binary, tmp_path)
    assert used["STACK"] == used["LOCAL"] == 0, "registers spill"
    assert binary.metadata.shared <= SHARED_KIB[arch] * 1024


def test_products_keep_float32():
    code = compiled(128, 90).asm["ptx"]
    assert "mma" not in code
    assert "tf32" not in code
    # A thread adds what it holds before it asks others; no warp waits for another.
    assert code.count("shfl") <= 64
