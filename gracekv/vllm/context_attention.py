"""`ContextAttention`, a mixin for vLLM's attention, and the step that a worker is running."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from gracekv.vllm.stored_context import StoredContext

if TYPE_CHECKING:
    from gracekv.vllm.recording import Chunk, Recording


class Asking(NamedTuple):
    """A request of a step about a context.

    Attributes:
        context: the context.
        tokens: number of its tokens in the step.
    """

    context: StoredContext
    tokens: int


class LayerCall(NamedTuple):
    """The arguments of one attention layer in a step.

    Attributes:
        layer: vLLM's.
        query: [tokens of the step, H, d].
        kv_cache: [blocks, G, block, 2d].
        metadata: vLLM's attention metadata of the step.
        output: [tokens, H, d], written in place.
    """

    layer: Any
    query: Tensor
    kv_cache: Tensor
    metadata: Any
    output: Tensor


class Step:
    """The requests of one step that have a context, and the one that is recorded.

    Args:
        asking: requests about contexts, by their last page.
        reading: the request whose prompt is recorded, its recording and its tokens in the step; or
            None.
    """

    def __init__(
        self, asking: dict[int, Asking], reading: tuple[Recording, Chunk] | None = None
    ) -> None:
        self.asking, self.reading = asking, reading
        self._planned: tuple[Any, Any] | None = None
        self._found: tuple[Any, int] | None = None

    def plan(self, metadata: Any, make: Callable[[], Any]) -> Any:
        """The plan of the work over contexts; the first layer makes it for all layers.

        Args:
            metadata: vLLM's attention metadata of the step.
            make: makes the plan.
        """
        if self._planned is None or self._planned[0] is not metadata:
            with torch.inference_mode():
                self._planned = metadata, make()
        return self._planned[1]

    def record(self, name: str, parts: Sequence[Tensor], metadata: Any, scale: float) -> None:
        """Record the tokens of one layer.

        Args:
            name: vLLM's name of the layer.
            parts: query [tokens of the step, H, d], key and value [tokens, G, d].
            metadata: vLLM's attention metadata of the step.
            scale: factor of q . k.
        """
        from vllm.model_executor.models.utils import extract_layer_index

        assert self.reading is not None  # the caller has checked
        recording, chunk = self.reading
        if self._found is None or self._found[0] is not metadata:
            row = (metadata.block_table[:, 0] == chunk.block).nonzero()[0, 0]
            self._found = metadata, int(metadata.query_start_loc[row])
        own = slice(self._found[1], self._found[1] + chunk.count)
        query, key, value = (x[own] for x in parts)
        try:
            recording.add(extract_layer_index(name), chunk.start, query, key, value, scale)
        # The step's other requests continue, whatever an observer raises.
        except Exception as error:
            self.reading = None
            recording.fail(error)


_current: Step | None = None


def set_step(step: Step | None) -> None:
    """Set the step that attention layers see, or None."""
    global _current
    _current = step


def current_step() -> Step | None:
    """The running step, or None if it has neither contexts nor a recording."""
    return _current


class ContextAttention(abc.ABC):
    """Stock attention for all tokens, then attention over context and pages for those with one.

    vLLM writes keys and values as usual, so pages hold question and answer, and may be moved or
    dropped as usual. List this class before the stock implementation.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float

    @property
    def group(self) -> int:
        """Number of query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor,
        attn_metadata: Any, output: Tensor, output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None
    ) -> Tensor:  # fmt: skip
        """Write `output` in place and return it, as vLLM's operator requires.

        Args:
            layer: vLLM's.
            query: [tokens of the step, H, d].
            key: [tokens, G, d], already in the pages.
            value: [tokens, G, d].
            kv_cache: [blocks, G, block, 2d].
            attn_metadata: vLLM's for the step, or None while vLLM measures memory.
            output: [tokens, H, d].
            output_scale: scale of a quantised output, which never occurs with contexts.
            output_block_scale: likewise.
        """
        running = None if attn_metadata is None else current_step()
        batch = None
        if running is not None and running.reading is not None:
            running.record(layer.layer_name, (query, key, value), attn_metadata, self.scale)
        if running is not None and running.asking:
            batch = running.plan(attn_metadata, lambda: self.plan(running, attn_metadata, kv_cache))
        if batch is None or not batch.covers_all:
            stock: Any = super()
            ours = layer, query, key, value, kv_cache, attn_metadata, output
            stock.forward(*ours, output_scale, output_block_scale)
        if batch is not None:
            heads = (-1, self.num_heads, self.head_size)
            asked = (query.view(heads), kv_cache, attn_metadata, output.view(heads))
            self.attend(batch, LayerCall(layer, *asked))
        return output

    @abc.abstractmethod
    def plan(self, running: Step, metadata: Any, kv_cache: Tensor) -> Any:
        """The plan of the step's work over contexts, with `covers_all`; None if there is none.

        Args:
            running: the step.
            metadata: vLLM's attention metadata of the step.
            kv_cache: [blocks, G, block, 2d] of any layer.
        """

    @abc.abstractmethod
    def attend(self, batch: Any, call: LayerCall) -> None:
        """Write those rows of `call.output` whose tokens have a context; `batch` is the plan."""

    @abc.abstractmethod
    def warm_up(self, kv_cache: Tensor) -> None:
        """Compile the kernels of `attend`, so that no request waits for the compiler.

        `kv_cache` [blocks, G, block, 2d] of any layer is only read.
        """
