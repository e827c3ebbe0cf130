"""The entry point of vLLM's plugin, called in each of its processes."""

from __future__ import annotations

import warnings

TESTED = ("0.32.0",)
"""Versions of vLLM that the tests run against."""


def register() -> None:
    """Put attention over contexts in the place of vLLM's, for CPUs or for NVIDIA GPUs.

    Without a context it does what the stock one does. On other platforms vLLM's attention stays,
    and an engine with a store does not start. Warns about versions that are not tested, and leaves
    one alone that lacks what contexts need.
    """
    import vllm

    if vllm.__version__.partition("+")[0] not in TESTED:
        warnings.warn(
            f"gracekv serves contexts in vLLM {', '.join(TESTED)}; this is {vllm.__version__}, "
            f"which is not tested.",
            stacklevel=2,
        )
    try:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
        from vllm.v1.engine.input_processor import InputProcessor
        from vllm.v1.engine.output_processor import OutputProcessor

        from gracekv.vllm import admission
        from gracekv.vllm.serving import replacements

        admission.install(InputProcessor)
        admission.say_why(OutputProcessor)
        for request in (ChatCompletionRequest, CompletionRequest):
            admission.refuse_beam_search(request)
        for name, path in replacements().items():
            register_backend(AttentionBackendEnum[name], path)
    except (ImportError, AttributeError) as error:
        warnings.warn(
            f"gracekv cannot serve contexts in vLLM {vllm.__version__}: {error}.", stacklevel=2
        )
