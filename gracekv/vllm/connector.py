"""`GraceConnector`: tells vLLM's workers which request has which context. Imports vLLM."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform

from gracekv.vllm.compressing import Compressor
from gracekv.vllm.context_attention import Asking, Reading, begin_step, end_step
from gracekv.vllm.equal_shares import write_entries
from gracekv.vllm.scheduling import SchedulerSide, StepContexts, WorkerReport
from gracekv.vllm.serving import (
    LOG,
    attention_layers,
    check_pages,
    check_serving,
    open_store,
    refusal,
)
from gracekv.vllm.stored_context import StoredContext


class GraceConnector(SchedulerSide, KVConnectorBase_V1):  # type: ignore[misc]
    """Contexts of requests, by name; only those with equal shares go into vLLM's pages.

    In the scheduler it reads `kv_transfer_params={"gracekv": name}` of a request, and salts the
    hashes of its pages with the context, so that vLLM's prefix caching never mixes contexts. In
    each worker it loads contexts, shared by all requests, before the step that needs them. Equal
    shares are announced as tokens that are computed elsewhere. Prompts that shall become contexts
    are recorded by the attention layers, and compressed in a thread of the worker.

    A request whose context cannot be used ends with an error; all others go on.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_serving(vllm_config, kv_cache_config)
        rank = device = None
        if role == KVConnectorRole.WORKER:
            rank = get_tensor_model_parallel_rank()
            device = torch.device(current_platform.device_type)
        store = open_store(vllm_config, rank=rank, device=device)
        self.begin(store, vllm_config.cache_config.block_size)
        # In a worker: blocks of requests whose context could not be loaded.
        self._failed_blocks: set[int] = set()
        if device is not None:
            self._compressor = Compressor(vllm_config, store, device)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Yes: a graph of a whole step calls no Python, so it would skip contexts."""
        return True

    # In a worker.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        layers = attention_layers(self._vllm_config)
        if self._store.ragged and layers:
            check_pages(layers, self._page)
            # Compiling takes seconds once on a machine; no request should wait for it.
            impl = layers[0].impl
            impl.warm_up(layers[0].kv_cache, impl.num_heads // impl.num_kv_heads)

    def bind_connector_metadata(self, connector_metadata: StepContexts) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._store.retain(connector_metadata.used)
        for name in connector_metadata.forgotten:
            self._store.forget(name)
        asking: dict[int, Asking] = {}
        digests = {digest for _, digest, _ in connector_metadata.named.values()}
        for block, (name, digest, tokens) in connector_metadata.named.items():
            context = self._load(name, digest, digests, [block])
            if context is not None:
                asking[block] = Asking(context, tokens)
        chunk = connector_metadata.chunk
        recording = self._compressor.begin(chunk, connector_metadata.current)
        reading = None
        if recording is not None and chunk is not None:
            reading = Reading(recording, chunk.block, chunk.start, chunk.count)
        begin_step(asking, reading)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        loads = self._get_connector_metadata().loads
        if not loads:
            return
        layers = attention_layers(self._vllm_config)
        by_number = {extract_layer_index(layer.layer_name): layer for layer in layers}
        digests = {load.digest for load in loads}
        for load in loads:
            blocks = load.blocks[load.first // self._page :]
            context = self._load(load.name, load.digest, digests, blocks)
            if context is not None:
                write_entries(context, load.first, load.blocks, self._page, by_number)

    def _load(
        self, name: str, digest: str, keep: set[str], blocks: list[int]
    ) -> StoredContext | None:
        """The context; None if it cannot be loaded, and then requests with `blocks` fail."""
        try:
            return self._store.load(name, digest, keep=keep)
        except Exception as error:
            LOG.error("Context %r cannot be loaded; its requests fail. %s", name, refusal(error))
            self._failed_blocks.update(blocks)
            return None

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        end_step()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        metadata = self._get_connector_metadata()
        return KVConnectorTransferResults(
            finished_recving=set(metadata.refused), failed_recving=set(metadata.refused)
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def build_connector_worker_meta(self) -> WorkerReport | None:
        outcome = self._compressor.outcome(self._get_connector_metadata().idle)
        dropped = self._store.dropped()
        return WorkerReport(outcome, dropped) if outcome or dropped else None

    def shutdown(self) -> None:
        end_step()
        if self.role == KVConnectorRole.WORKER:
            self._compressor.shutdown()

    # Nothing is saved, and nothing is loaded while the model runs.

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: pages [blocks, G, block, 2d] stay vLLM's."""

    def wait_for_save(self) -> None:
        """Nothing."""
