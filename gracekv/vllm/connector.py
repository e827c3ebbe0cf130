"""`GraceConnector`: vLLM's KV connector for contexts. Imports vLLM."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.parallel_state import get_tp_group
from vllm.platforms import current_platform

from gracekv.distributed.exchange import GlooExchange
from gracekv.distributed.sharding import TIMEOUT, HeadShard
from gracekv.vllm.compressing import Compressor
from gracekv.vllm.context_attention import Asking, Step, set_step
from gracekv.vllm.jobs import refused
from gracekv.vllm.scheduling import SchedulerSide, StepContexts, WorkerReport
from gracekv.vllm.serving import attention_layers, check_attention, check_serving, open_store


class GraceConnector(SchedulerSide, KVConnectorBase_V1):  # type: ignore[misc]
    """Gives requests their contexts by name, in addition to vLLM's pages.

    The scheduler reads a request's `kv_transfer_params={"gracekv": name}` and salts the hashes of
    its pages with the context, so that prefix caching never mixes contexts. Each worker loads a
    context once, before the first request about it begins. Attention layers record prompts that
    become contexts, and a thread of the worker compresses them.

    A request whose context cannot be used ends with an error; all others continue.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_serving(vllm_config, kv_cache_config)
        rank = device = None
        if role == KVConnectorRole.WORKER:
            rank = get_tp_group().rank_in_group
            device = torch.device(current_platform.device_type)
        store = open_store(vllm_config, rank=rank, device=device)
        self.begin(store, vllm_config.parallel_config.tensor_parallel_size)
        # In a worker: replies of contexts that the step opens, by digest.
        self._opened: dict[str, dict[str, Any] | None] = {}
        if device is not None:
            # With a process group separate from vLLM's.
            group = get_tp_group()
            exchange = GlooExchange(group.ranks, TIMEOUT) if group.world_size > 1 else None
            heads = HeadShard(group.rank_in_group, group.world_size, exchange)
            self._compressor = Compressor(vllm_config, store, device, heads)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return True: a graph of a whole step calls no Python, so it would skip contexts."""
        return True

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if layers := attention_layers(self._vllm_config):
            check_attention(layers, self._vllm_config.cache_config.block_size)
            # Compiling takes seconds once per machine; no request should wait for it.
            layers[0].impl.warm_up(layers[0].kv_cache)

    def bind_connector_metadata(self, connector_metadata: StepContexts) -> None:
        super().bind_connector_metadata(connector_metadata)
        chunk, current = connector_metadata.chunk, connector_metadata.current
        self._store.retain(connector_metadata.used)
        recording = self._compressor.begin(chunk, current, connector_metadata.made)
        for name, digest in connector_metadata.forgotten.items():
            self._store.forget(name, digest)
        self._opened = {}
        for digest, name in connector_metadata.opening.items():
            self._opened[digest] = None
            try:
                self._store.load(name, digest)
            except Exception as error:
                self._opened[digest] = refused(error)
        load, named = self._store.load, connector_metadata.named.items()
        asking = {block: Asking(load(name, digest), n) for block, (name, digest, n) in named}
        reading = (recording, chunk) if recording and chunk else None
        set_step(Step(asking, reading) if asking or reading else None)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        set_step(None)

    def build_connector_worker_meta(self) -> WorkerReport | None:
        recorded = self._compressor.recorded
        outcome = self._compressor.outcome(self._get_connector_metadata().idle)
        dropped = self._store.dropped()
        if not (outcome or dropped or self._opened or recorded):
            return None
        return WorkerReport([outcome] if outcome else [], dropped, self._opened, recorded)

    def shutdown(self) -> None:
        set_step(None)
        if self.role == KVConnectorRole.WORKER:
            self._compressor.shutdown()

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: contexts never go into pages, and pages are never saved."""

    wait_for_layer_load = save_kv_layer = wait_for_save = start_load_kv
