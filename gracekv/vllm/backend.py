"""vLLM's attention for CPUs, with contexts in addition to its pages. Imports vLLM."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from gracekv.errors import BackendUnavailableError
from gracekv.vllm import attention
from gracekv.vllm.attention import PageLayout, find_layout
from gracekv.vllm.context_attention import ContextAttention, LayerCall, Step
from gracekv.vllm.context_batch import ContextBatch, last_pages, plan_batch
from gracekv.vllm.numba_kernel import work_kernel


class GraceCPUAttentionImpl(ContextAttention, CPUAttentionBackendImpl):  # type: ignore[misc]
    """Attention over contexts with the compiled kernel; finds the layout of pages first."""

    _layout: PageLayout | None = None

    def plan(self, running: Step, metadata: Any, kv_cache: Tensor) -> ContextBatch | None:
        there = last_pages(metadata, kv_cache.shape[2]).tolist()
        asking = {block: running.asking[block] for block in there if block in running.asking}
        if not asking:
            return None
        return plan_batch(asking, metadata, self.group, kv_cache, attention.DIVISION)

    def attend(self, batch: ContextBatch, call: LayerCall) -> None:
        if self._layout is None:
            self._layout = self._find_layout(call.layer, call.kv_cache)
        number = extract_layer_index(call.layer.layer_name)
        attention.attend(batch, number, call, self._layout, self.scale)

    def warm_up(self, kv_cache: Tensor) -> None:
        work_kernel(kv_cache.dtype)

    def _find_layout(self, layer: Any, kv_cache: Tensor) -> PageLayout:
        if kv_cache.stride()[2:] != (kv_cache.shape[3], 1):
            raise BackendUnavailableError(
                f"vLLM's pages have strides {kv_cache.stride()}; contexts need each head's part of "
                f"a block to be contiguous, as in the CPU backend of vLLM 0.32."
            )

        def write(keys: Tensor, values: Tensor, page: Tensor) -> None:
            self.do_kv_cache_update(layer, keys, values, page, torch.arange(kv_cache.shape[2]))

        return find_layout(write, kv_cache.new_zeros(1, *kv_cache.shape[1:]))


class GraceCPUAttentionBackend(CPUAttentionBackend):  # type: ignore[misc]
    """The stock backend with another `forward`."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return GraceCPUAttentionImpl
