"""`GraceConnector`: tells vLLM's workers which request has which context. Imports vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform

from gracekv.vllm.context_attention import Asking, begin_step, end_step
from gracekv.vllm.equal_shares import check_prompt, write_entries
from gracekv.vllm.header import PARAMETER, ContextHeader
from gracekv.vllm.serving import (
    LOG,
    attention_layers,
    check_pages,
    check_serving,
    open_store,
    refusal,
)
from gracekv.vllm.stored_context import StoredContext


@dataclass
class PageLoad:
    """Entries of a context with equal shares that go into a request's pages.

    Attributes:
        name: of the context.
        digest: of the context.
        first: of the entries, counted in each head; those before are in the pages already.
        blocks: the pages of all its entries.
    """

    name: str
    digest: str
    first: int
    blocks: list[int]


@dataclass
class StepContexts(KVConnectorMetadata):  # type: ignore[misc]
    """What the scheduler tells the workers before a step.

    Attributes:
        named: (name, digest, tokens of the step) of requests with ragged contexts, by the first
            block of their pages.
        loads: what goes into pages before the step.
        refused: ids of requests whose context cannot be used.
        used: digests of the contexts of all requests that have not ended.
    """

    named: dict[int, tuple[str, str, int]] = field(default_factory=dict)
    loads: list[PageLoad] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)


class GraceConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Contexts of requests, by name; only those with equal shares go into vLLM's pages.

    In the scheduler it reads `kv_transfer_params={"gracekv": name}` of a request, and salts the
    hashes of its pages with the context, so that vLLM's prefix caching never mixes contexts. In
    each worker it loads contexts, shared by all requests, before the step that needs them. Equal
    shares are announced as tokens that are computed elsewhere.

    A request whose context cannot be used ends with an error; all others go on.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_serving(vllm_config, kv_cache_config)
        rank = device = None
        if role == KVConnectorRole.WORKER:
            rank = get_tensor_model_parallel_rank()
            device = torch.device(current_platform.device_type)
        self._store = open_store(vllm_config, rank=rank, device=device)
        self._page = vllm_config.cache_config.block_size
        # In the scheduler, by request id: contexts, first entries to load, requests to refuse.
        self._contexts: dict[str, tuple[str, ContextHeader]] = {}
        self._to_load: dict[str, int] = {}
        self._refused: set[str] = set()
        self._to_refuse: set[str] = set()
        # In a worker: blocks of requests whose context could not be loaded.
        self._failed_blocks: set[int] = set()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Yes: a graph of a whole step calls no Python, so it would skip contexts."""
        return True

    # In the scheduler.

    def on_new_request(self, request: Any) -> None:
        params = request.kv_transfer_params
        if not isinstance(params, dict) or PARAMETER not in params:
            return
        name = str(params[PARAMETER])
        try:
            # Whole, since a worker that finds damage can only end the request a token later.
            header = self._store.admit(params)
            if header.kind == "equal":
                check_prompt(header, name, request.prompt_token_ids or (), request.sampling_params)
        # In the scheduler, any other exception would end the engine for everybody.
        except Exception as error:
            LOG.error("Request %s is refused. %s", request.request_id, refusal(error))
            self._refused.add(request.request_id)
            # Else the scheduler would ignore the tokens by which the request is failed.
            request.skip_reading_prefix_cache = False
            salt = request.request_id
        else:
            self._contexts[request.request_id] = name, header
            salt = header.digest
        request.cache_salt = f"{PARAMETER}:{salt}:{request.cache_salt or ''}"
        request.block_hashes = []
        request.update_block_hashes()

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        # Only a request that waits for tokens from elsewhere can be failed by a connector.
        if request.request_id in self._refused:
            return 1, True
        return max(0, self._share(request.request_id) - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if request.request_id in self._refused:
            self._to_refuse.add(request.request_id)
        elif num_external_tokens:
            share = self._share(request.request_id)
            self._to_load[request.request_id] = share - num_external_tokens

    def _share(self, request_id: str) -> int:
        found = self._contexts.get(request_id)
        return found[1].share if found else 0

    def build_connector_meta(self, scheduler_output: Any) -> StepContexts:
        state = scheduler_output.kv_connector_block_state
        used = {header.digest for _, header in self._contexts.values()}
        step_contexts = StepContexts(refused=self._to_refuse, used=used)
        for request, tokens in scheduler_output.num_scheduled_tokens.items():
            if request not in self._contexts:
                continue
            name, header = self._contexts[request]
            blocks = state.get_block_ids(request)[0]
            if header.kind == "ragged":
                step_contexts.named[blocks[0]] = name, header.digest, tokens
            elif request in self._to_load:
                held = blocks[: -(-header.share // self._page)]
                load = PageLoad(name, header.digest, self._to_load[request], held)
                step_contexts.loads.append(load)
        self._to_refuse, self._to_load = set(), {}
        return step_contexts

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._contexts.pop(request.request_id, None)
        self._to_load.pop(request.request_id, None)
        self._refused.discard(request.request_id)
        self._to_refuse.discard(request.request_id)
        return False, None

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
        asking: dict[int, Asking] = {}
        digests = {digest for _, digest, _ in connector_metadata.named.values()}
        for block, (name, digest, tokens) in connector_metadata.named.items():
            context = self._load(name, digest, digests, [block])
            if context is not None:
                asking[block] = Asking(context, tokens)
        begin_step(asking)

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

    def shutdown(self) -> None:
        end_step()

    # Nothing is saved, and nothing is loaded while the model runs.

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: pages [blocks, G, block, 2d] stay vLLM's."""

    def wait_for_save(self) -> None:
        """Nothing."""
