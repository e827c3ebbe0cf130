"""`Compressor`: makes contexts in a worker from prompts that its attention layers record."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import threading
import time
from collections.abc import Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gracekv.cache import RaggedCache, RaggedEntries, dequantised
from gracekv.cache.closing import from_zero, known_reach, with_closed_gaps
from gracekv.cache.joining import joined_cache, joined_scores
from gracekv.cache.sharding import gathered_cache
from gracekv.decode.cut import entries_within
from gracekv.distributed.agreement import together
from gracekv.distributed.sharding import WHOLE, HeadShard
from gracekv.errors import GracekvError, StoreError
from gracekv.kernels.compiled import limit_threads
from gracekv.prefill.options import free_bytes
from gracekv.vllm.exporting import describe, rotated_back, write_context
from gracekv.vllm.header import ContextHeader
from gracekv.vllm.orders import Compression
from gracekv.vllm.recording import Chunk, Recording
from gracekv.vllm.served_model import ServedModel
from gracekv.vllm.serving import LOG, refusal
from gracekv.vllm.store import ContextStore
from gracekv.vllm.stored_context import StoredContext

# Running requests have priority: of a contended core, the thread gets a tenth. Source: ours.
_NICE = 10
# Seconds that an idle engine waits for the thread in each step.
_PAUSE = 0.03


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a compressing request in one worker.

    Attributes:
        request: the request's id.
        header: header of the context with all ranks' heads, or None if the worker failed.
        seconds: time from the first token to the finished context.
        reason: why the worker failed, or "".
    """

    request: str
    header: ContextHeader | None
    seconds: float
    reason: str = ""


@dataclass(slots=True)
class _Job:
    request: str
    order: Compression
    recording: Recording | Exception | None
    is_read: bool = False
    future: Future[StoredContext] | None = None
    context: StoredContext | None = None
    started: float = field(default_factory=time.monotonic)


