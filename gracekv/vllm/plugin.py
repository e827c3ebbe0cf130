"""The entry point of vLLM's plugin, which vLLM calls in each of its processes."""

from __future__ import annotations

import warnings

TESTED = ("0.32.0", "0.33.0")
"""Versions of vLLM that the tests ran against; docs/vllm.md says how."""


def register() -> None:
    """Replace vLLM's attention by attention over contexts, on CPUs and NVIDIA GPUs.

    Without a context, it computes the same as the stock one. On other platforms vLLM keeps its
    attention, and an engine with a store does not start. Warns about untested versions, and changes
    nothing in versions that lack what contexts need.
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
        from vllm.v1.core.sched.output import KVConnectorBlockState
        from vllm.v1.engine.input_processor import InputProcessor
        from vllm.v1.engine.output_processor import OutputProcessor

        from gracekv.vllm import admission
        from gracekv.vllm.serving import replacements

        if not hasattr(KVConnectorBlockState, "get_block_ids"):
            raise ImportError("its scheduler does not pass connectors the blocks of requests")
        admission.wrap(InputProcessor, admission.process_inputs)
        admission.wrap(OutputProcessor, admission.process_outputs)
        for request in (ChatCompletionRequest, CompletionRequest):
            admission.wrap(request, admission.to_beam_search_params)
        for name, path in replacements().items():
            register_backend(AttentionBackendEnum[name], path)
    except (ImportError, AttributeError) as error:
        warnings.warn(
            f"gracekv cannot serve contexts in vLLM {vllm.__version__}: {error}.", stacklevel=2
        )
