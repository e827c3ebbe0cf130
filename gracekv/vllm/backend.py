"""vLLM's attention for CPUs, with contexts beside its pages. Imports vLLM."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from gracekv.errors import BackendUnavailableError
from gracekv.vllm import step
from gracekv.vllm.attention import attend
from gracekv.vllm.page_layout import PageLayout, find_layout


class GraceCPUAttentionBackend(CPUAttentionBackend):  # type: ignore[misc]
    """The stock backend with another `forward`."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return GraceCPUAttentionImpl


class GraceCPUAttentionImpl(CPUAttentionBackendImpl):  # type: ignore[misc]
    """Stock attention for all tokens, and attention over context and pages for those that have one.

    Keys and values are written as ever, so pages hold question and answer, and what moves or drops
    pages needs no care.
    """

    _layout: PageLayout | None = None

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        running = None if attn_metadata is None else step.current()
        batch = None
        if running is not None:
            batch = running.batch(attn_metadata, self.num_queries_per_kv)
        if batch is None or not batch.covers_all:
            output = super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale,
                output_block_scale,
            )  # fmt: skip
        if batch is not None:
            if self._layout is None:
                self._layout = self._find_layout(layer, kv_cache)
            mixed = attend(
                batch,
                extract_layer_index(layer.layer_name),
                query.view(-1, self.num_heads, self.head_size),
                kv_cache,
                attn_metadata.block_table,
                self._layout,
                self.scale,
            )
            output.view(-1, self.num_heads, self.head_size)[batch.tokens] = mixed
        return output

    def _find_layout(self, layer: Any, kv_cache: Tensor) -> PageLayout:
        inner = kv_cache.stride()[2:]
        if inner != (kv_cache.shape[3], 1):
            raise BackendUnavailableError(
                f"vLLM's pages have strides {kv_cache.stride()}; contexts need each head's part of "
                f"a block in one piece, as the CPU backend of vLLM 0.32 has it."
            )
        slots = torch.arange(kv_cache.shape[2])

        def write(keys: Tensor, values: Tensor, page: Tensor) -> None:
            self.do_kv_cache_update(layer, keys, values, page, slots)

        return find_layout(write, kv_cache.new_zeros(1, *kv_cache.shape[1:]))
