"""`SchedulerSide`: the connector's part in vLLM's scheduler, and its messages. Imports vLLM."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base

from gracekv.vllm.compressing import Outcome
from gracekv.vllm.header import PARAMETER, ContextHeader, is_missing
from gracekv.vllm.jobs import WAIT, Jobs
from gracekv.vllm.orders import FRONT, Compression, order_of
from gracekv.vllm.recording import Chunk
from gracekv.vllm.serving import LOG
from gracekv.vllm.store import ContextStore

# Maximum contexts that workers open in one step, since those of requests that wait for pages stay
# in memory. Source: ours.
_AT_ONCE = 8


@dataclass
class StepContexts(base.KVConnectorMetadata):  # type: ignore[misc]
    """The scheduler's message to the workers before a step.

    Attributes:
        named: (name, digest, tokens of the step) of requests with contexts, by their last page.
        opening: names of contexts that requests are about to read, by digest.
        used: digests of the contexts of all running and waiting requests.
        chunk: tokens of the step that are recorded.
        current: id of the request whose prompt is compressed now.
        made: ids of requests whose contexts are complete in all workers, to be served from now on.
        forgotten: names of deleted contexts, each with the digest to delete, or None for any.
        idle: whether the step has no tokens.
    """

    named: dict[int, tuple[str, str, int]] = field(default_factory=dict)
    opening: dict[str, str] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    chunk: Chunk | None = None
    current: str | None = None
    made: set[str] = field(default_factory=set)
    forgotten: dict[str, str | None] = field(default_factory=dict)
    idle: bool = False


@dataclass
class WorkerReport(base.KVConnectorWorkerMetadata):  # type: ignore[misc]
    """A worker's message to the scheduler after a step.

    Attributes:
        outcomes: outcomes of compressed prompts, one from each worker.
        dropped: names and digests of unsaved contexts that were dropped for lack of room.
        opened: for each context that the step opened, by digest: None if it is in memory, else the
            reply to requests about it.
        recorded: bytes held of the prompt that is being compressed.
    """

    outcomes: list[Outcome]
    dropped: set[tuple[str, str]]
    opened: dict[str, dict[str, Any] | None]
    recorded: int = 0

    def aggregate(self, other: WorkerReport) -> WorkerReport:
        """The combined report of both workers."""
        opened = {x: self.opened.get(x) or other.opened.get(x) for x in self.opened | other.opened}
        outcomes, dropped = self.outcomes + other.outcomes, self.dropped | other.dropped
        return WorkerReport(outcomes, dropped, opened, self.recorded + other.recorded)


class SchedulerSide:
    """Tracks each request's context, which requests wait for one, and which prompt becomes one.

    A request begins when the workers have its context in memory, where it stays until the request
    ends: a step computed without it could not be undone. List this class before vLLM's connector.
    """

    def begin(self, store: ContextStore, ranks: int = 1) -> None:
        """Start without requests.

        Args:
            store: the scheduler's store.
            ranks: number of workers that share a model.
        """
        self._store, self._jobs = store, Jobs(store, ranks)
        # By request id: contexts, and replies if the context was lost.
        self._contexts: dict[str, tuple[str, ContextHeader]] = {}
        self._lost: dict[str, dict[str, Any]] = {}
        # Names of contexts for workers to open, by digest; digests of those that are open.
        self._opening: dict[str, str] = {}
        self._open: set[str] = set()
        # By request id: replies; when it stops waiting; whether it asked to skip cached pages.
        self._replies: dict[str, dict[str, Any]] = {}
        self._waiting: dict[str, float] = {}
        self._skips: dict[str, bool | None] = {}

    def on_new_request(self, request: Any) -> None:
        """Process a new request; a refused one ends with an error, and others continue."""
        params, key = request.kv_transfer_params, request.request_id
        aborted = getattr(request, "abort_immediately", False)  # by an engine that pauses
        if aborted or not isinstance(params, dict) or PARAMETER not in params:
            if (getattr(request, "cache_salt", None) or "").startswith(f"{PARAMETER}:"):
                # A client's own salt; pages of a context are not for this request.
                request.cache_salt = f":{request.cache_salt}"
                _hash_again(request)
            return
        request.cache_salt = f"{PARAMETER}:{key}:{request.cache_salt or ''}"
        # vLLM lets no request wait that skips the prefix cache; `_skips` restores the flag later.
        self._skips[key] = request.skip_reading_prefix_cache
        request.skip_reading_prefix_cache = False
        try:
            source, header = self._jobs.source, self._store.header
            order = order_of(params[PARAMETER], params.get(FRONT), lambda name: source(name).recipe)
            if order is not None:
                reply = self._jobs.add(key, order, params, request.num_prompt_tokens)
                self._replies |= {} if reply is None else {key: reply}
            if isinstance(order, Compression) and order.source is not None:
                self._contexts[key] = order.source, header(order.source)
        # Any exception here would end the engine for all clients.
        except Exception as error:
            self._refuse(request, self._jobs.refused(error))
        else:
            if order is None:
                self._ask(request, time.monotonic() + WAIT)
        _hash_again(request)

    def _ask(self, request: Any, end: float) -> None:
        """Admit a question, refuse it, or let it wait for its context until `end`."""
        params, key = request.kv_transfer_params, request.request_id
        name = params[PARAMETER]
        try:
            self._jobs.expire()
            header = self._store.admit(params)
        except Exception as error:
            if self._jobs.is_making(name) and is_missing(error) and time.monotonic() < end:
                self._waiting[key] = end
            else:
                self._refuse(request, self._jobs.refused(error, name))
        else:
            self._contexts[key] = str(name), header
            salt = request.cache_salt.removeprefix(f"{PARAMETER}:{key}")
            # A request that skips cached pages gets its own salt, under which there are none.
            own = f":{key}" if self._skips.get(key) else ""
            request.cache_salt = f"{PARAMETER}:{header.digest}{salt}{own}"

    def _refuse(self, request: Any, reply: dict[str, Any]) -> None:
        """End a request after one token, with a reply that the front turns into an error."""
        LOG.error("Request %s is refused. %s", request.request_id, reply["reason"])
        self._replies[request.request_id] = reply
        request.max_tokens = 1

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """(0, False), since no tokens come from elsewhere; (None, False) if it has to wait."""
        return 0 if self._may_begin(request) else None, False

    def _may_begin(self, request: Any) -> bool:
        key: str = request.request_id
        is_job = key in self._jobs.jobs
        if is_job and self._jobs.current != key:
            request.skip_reading_prefix_cache = False
            return False
        if key in self._waiting:
            self._ask(request, self._waiting.pop(key))
        elif key in self._lost:
            name, header = self._contexts.pop(key)
            self._jobs.jobs.pop(key, None)
            reply = self._lost.pop(key)
            if not is_job and self._is_replaced(name, header):
                salt = request.cache_salt.removeprefix(f"{PARAMETER}:{header.digest}")
                request.cache_salt = f"{PARAMETER}:{key}{salt}"
                self._ask(request, time.monotonic() + WAIT)
            else:
                self._refuse(request, reply)
                # No other request may read pages that are computed without the context.
                request.cache_salt += f":{key}"
        else:
            is_open = self._is_open(key)
            # After a preemption, all tokens are computed again.
            request.skip_reading_prefix_cache |= is_open and (is_job or bool(self._skips.get(key)))
            return is_open
        # Its pages were looked up with another salt: look them up again.
        _hash_again(request)
        return False

    def _is_replaced(self, name: str, header: ContextHeader) -> bool:
        """Whether another context than that of `header` has the name now, in the same format."""
        try:
            new = self._store.header(name)
        except Exception:
            return False
        return new.digest != header.digest and new.continuation == header.continuation

    def _is_open(self, key: str) -> bool:
        """Whether the request's context, if it has one, is in memory; if not, ask for it."""
        name, header = self._contexts.get(key, ("", None))
        if header is None or header.digest in self._open:
            return True
        if len(self._opening) < _AT_ONCE:
            self._opening[header.digest] = name
        return False

    def update_state_after_alloc(self, *args: Any) -> None:
        """Do nothing, since no tokens come from elsewhere."""

    def build_connector_meta(self, scheduler_output: Any) -> StepContexts:
        """The message to the workers before a step."""
        state = scheduler_output.kv_connector_block_state
        digests = {header.digest for _, header in self._contexts.values()}
        self._open &= digests
        self._opening = {x: name for x, name in self._opening.items() if x in digests}
        named: dict[int, tuple[str, str, int]] = {}
        for request, count in scheduler_output.num_scheduled_tokens.items():
            if request in self._contexts:
                name, header = self._contexts[request]
                named[state.get_block_ids(request)[0][-1]] = name, header.digest, count
        idle = not (scheduler_output.total_num_scheduled_tokens or self._opening)
        jobs, opening, chunk = self._jobs, dict(self._opening), self._chunk(scheduler_output)
        made, jobs.made = jobs.made, set()
        forgotten, jobs.forgotten = jobs.forgotten, {}
        return StepContexts(named, opening, digests, chunk, jobs.current, made, forgotten, idle)

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
        name, header = self._contexts.get(job.request, ("", None))
        past = None if header is None else (name, header.digest)
        chunk = Chunk(job.request, job.order, block, start, count, job.length, past)
        return chunk if count > 0 else None

    def has_pending_push_work(self) -> bool:
        """Whether the engine has to keep stepping, since a context is being made."""
        return self._jobs.pending

    def update_connector_output(self, connector_output: Any) -> None:
        """Process the workers' report after a step."""
        if (report := connector_output.kv_connector_worker_meta) is None:
            return
        self._jobs.update(report.outcomes, report.dropped, report.recorded)
        for digest, reply in report.opened.items():
            if self._opening.pop(digest, None) is None:
                continue
            if reply is None:
                self._open.add(digest)
            else:
                readers = (x for x, (_, of) in self._contexts.items() if of.digest == digest)
                self._lost |= dict.fromkeys(readers, reply)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """False, since its pages can be freed now, and the `kv_transfer_params` of the reply."""
        key = request.request_id
        for known in (self._waiting, self._contexts, self._lost, self._skips):
            known.pop(key, None)
        reply = self._replies.pop(key, None)
        if key in self._jobs.jobs:
            reply = self._jobs.finished(key, request.num_computed_tokens)
        return False, None if reply is None else {PARAMETER: reply}


def _hash_again(request: Any) -> None:
    """Recompute the hashes of the request's pages with its new salt."""
    request.block_hashes = []
    request.update_block_hashes()
