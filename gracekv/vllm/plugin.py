"""The entry point of vLLM's plugin, called in each of its processes."""

from __future__ import annotations

import warnings

TESTED = ("0.32.0",)
"""Versions of vLLM that the tests run against."""


def register() -> None:
    """Put attention over contexts in the place of vLLM's attention for CPUs.

    Without a context it does what the stock one does. Warns about versions that are not tested.
    """
    import vllm
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from gracekv.vllm.serving import BACKEND

    if vllm.__version__.partition("+")[0] not in TESTED:
        warnings.warn(
            f"gracekv serves contexts in vLLM {', '.join(TESTED)}; this is {vllm.__version__}, "
            f"which is not tested.",
            stacklevel=2,
        )
    register_backend(AttentionBackendEnum.CPU_ATTN, BACKEND)
    from vllm.v1.engine import input_processor

    from gracekv.vllm import admission

    admission.install(input_processor.InputProcessor)
