"""These tests run kernels in Triton's interpreter, so they need a separate process.

The interpreter is chosen when triton is first imported: TRITON_INTERPRET=1 pytest
tests/triton_kernels.
"""

import os

import pytest
import torch

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


@pytest.fixture(autouse=True, scope="session")
def language_patched_once():
    """Triton's interpreter patches the language for a launch, and again for every device function
    that the kernel calls; patching once saves a quarter of the time."""
    language = pytest.importorskip("triton.language")
    from triton.runtime import interpreter

    patch = getattr(interpreter, "_patch_lang", None)
    modules = (language, language.core)

    def patch_once(fn):
        used = [x for x in fn.__globals__.values() if any(x is module for module in modules)]
        if any(language.core.is_builtin(module.load) for module in used):
            return patch(fn)
        return interpreter._LangPatchScope()

    with pytest.MonkeyPatch.context() as context:
        if patch is not None and hasattr(interpreter, "_LangPatchScope"):
            context.setattr(interpreter, "_patch_lang", patch_once)
        yield


@pytest.fixture(autouse=True)
def poisoned_workspace():
    """Fill `torch.empty` with NaN, so that reading an unwritten place shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