class Compressor:
    """Records one prompt at a time, step by step, then compresses it in a thread.

    On CPUs, observers also run in that thread while the model continues. Tensor-parallel ranks read
    the same prompts in the same steps, so their threads take them in the same order. They make one
    cut of each together, and either all ranks serve the context or none does. An error while
    recording is raised in the thread, so that the other ranks learn of it.

    Args:
        vllm_config: vLLM's config.
        store: the worker's store, which gets the contexts.
        device: the worker's device.
        shard: the KV heads that the worker computes. Only the thread uses its exchange.
    """

    def __init__(
        self, vllm_config: Any, store: ContextStore, device: torch.device, shard: HeadShard = WHOLE
    ) -> None:
        self._store, self._device, self._shard = store, device, shard
        self._config = vllm_config
        self._served = functools.cache(lambda: ServedModel.of(vllm_config))
        self._job: _Job | None = None
        self._pool = _Thread()

    def begin(
        self, chunk: Chunk | None, current: str | None, done: Set[str] = frozenset()
    ) -> Recording | None:
        """The recording that takes the step's tokens, or None.

        Args:
            chunk: tokens of a compressing request in the step, or None.
            current: id of the request whose turn it is; the recording of any other is dropped.
            done: ids of requests whose contexts are complete on all ranks: serve them from now on
                instead of earlier contexts of the same names.
        """
        job = self._job
        if job is not None and job.context is not None and job.request in done:
            try:
                self._store.put(job.context.header, job.order.name, job.context, job.order.save)
            # Requests for it are refused, and the engine continues.
            except Exception as error:
                LOG.error("Context %r cannot be held.", job.order.name, exc_info=error)
        if job is not None and job.request != current:
            self._drop()
        if chunk is None:
            return None
        if chunk.start == 0:
            # A preempted request also begins again.
            self._drop()
            # On a GPU, observers launch their kernels in the model's own stream.
            place = self._device, self._pool if self._device.type == "cpu" else None, self._shard
            recording: Recording | Exception
            try:
                past = None if chunk.past is None else self._store.load(*chunk.past)
                recording = Recording(chunk.order, chunk.length, self._served(), *place, past)
                if self._device.type == "cuda":
                    tokens = self._config.scheduler_config.max_num_batched_tokens
                    recording.check_free(free_bytes(self._device), tokens)
            except Exception as error:
                recording = error
            self._job = _Job(chunk.request, chunk.order, recording)
        job = self._job
        if job is None or job.future is not None:
            return None
        job.is_read = chunk.start + chunk.count == chunk.length
        return self._recording

    @property
    def _recording(self) -> Recording | None:
        found = None if self._job is None else self._job.recording
        return found if isinstance(found, Recording) else None

    def _drop(self) -> None:
        if self._recording is not None:
            self._recording.cancel()
        self._job = None

    def outcome(self, idle: bool) -> Outcome | None:
        """The result of a request that ended since the last call; called after each step.

        Args:
            idle: whether the step had no tokens, so that this may wait briefly.
        """
        job, self._pool.is_alone = self._job, idle
        if job is None or job.context is not None:
            return None
        if job.future is None and job.is_read:
            # Use the model's stream, so that no memory is freed while it is still read.
            on_gpu = self._device.type == "cuda"
            stream = torch.cuda.current_stream(self._device) if on_gpu else None
            job.future = self._pool.submit(self._make_context, job, stream)
        if job.future is None or not wait([job.future], _PAUSE if idle else 0).done:
            return None
        seconds = time.monotonic() - job.started
        try:
            job.context = job.future.result()
            # Free what the observers hold.
            job.recording = None
        # The engine continues, whatever error one context meets.
        except Exception as error:
            self._job = None
            reason = str(error) if isinstance(error, GracekvError) else refusal(error)
            return Outcome(job.request, None, seconds, reason)
        return Outcome(job.request, job.context.header, seconds)

    @property
    def recorded(self) -> int:
        """Bytes of the recording that is not compressed yet."""
        return 0 if self._recording is None else self._recording.bytes

    def shutdown(self) -> None:
        """Start no further work."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    @torch.inference_mode()
    def _make_context(self, job: _Job, stream: Any) -> StoredContext:
        with torch.cuda.stream(stream), together(self._shard) as shard:
            if not isinstance(recording := job.recording, Recording):
                raise recording or AssertionError("A document is compressed once.")
            shard.agree(request=job.request)
            return self._compress(job.order, recording)

    def _compress(self, order: Compression, recording: Recording) -> StoredContext:
        model, shard = self._served().model, self._shard
        run = order.pipeline.run(recording.prefill(), order.budget)
        cache, past, follow = dequantised(run.cache), recording.past, order.follow
        # A text of which all entries are kept has no scores, and stays whole.
        scores: Sequence[Tensor] | None = run.entry_scores() or cache.unknown_scores()
        added = None
        if past is not None:
            follow, places = past.header.continuation, recording.spans.past
            # The earlier entries were rotated for a question right after them.
            added = cache.length - places
            old = RaggedCache(past.layers, past.header.length)
            parts = (old, old.scores), (cache, run.entry_scores())
            scores = joined_scores(parts, run.past) if old.scores else None
            cache = dequantised(joined_cache(old, cache, places, shard))
        cache = cache.with_scores(scores)
        if order.limit is not None:
            if scores is None:
                raise StoreError(
                    f"Entries of {order.source!r} have no scores, so no limit can cut them. "
                    f"Compress the context again, with a recipe that scores tokens."
                )
            reach = known_reach(model, order.limit.positions)
            if (masks := entries_within(order.limit, cache, scores, shard, reach)) is not None:
                cache = replace(cache, layers=tuple(map(RaggedEntries.where, cache.layers, masks)))
            if reach is not None:
                cache = from_zero(with_closed_gaps(cache, model, shard=shard) or cache, shard)
        rotated = rotated_back(model, cache, added)
        self._store.loaded.check(order.name, rotated.kv_bytes + rotated.metadata_bytes)
        entries, size = (shard.total(x) for x in (int(cache.entries().sum()), cache.kv_bytes))

        # An unsaved context has no file to digest, so a random number serves as its digest.
        header = describe(model, follow, cache, order.recipe, secrets.token_hex(32))
        facts = dict(self._store.model or header.model)
        header = replace(header, entries=entries, bytes=size, model=facts)
        if order.save:
            whole = gathered_cache(rotated, shard) if shard.ranks > 1 else rotated
            if shard.rank == 0:
                folder = self._store.folder(order.name)
                header = write_context(whole, lambda digest: replace(header, digest=digest), folder)
        # Digests of all weights take much room, and only files are compared by them.
        facts.pop("weights", None)
        local = torch.tensor(list(bytes.fromhex(header.digest)), dtype=torch.uint8)
        # The others wait here until the first rank has written the file, or failed.
        digest = bytes(shard.gather(local)[0].tolist()).hex()
        longest = int(shard.maximum(cache.entries().max()))
        context = StoredContext.of(replace(header, digest=digest), rotated.layers, longest)
        # If one rank had no room for the context, this raises on all ranks.
        shard.total(0)
        return context


class _Thread(ThreadPoolExecutor):
    """One thread that yields to the model, by a lower priority where the system has priorities.

    While the model runs, it uses a quarter of torch's threads: more would mostly busy-wait on the
    model's cores.

    Attributes:
        is_alone: whether the engine has nothing to compute.
    """

    def __init__(self) -> None:
        self.is_alone, self._team = False, 1
        super().__init__(1, "gracekv", initializer=self._begin)

    def _begin(self) -> None:
        self._team = torch.get_num_threads()
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run the function with as many threads as are free when it starts."""
        return super().submit(self._run_limited, function, *args, **kwargs)

    def _run_limited(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        limit_threads(self._team if self.is_alone else max(1, self._team // 4))
        return function(*args, **kwargs)
