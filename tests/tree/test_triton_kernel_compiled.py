"""The Triton distortion kernel compiled for real GPUs, without one: registers and memory suffice.

The paper's 64 probes run on every architecture; other head dimensions, partial rotation and few
probes on one roomy and one small architecture.
"""

import pytest

from gracekv.kernels.device import interpreted
from gracekv.tree.engines.triton import block_sizes, padded_size

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
INDICES = ("head", "first", "length", "first_probe")
COUNTS = ("tokens", "nodes", "width", "region_start", "features", "half_features")
NUMBERS = ("lambda_z", "lambda_m", "epsilon", "uniform_base", "rule_epsilon")


def compiled(dim, width, arch, *, probes=64, half=None):
    sizes = block_sizes(width, probes)
    constants = {
        "P": probes,
        "D": dim,
        "HALF": dim // 2 if half is None else half,
        "MULTIPLICITY": True,
        "BLOCK_D": padded_size(dim),
        **{name: size for name, size in sizes.items() if name.startswith("BLOCK_")},
    }
    signature, values, attributes = {}, {}, {}
    for index, name in enumerate(interval_costs.arg_names):
        if name in constants:
            signature[name], values[(index,)] = "constexpr", constants[name]
        elif name in COUNTS or name in NUMBERS:
            signature[name] = "i32" if name in COUNTS else "fp32"
        else:
            signature[name] = "*i64" if name in INDICES else "*fp32"
            attributes[(index,)] = [["tt.divisibility", 16]]
    options = {name: sizes[name] for name in ("num_warps", "num_stages")}
    options["enable_fp_fusion"] = True
    source = ASTSource(interval_costs, signature, values, attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


ALL = [(128, width, arch, {}) for width in (16, 64) for arch in SHARED_KIB]
ALL += [(dim, width, arch, {}) for dim in (64, 80, 96, 256) for width, arch in ((16, 89), (64, 90))]
ALL += [(80, 64, 89, {"half": 16}), (128, 64, 120, {"probes": 9}), (128, 16, 80, {"probes": 30})]


@pytest.mark.parametrize(("dim", "width", "arch", "changes"), covering(ALL))
def test_fits(tmp_path, dim, width, arch, changes):
    binary = compiled(dim, width, arch, **changes)
    used = resources(binary, tmp_path)
    assert used["STACK"] == used["LOCAL"] == 0, "registers spill"
    assert binary.metadata.shared <= SHARED_KIB[arch] * 1024


def test_products_keep_float32():
    code = compiled(128, 64, 90).asm["ptx"]
    assert "mma" not in code
    assert "tf32" not in code
