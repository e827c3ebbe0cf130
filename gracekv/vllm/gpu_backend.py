"""vLLM's attention for NVIDIA GPUs, with contexts in addition to its pages. Imports vLLM.

For the two backends that vLLM chooses by default on most GPUs. The kernel reads pages by their
strides, which works for both. Merging with the stock result by log-sum-exp would need internals of
each, and the pages of a question and its answer are short compared to a context.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl

from gracekv.vllm.context_attention import ContextAttention, LayerCall, Step
from gracekv.vllm.context_batch import ContextBatch
from gracekv.vllm.serving import has_store
from gracekv.vllm.triton_attention import attend, plan_gpu_batch, warm_up


class GPUContextAttention(ContextAttention):
    """Attention over contexts with the Triton kernels."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._has_store = has_store(get_current_vllm_config_or_none())

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Whether the stock kernel may quantise its output: not if contexts' rows come later."""
        stock: Any = super()
        return not self._has_store and bool(stock.fused_output_quant_supported(quant_key))

    def plan(self, running: Step, metadata: Any, kv_cache: Tensor) -> ContextBatch:
        return plan_gpu_batch(running.asking, metadata, self.group, kv_cache)

    def attend(self, batch: ContextBatch, call: LayerCall) -> None:
        attend(batch, extract_layer_index(call.layer.layer_name), call, self.scale)

    def warm_up(self, kv_cache: Tensor) -> None:
        warm_up(kv_cache, self.group)


class GraceFlashAttentionImpl(GPUContextAttention, FlashAttentionImpl):  # type: ignore[misc]
    """FlashAttention with contexts."""


class GraceFlashAttentionBackend(FlashAttentionBackend):  # type: ignore[misc]
    """The stock backend with another `forward`."""

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        return GraceFlashAttentionImpl


class GraceTritonAttentionImpl(GPUContextAttention, TritonAttentionImpl):  # type: ignore[misc]
    """vLLM's Triton attention with contexts."""


class GraceTritonAttentionBackend(TritonAttentionBackend):  # type: ignore[misc]
    """The stock backend with another `forward`."""

    @staticmethod
    def get_impl_cls() -> type[TritonAttentionImpl]:
        return GraceTritonAttentionImpl
