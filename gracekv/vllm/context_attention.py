"""`ContextAttention`: what is mixed into vLLM's attention, and the step that a worker runs now."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from gracekv.vllm.stored_context import StoredContext

if TYPE_CHECKING:
    from gracekv.vllm.recording import Recording


class Asking(NamedTuple):
    """A request of a step that has a context.

    Attributes:
        context: its context.
        tokens: how many it computes in the step.
    """

    context: StoredContext
    tokens: int


class LayerCall(NamedTuple):
    """What vLLM asks of one layer in a step.

    Attributes:
        layer: vLLM's.
        query: [tokens of the step, H, d].
        kv_cache: [blocks, G, block, 2d].
        metadata: vLLM's, of the step's attention.
        output: [tokens, H, d], whose rows are written in place.
    """

    layer: Any
    query: Tensor
    kv_cache: Tensor
    metadata: Any
    output: Tensor


class Reading(NamedTuple):
    """A request of a step whose prompt is recorded, to be compressed.

    Attributes:
        recording: what it is written to.
        block: index of the first of its pages.
        start: position of its first token of the step.
        tokens: how many it computes in the step.
    """

    recording: Recording
    block: int
    start: int
    tokens: int


class Step:
    """The contexts of one step, and the work that they are.

    Args:
        asking: requests that have a context, by the first block of their pages.
        reading: a request whose tokens are recorded.
    """

    def __init__(self, asking: dict[int, Asking], reading: Reading | None) -> None:
        self.asking, self.reading = asking, reading
        self._planned: tuple[Any, Any] | None = None
        self._found: tuple[Any, int] | None = None

    def plan(self, metadata: Any, make: Callable[[], Any]) -> Any:
        """The work over contexts; made in the first layer and the same in all of them.

        Args:
            metadata: vLLM's, of the step's attention.
            make: plans it.
        """
        if self._planned is None or self._planned[0] is not metadata:
            with torch.inference_mode():
                self._planned = metadata, make()
        return self._planned[1]

    def record(self, name: str, parts: Sequence[Tensor], metadata: Any, scale: float) -> None:
        """Show the recording its tokens of a layer.

        Args:
            name: the layer's, as vLLM has it.
            parts: query [tokens of the step, H, d], key and value [tokens, G, d].
            metadata: vLLM's, of the step's attention.
            scale: factor of q . k.
        """
        from vllm.model_executor.models.utils import extract_layer_index

        assert self.reading is not None  # it is asked before
        recording, block, start, tokens = self.reading
        if self._found is None or self._found[0] is not metadata:
            row = (metadata.block_table[:, 0] == block).nonzero()[0, 0]
            self._found = metadata, int(metadata.query_start_loc[row])
        own = slice(self._found[1], self._found[1] + tokens)
        query, key, value = (x[own] for x in parts)
        try:
            recording.add(extract_layer_index(name), start, query, key, value, scale)
        # Other requests of the step go on, whatever an observer raises.
        except Exception as error:
            recording.failure, self.reading = error, None


_current: Step | None = None


def begin_step(asking: dict[int, Asking], reading: Reading | None = None) -> None:
    """Let attention see these contexts, and record what `reading` says; see `Step`."""
    global _current
    _current = Step(asking, reading) if asking or reading else None


def end_step() -> None:
    """The step is over."""
    begin_step({})


def current_step() -> Step | None:
    """The step that runs, or None if none of its requests has a context or is recorded."""
    return _current


class ContextAttention(abc.ABC):
    """Stock attention for all tokens, and attention over context and pages for those that have one.

    Keys and values are written as ever, so pages hold question and answer, and what moves or drops
    pages needs no care. Comes before the stock implementation in the list of bases.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float

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
        """`output`, whose rows are written in place, as vLLM's operator requires.

        Args:
            layer: vLLM's.
            query: [tokens of the step, H, d].
            key: [tokens, G, d], in pages already.
            value: [tokens, G, d].
            kv_cache: [blocks, G, block, 2d].
            attn_metadata: vLLM's, of the step; None while it measures memory.
            output: [tokens, H, d].
            output_scale: of a quantised output; never with contexts.
            output_block_scale: likewise.
        """
        running = None if attn_metadata is None else current_step()
        batch = None
        if running is not None and running.reading is not None:
            parts = query, key, value
            running.record(layer.layer_name, parts, attn_metadata, self.scale)
        if running is not None and running.asking:
            batch = running.plan(attn_metadata, lambda: self.plan(running, attn_metadata, kv_cache))
        if batch is None or not batch.covers_all:
            stock: Any = super()
            stock.forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale,
                output_block_scale,
            )  # fmt: skip
        if batch is not None:
            heads = (-1, self.num_heads, self.head_size)
            asked = (query.view(heads), kv_cache, attn_metadata, output.view(heads))
            self.attend(batch, LayerCall(layer, *asked))
        return output

    @abc.abstractmethod
    def plan(self, running: Step, metadata: Any, kv_cache: Tensor) -> Any:
        """The step's work over contexts, with `covers_all`; None if there is none.

        Args:
            running: the step.
            metadata: vLLM's.
            kv_cache: [blocks, G, block, 2d], of any layer.
        """

    @abc.abstractmethod
    def attend(self, batch: Any, call: LayerCall) -> None:
        """Write the rows of `call.output` of tokens that have a context; `batch` is from `plan`."""

    @classmethod
    @abc.abstractmethod
    def warm_up(cls, kv_cache: Tensor, group: int) -> None:
        """Compile what `attend` runs; no request should wait for it.

        Args:
            kv_cache: [blocks, G, block, 2d], of any layer; it is only read.
            group: query heads of a KV head.
        """
