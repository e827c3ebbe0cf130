"""`Recording`: keys, values and queries of a prompt that a worker compresses later."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gracekv.cache.base import RaggedCache
from gracekv.cache.joining import past_of
from gracekv.distributed.sharding import WHOLE, HeadShard
from gracekv.errors import StoreError
from gracekv.prefill import Prefill, Region
from gracekv.prefill.model_layers import model_layers
from gracekv.prefill.needs import CaptureSizes, held_positions
from gracekv.prefill.observations import Observations
from gracekv.prefill.observer import TokenRun
from gracekv.prefill.recorder import Recorder
from gracekv.vllm.orders import Compression
from gracekv.vllm.served_model import ServedModel
from gracekv.vllm.stored_context import StoredContext


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens of a compressing request in a step.

    Attributes:
        request: the request's id.
        order: the order in the request.
        block: index of its first page.
        start: position of its first token in the step.
        count: its tokens in the step.
        length: T, tokens of the whole prompt.
        past: name and digest of the context that the prompt extends, or None.
    """

    request: str
    order: Compression
    block: int
    start: int
    count: int
    length: int
    past: tuple[str, str] | None = None


class Recording:
    """Collects a prompt's keys, values and chosen queries, and shows every run to observers.

    The tensors are outside vLLM's pages, which are freed as after any request.

    Args:
        order: the compression.
        length: T, tokens of the prompt, including the one that is read after the document.
        served: the model.
        device: the worker's device.
        pool: runs the observers while the model continues, at most one run of every layer behind;
            by default they run immediately.
        shard: the KV heads that this worker records.
        past: the context that the prompt extends, or None.

    Attributes:
        spans: spans of the prompt, after the places of `past`.
        past: as given.
        failure: the error that ended the recording, or None.
    """

    def __init__(
        self,
        order: Compression,
        length: int,
        served: ServedModel,
        device: torch.device,
        pool: Executor | None = None,
        shard: HeadShard = WHOLE,
        past: StoredContext | None = None,
    ) -> None:
        # All ranks begin in the same step, so they need no exchange here.
        needs, places = order.pipeline.needs(), 0 if past is None else past.places
        self.past, self.spans, self._shard = past, order.spans(length, places), shard
        # An engine computes nothing twice, so hold from the start whatever may be needed later.
        once = CaptureSizes(kv=0, queries=0, again=False)
        # Evenly spaced queries end at the plan's recent window, which may be short.
        recent = order.pipeline.plan_for(served.model, self.spans, order.budget).recent
        positions = held_positions(replace(needs, recent=recent), self.spans, once, None)
        layers = model_layers(served.model)
        self._observations = Observations(needs.observers, len(layers), self.spans)
        self._record = Recorder(self._observations, positions, layers)
        # As in a capture, only differences of positions matter; places of `past` have position 0.
        self._record.table = served.rope(length, device, places)
        if past is not None:
            context = RaggedCache(past.layers, past.header.length)
            self._record.follow(past_of(context, places=places), None)
        self._held = self._record.keys, self._record.values, self._record.queries
        self.failure: Exception | None = None
        sizes = CaptureSizes.of(served.model)
        self._need = sizes.held(self.spans.length, len(positions)) // shard.ranks
        self._step_need = sizes.activations
        # How much is written of each layer.
        self._ends = [places] * len(layers)
        self._pool, self._waiting, self._run_bytes = pool, deque[Future[None]](), 0

    def add(
        self, layer: int, start: int, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> None:
        """Write C tokens of a layer, and show them to the observers.

        Args:
            layer: the layer's number, from 0.
            start: position of the first token in the prompt.
            query: [C, H, d], rotated.
            key: [C, G, d], rotated.
            value: [C, G, d].
            scale: factor of q . k.
        """
        start += self.spans.past
        length, end = self.spans.length, start + len(query)
        if self.failure is not None or start != self._ends[layer] or end > length:
            return
        self._record.begin(Region(start, end), None)
        query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
        rows = self._record.write(layer, query, key, value, scale)[0][0]
        self._ends[layer] = end
        keys, values, _ = self._record.layer(layer)
        if self._pool is not None:
            # The engine reuses this memory for the next layer.
            rows = rows.clone()
            self._run_bytes = max(self._run_bytes, rows.nbytes)

        def run() -> TokenRun:
            return TokenRun(start, rows, keys, values, self._record.rope_of(layer), scale)

        if self._pool is None:
            self._observations.add(layer, run)
            return
        show = torch.inference_mode()(self._observations.add)
        self._waiting.append(self._pool.submit(show, layer, run))
        if len(self._waiting) > len(self._ends):
            self._waiting.popleft().result()

    @property
    def bytes(self) -> int:
        """Maximum bytes of keys, values and queries held in addition to vLLM's pages."""
        # Lists, since the thread that compresses empties them.
        held = sum(x.nbytes for part in self._held for x in list(part.values()))
        return held + self._run_bytes * len(self._ends)

    def check_free(self, free: int, tokens: int) -> None:
        """Raise `StoreError` if the recording does not fit into `free` bytes.

        A step of the engine has up to `tokens` and allocates their activations as it runs.
        """
        free = max(0, free - self._step_need * tokens)
        if self._need > free:
            raise StoreError(
                f"Reading this document takes {self._need:,} bytes besides vLLM's; {free:,} are "
                f"free. Send a shorter one, or start with a lower --gpu-memory-utilization."
            )

    def fail(self, error: Exception) -> None:
        """Refuse the document, and free what was recorded."""
        self.failure = error
        self._clear()

    def _clear(self) -> None:
        for part in self._held:
            part.clear()

    def cancel(self) -> None:
        """Stop showing tokens to the observers; the recording is unusable afterwards."""
        for each in list(self._waiting):
            each.cancel()

    def prefill(self) -> Prefill:
        """Return the recorded prefill, once observers have seen all of it; call this once.

        Raises `StoreError` if tokens are missing, and any error of an observer.
        """
        if self.failure is not None:
            raise self.failure
        while self._waiting:
            self._waiting.popleft().result()
        if any(end < self.spans.length for end in self._ends):
            raise StoreError("The engine did not compute all tokens. Send the document again.")
        fields = self._record.fields()
        self._clear()
        observed = self._observations.results(fields["keys"][0].device, None)
        return Prefill(**fields, observed=observed, shard=self._shard)
