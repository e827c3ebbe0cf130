"""Which folder may import which (the architecture's table), and what `import gracekv` avoids."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from support.fresh_python import fresh_python

PACKAGE = Path(__file__).parents[1] / "gracekv"

# Every folder may use itself and the common modules and, in addition, these folders of gracekv.
COMMON = {"gracekv.errors", "gracekv.kernels", "gracekv.registry", "gracekv.undo"}
KNOWS = {
    "registry": "",
    "kernels": "",
    "distributed": "",
    "prefill": "distributed",
    "segment": "prefill",
    "value": "distributed prefill",
    "tree": "distributed prefill segment value",
    "allocate": "distributed tree.base",
    # The packer reads nodes and merges their tokens by the trees' own rule.
    "cache": "allocate distributed files prefill tree.base tree.merge value.column_sums",
    "fit": "cache.base cache.quantised prefill value",
    "decode": "allocate cache.base distributed fit prefill.chat_text",
    "precision": "allocate cache.base cache.coded cache.entries cache.quantised "
    "distributed prefill",
    "backends": "cache.base cache.coded cache.entries cache.quantised",
    "pipeline": "allocate backends cache decode distributed files fit precision prefill recipes "
    "segment tree value",
    "recipes": "",
    # Nothing below knows the report; a result is recognised by its attributes, not its class.
    "report": "allocate cache decode distributed files pipeline prefill recipes value",
    # A result writes its report when asked; nothing else of hf knows it.
    "hf": "allocate backends cache decode distributed files pipeline precision prefill recipes "
    "report segment value",
    # Evaluations use gracekv like its users, without internals of a stage.
    "evaluate": "allocate cache compress decode files hf pipeline prefill recipes",
    "lm_eval": "allocate evaluate.answers hf pipeline prefill",
    "vllm": "allocate backends cache decode distributed files hf pipeline prefill recipes",
    "cli": "BatchResult CompressionResult allocate cache.serialization evaluate files hf pipeline "
    "recipes report vllm",
    "testing": "allocate backends cache.base decode pipeline precision prefill segment tree.base "
    "value",
}
ALGORITHMS = "segment value tree allocate cache precision backends kernels recipes"
HEAVY = {"numba", "transformers", "triton", "matplotlib", "accelerate"}


def imported(path: Path) -> set[str]:
    """Dotted names that the file imports anywhere, including inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import on line {node.lineno}"
            names.add(node.module)
            # `from gracekv import hf` names a module just as `import gracekv.hf` does.
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def strangers(names: set[str], allowed: set[str]) -> set[str]:
    """Imports from gracekv that are in none of the allowed modules."""
    ours = {name for name in names if name.startswith("gracekv.")}
    return {n for n in ours if not any(n == a or n.startswith(a + ".") for a in allowed)}


@pytest.mark.parametrize("folder", [x.parent.name for x in sorted(PACKAGE.glob("*/__init__.py"))])
def test_a_folder_imports_only_what_it_may_know(folder):
    allowed = COMMON | {f"gracekv.{name}" for name in [folder, *KNOWS[folder].split()]}
    for path in sorted((PACKAGE / folder).rglob("*.py")):
        assert not strangers(imported(path), allowed), path.name


@pytest.mark.parametrize("folder", ALGORITHMS.split())
def test_algorithms_do_not_know_the_model_library(folder):
    for path in sorted((PACKAGE / folder).rglob("*.py")):
        tops = {name.partition(".")[0] for name in imported(path)}
        # A kernel may use its compiler if it lives in a folder for kernels.
        allowed = {(home, "triton"): "triton" for home in ("backends", "kernels", "tree")}
        homes = ("allocate", "backends", "kernels", "segment", "tree")
        allowed |= {(home, "numba"): "numba" for home in homes}
        # Helpers of the compiled kernels are named after what they do.
        helpers = ("cap", "exponential", "intrinsics", "matmul", "precision", "threads", "vectors")
        allowed |= {("kernels", word): "numba" for word in helpers}
        mine = {allowed.get((folder, word)) for word in path.stem.split("_")}
        assert not tops & (HEAVY - mine), path.name


def import_graph(package: Path) -> dict[str, set[str]]:
    """Each module of `package`, with the modules of the package that it imports at import time.

    Imports under `TYPE_CHECKING` count, too; imports inside functions do not.
    """
    files = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        files[".".join(parts).removesuffix(".__init__")] = path
    graph = {}
    for name, path in files.items():
        graph[name] = set()
        pending = list(ast.parse(path.read_text(encoding="utf-8")).body)
        while pending:
            node = pending.pop()
            if isinstance(node, ast.Import):
                graph[name] |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                # `from package import module` needs the module, other names need the package.
                graph[name] |= inner & files.keys() or {node.module}
            elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                pending += ast.iter_child_nodes(node)
        graph[name] &= files.keys() - {name}
    return graph


def test_no_import_cycles():
    # Raises `CycleError`, which names the modules of a cycle.
    TopologicalSorter(import_graph(PACKAGE)).prepare()


def test_reports_read_results_and_never_the_reverse():
    # `result.report` imports only the page's writer, and only when it is called.
    readers = {
        name
        for name, known in import_graph(PACKAGE).items()
        if any(f"{module}.".startswith("gracekv.report.") for module in known)
    }
    others = {name for name in readers if not name.startswith("gracekv.report")}
    assert others == {"gracekv", "gracekv.cli.demo"}


IMPORTS = """
import random, sys, warnings, numpy, torch

def state():
    return {
        "default dtype": torch.get_default_dtype(), "default device": torch.get_default_device(),
        "threads": torch.get_num_threads(), "grad": torch.is_grad_enabled(),
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "torch rng": torch.get_rng_state().tolist(), "python rng": random.getstate(),
        "numpy rng": numpy.random.get_state()[1].tolist(), "filters": list(warnings.filters),
    }

def changed():
    global before
    last, before = before, state()
    return [name for name in before if before[name] != last[name]]

before = state()
import gracekv, gracekv.pipeline, gracekv.vllm
print(sorted(heavy & set(sys.modules)), "report" in dir(gracekv), changed())
gracekv.strategies()
print(changed())
warnings.simplefilter("ignore"); torch.rand(1)
print(changed())
"""


def test_import_is_light_and_with_all_strategies_changes_nothing_global():
    heavy = HEAVY | {"typer", "rich", "vllm", "gracekv.hf"}
    told = fresh_python("-c", f"heavy = {heavy!r}\n{IMPORTS}", cwd=PACKAGE.parent).stdout
    # The last line shows that a change is noticed.
    assert told.splitlines() == ["[] True []", "[]", "['torch rng', 'filters']"]
