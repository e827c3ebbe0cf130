"""`Compressor`: makes contexts in a worker, of prompts that its attention layers show."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import threading
import time
from collections.abc import Set
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from gracekv.cache.quantised import dequantised
from gracekv.cache.sharding import gathered_cache
from gracekv.distributed.agreement import together
from gracekv.distributed.sharding import WHOLE, HeadShard
from gracekv.errors import GracekvError
from gracekv.vllm.context_folder import write_context
from gracekv.vllm.exporting import describe, moved
from gracekv.vllm.header import ContextHeader
from gracekv.vllm.orders import Compression
from gracekv.vllm.recording import Recording
from gracekv.vllm.served_model import ServedModel
from gracekv.vllm.serving import LOG, refusal
from gracekv.vllm.store import ContextStore
from gracekv.vllm.stored_context import StoredContext

# Running requests go first: of a core that both want, the thread gets a tenth. Source: ours.
_NICE = 10
# Seconds that an engine with nothing else to do waits for the thread at a time.
_PAUSE = 0.03


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens of a compressing request in a step, as the scheduler names them.

    Attributes:
        request: its id.
        order: what shall be made of its prompt.
        block: index of the first of its pages.
        start: position of the first token.
        count: tokens of the step.
        length: T, of the whole prompt.
    """

    request: str
    order: Compression
    block: int
    start: int
    count: int
    length: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a compressing request, as one worker says it.

    Attributes:
        request: its id.
        header: of the context, all ranks' heads; None if it failed.
        seconds: from the first token to the stored context.
        reason: why it failed.
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
    """One prompt at a time: recorded step by step, then compressed in a thread of its own.

    On CPUs, observers look in that thread, too, while the model goes on. Tensor-parallel ranks read
    the same prompts in the same steps, so their threads take them in the same order, and meet in
    each: they make one cut, and all of them serve the context or none. An error before that is
    raised in the thread, so that the other ranks hear of it.

    Args:
        vllm_config: vLLM's.
        store: of the worker; made contexts go there.
        device: of the worker.
        shard: which of all ranks' KV heads the worker computes. Its thread alone uses the exchange.
    """

    def __init__(
        self,
        vllm_config: Any,
        store: ContextStore,
        device: torch.device,
        shard: HeadShard = WHOLE,
    ) -> None:
        self._config, self._store, self._device = vllm_config, store, device
        self._shard = shard
        self._job: _Job | None = None
        self._pool = ThreadPoolExecutor(1, "gracekv", initializer=_give_way)

    @functools.cached_property
    def _served(self) -> ServedModel:
        return ServedModel.of(self._config)

    def begin(
        self, chunk: Chunk | None, current: str | None, made: Set[str] = frozenset()
    ) -> Recording | None:
        """The recording that the step's tokens belong to.

        Args:
            chunk: tokens of a compressing request in the step.
            current: id of the request whose turn it is; what another one left is dropped.
            made: ids of requests of which all ranks have made contexts: they are served from now
                on, in the place of what their names meant.
        """
        job = self._job
        if job is not None and job.context is not None and job.request in made:
            self._serve(job.order, job.context)
        if job is not None and job.request != current:
            self._drop()
        if chunk is None:
            return None
        if chunk.start == 0:
            # Also after a preemption, when all tokens are computed again.
            self._drop()
            self._job = self._begun(chunk)
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

    def _serve(self, order: Compression, context: StoredContext) -> None:
        try:
            self._store.put(context.header, order.name, context, saved=order.save)
        # Who asks for it is refused, and the engine goes on.
        except Exception as error:
            LOG.error("Context %r cannot be held.", order.name, exc_info=error)

    def _begun(self, chunk: Chunk) -> _Job:
        # What a GPU's observers launch goes into the model's own stream.
        pool = self._pool if self._device.type == "cpu" else None
        recording: Recording | Exception
        try:
            recording = Recording(
                chunk.order, chunk.length, self._served, self._device, pool, self._shard
            )
        except Exception as error:
            recording = error
        return _Job(chunk.request, chunk.order, recording)

    def outcome(self, idle: bool) -> Outcome | None:
        """What ended since the last call; called after each step.

        Args:
            idle: whether the step had no tokens, so that the engine may wait a little.
        """
        job = self._job
        if job is None or job.context is not None:
            return None
        if job.future is None and job.is_read:
            # On the stream of the model, so that nothing is freed that is still read.
            stream = None
            if self._device.type == "cuda":
                stream = torch.cuda.current_stream(self._device)
            job.future = self._pool.submit(self._made, job, stream)
        if job.future is None or not wait([job.future], _PAUSE if idle else 0).done:
            return None
        seconds = time.monotonic() - job.started
        try:
            job.context = job.future.result()
            # Observers and what they hold are not read any more.
            job.recording = None
        # The engine goes on, whatever happens to one context.
        except Exception as error:
            self._job = None
            return Outcome(job.request, None, seconds, _reason(error))
        return Outcome(job.request, job.context.header, seconds)

    @property
    def recorded(self) -> int:
        """Bytes of the recording that is not yet compressed."""
        return 0 if self._recording is None else self._recording.bytes

    def shutdown(self) -> None:
        """Begin nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    @torch.inference_mode()
    def _made(self, job: _Job, stream: Any) -> StoredContext:
        with torch.cuda.stream(stream), together(self._shard) as shard:
            recording = job.recording
            if not isinstance(recording, Recording):
                raise recording or AssertionError("A document is compressed once.")
            shard.agree(request=job.request.encode())
            return self._compressed(job.order, recording)

    def _compressed(self, order: Compression, recording: Recording) -> StoredContext:
        model, shard = self._served.model, self._shard
        run = order.pipeline.run(recording.prefill(), order.budget)
        cache = dequantised(run.cache)
        rotated = moved(model, cache)
        self._store.loaded.check(order.name, rotated.kv_bytes + rotated.metadata_bytes)
        entries, size = (shard.total(x) for x in (int(cache.entries().sum()), cache.kv_bytes))

        # Nobody reads a file of what is not saved: a number that no other context has will do.
        digest = secrets.token_hex(32)
        made = describe(model, order.follow, cache, order.recipe, digest)
        facts = dict(self._store.model or made.model)
        made = replace(made, entries=entries, bytes=size, model=facts)
        if order.save:
            whole = gathered_cache(rotated, shard) if shard.ranks > 1 else rotated
            if shard.rank == 0:
                folder = self._store.folder(order.name)
                made = write_context(whole, lambda digest: replace(made, digest=digest), folder)
        own = torch.tensor(list(bytes.fromhex(made.digest)), dtype=torch.uint8)
        # The others wait here until the file is there, or the first one has failed.
        digest = bytes(shard.gather(own)[0].tolist()).hex()
        context = StoredContext(replace(made, digest=digest), rotated.layers)
        # A rank without room for it fails before this, and so do all.
        shard.total(0)
        return context


def _give_way() -> None:
    """Let running requests go first; some systems cannot."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def _reason(error: Exception) -> str:
    if isinstance(error, GracekvError):
        return str(error)
    LOG.error("A document could not be compressed.", exc_info=error)
    return refusal(error)
