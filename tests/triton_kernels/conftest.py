"""These tests run kernels in Triton's interpreter, so they need a separate process.

The interpreter is chosen when triton is first imported: TRITON_INTERPRET=1 pytest
tests/triton_kernels.
"""

import dataclasses
import functools
import os

import pytest
import torch

from support.covering import LONG

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


@pytest.fixture(autouse=True, scope="session")
def quicker_interpreter():
    """Triton's interpreter patches the language for a launch, and again for every device function
    that the kernel calls; makes a table of types whenever it needs one; and computes with integers
    twice, to see overflows. All that takes half of the time; here it patches once and for all."""
    language = pytest.importorskip("triton.language")
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):  # an older version
        yield
        return
    builder, patch = interpreter.interpreter_builder, interpreter._patch_lang
    pointers = interpreter._get_np_dtype(language.pointer_type(language.int8))
    types, patched = functools.cache(interpreter._get_np_dtype), []

    @functools.cache
    def used(fn):
        names = fn.__globals__.values()
        return [x for x in (language, language.core) if any(x is made for made in names)]

    def patch_once(fn):
        if any(language.core.is_builtin(module.load) for module in used(fn)):
            patched.append(patch(fn))
        return interpreter._LangPatchScope()

    def type_of(kind):
        return pointers if isinstance(kind.scalar, language.pointer_type) else types(kind.scalar)

    with pytest.MonkeyPatch.context() as context:
        context.setattr(interpreter, "_patch_lang", patch_once)
        context.setattr(interpreter, "_get_np_dtype", type_of)
        quick = dataclasses.replace(builder.options, sanitize_overflow=bool(LONG))
        context.setattr(builder, "options", quick)
        yield
    for scope in reversed(patched):
        scope.restore()


@pytest.fixture(autouse=True)
def poisoned_workspace():
    """Fill `torch.empty` with NaN, so that reading an unwritten place shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
