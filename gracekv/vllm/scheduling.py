"""`SchedulerSide`: what the connector does in vLLM's scheduler, and tells workers. Imports vLLM."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from gracekv.errors import StoreError
from gracekv.vllm.compressing import Chunk, Outcome
from gracekv.vllm.equal_shares import check_prompt
from gracekv.vllm.header import PARAMETER, ContextHeader, is_missing
from gracekv.vllm.jobs import WAIT, Jobs, failed
from gracekv.vllm.orders import FOLLOW, order_of
from gracekv.vllm.serving import LOG, refusal
from gracekv.vllm.store import ContextStore


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
        chunk: tokens of the step that are recorded, to be compressed.
        current: id of the request whose prompt is compressed now.
        forgotten: names of contexts that were deleted.
        idle: whether the step has no tokens.
    """

    named: dict[int, tuple[str, str, int]] = field(default_factory=dict)
    loads: list[PageLoad] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)
    chunk: Chunk | None = None
    current: str | None = None
    forgotten: set[str] = field(default_factory=set)
    idle: bool = False


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What a worker tells the scheduler after a step.

    Attributes:
        outcome: of the prompt that is compressed.
        dropped: digests of contexts in no file that went for want of room, by name.
    """

    outcome: Outcome | None
    dropped: dict[str, str]

    def aggregate(self, other: WorkerReport) -> WorkerReport:
        """What both tell."""
        return WorkerReport(self.outcome or other.outcome, self.dropped | other.dropped)


class SchedulerSide:
    """Which request has which context, which waits for one, and which prompt becomes one.

    Comes before vLLM's connector in the list of bases.
    """

    def begin(self, store: ContextStore, page: int) -> None:
        """Start without requests.

        Args:
            store: of this process.
            page: tokens of a page.
        """
        self._store, self._page, self._jobs = store, page, Jobs(store)
        # By request id: contexts, first entries to load, requests to refuse.
        self._contexts: dict[str, tuple[str, ContextHeader]] = {}
        self._to_load: dict[str, int] = {}
        self._refused: set[str] = set()
        self._to_refuse: set[str] = set()
        # Replies, and until when a request waits for its context.
        self._replies: dict[str, dict[str, Any]] = {}
        self._waiting: dict[str, tuple[float, bool | None]] = {}

    def on_new_request(self, request: Any) -> None:
        """Take a request in; one that is refused ends with an error, and others go on."""
        params = request.kv_transfer_params
        if not isinstance(params, dict) or PARAMETER not in params:
            return
        order, length = None, request.num_prompt_tokens
        request.cache_salt = f"{PARAMETER}:{request.request_id}:{request.cache_salt or ''}"
        # Else the scheduler would ignore the tokens by which the request is failed, or waits.
        skips, request.skip_reading_prefix_cache = request.skip_reading_prefix_cache, False
        try:
            order = order_of(params[PARAMETER], params.get(FOLLOW))
            if order is None:
                self._ask(request, skips, time.monotonic() + WAIT)
            else:
                self._jobs.add(request.request_id, order, params, length)
        # In the scheduler, any other exception would end the engine for everybody.
        except Exception as error:
            self._refuse(request, error)
        _hash_again(request)

    def _ask(self, request: Any, skips: bool | None, end: float) -> None:
        """Take a question in, or let it wait for its context; raises what speaks against it."""
        try:
            self._admit(request, skips)
        except StoreError as error:
            making = self._jobs.is_making(request.kv_transfer_params[PARAMETER])
            if not (making and is_missing(error) and time.monotonic() < end):
                raise
            self._waiting[request.request_id] = end, skips

    def _admit(self, request: Any, skips: bool | None) -> None:
        """Take a question in; raises what speaks against it."""
        self._jobs.expire()
        params = request.kv_transfer_params
        # Whole, since a worker that finds damage can only end the request a token later.
        header = self._store.admit(params)
        name = str(params[PARAMETER])
        if header.kind == "equal":
            check_prompt(header, name, request.prompt_token_ids or (), request.sampling_params)
        self._contexts[request.request_id] = name, header
        request.skip_reading_prefix_cache = skips
        salt = request.cache_salt.removeprefix(f"{PARAMETER}:{request.request_id}")
        request.cache_salt = f"{PARAMETER}:{header.digest}{salt}"

    def _refuse(self, request: Any, error: Exception) -> None:
        said, status = refusal(error), 400
        if is_missing(error):
            name = request.kv_transfer_params[PARAMETER]
            said, status = self._jobs.why_missing(str(name), said), 404
        LOG.error("Request %s is refused. %s", request.request_id, said)
        if self._store.ragged:
            # The plugin is there, so the front makes an error of a reply that says why.
            self._replies[request.request_id] = failed(said, status)
            request.max_tokens = 1
        else:
            self._refused.add(request.request_id)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that are loaded into pages; None while the request has to wait."""
        # Only a request that waits for tokens from elsewhere can be failed by a connector.
        if request.request_id in self._refused:
            return 1, True
        if request.request_id in self._waiting:
            end, skips = self._waiting.pop(request.request_id)
            try:
                self._ask(request, skips, end)
            except Exception as error:
                self._refuse(request, error)
            # Its pages were looked up without the context: once more.
            _hash_again(request)
            return None, False
        if request.request_id in self._jobs.jobs:
            if self._jobs.current != request.request_id:
                return None, False
            # After a preemption, all tokens are computed again.
            request.skip_reading_prefix_cache = True
        return max(0, self._share(request.request_id) - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note how many of its last external tokens a request loads."""
        if request.request_id in self._refused:
            self._to_refuse.add(request.request_id)
        elif num_external_tokens:
            share = self._share(request.request_id)
            self._to_load[request.request_id] = share - num_external_tokens

    def _share(self, request_id: str) -> int:
        found = self._contexts.get(request_id)
        return found[1].share if found else 0

    def build_connector_meta(self, scheduler_output: Any) -> StepContexts:
        """What workers have to know before the step."""
        state = scheduler_output.kv_connector_block_state
        used = {header.digest for _, header in self._contexts.values()}
        step_contexts = StepContexts(
            refused=self._to_refuse,
            used=used,
            chunk=self._chunk(scheduler_output),
            current=self._jobs.current,
            forgotten=self._jobs.forgotten,
            idle=not scheduler_output.total_num_scheduled_tokens,
        )
        self._jobs.forgotten = set()
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

    def _chunk(self, scheduler_output: Any) -> Chunk | None:
        job = self._jobs.jobs.get(self._jobs.current or "")
        if job is None or job.request not in scheduler_output.num_scheduled_tokens:
            return None
        cached = scheduler_output.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        starts |= {x.req_id: x.num_computed_tokens for x in scheduler_output.scheduled_new_reqs}
        state = scheduler_output.kv_connector_block_state
        start, block = starts[job.request], state.get_block_ids(job.request)[0][0]
        count = min(scheduler_output.num_scheduled_tokens[job.request], job.length - start)
        return (
            Chunk(job.request, dict(job.parameters), block, start, count, job.length)
            if count > 0
            else None
        )

    def has_pending_push_work(self) -> bool:
        """Whether the engine has to go on stepping, since a context is being made."""
        return self._jobs.pending

    def update_connector_output(self, connector_output: Any) -> None:
        """Take in what a worker tells after a step."""
        report = connector_output.kv_connector_worker_meta
        if report is not None:
            self._jobs.update(report.outcome, report.dropped)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether its pages stay, which they never do, and the reply's `kv_transfer_params`."""
        params, key = request.kv_transfer_params, request.request_id
        self._waiting.pop(key, None)
        reply = self._replies.pop(key, None)
        if reply is None and isinstance(params, dict) and isinstance(params.get(PARAMETER), dict):
            reply = self._jobs.finished(key, request.num_computed_tokens, params)
        self._contexts.pop(key, None)
        self._to_load.pop(key, None)
        self._refused.discard(key)
        self._to_refuse.discard(key)
        return False, None if reply is None else {PARAMETER: reply}


def _hash_again(request: Any) -> None:
    """Name the request's pages by its new salt."""
    request.block_hashes = []
    request.update_block_hashes()
