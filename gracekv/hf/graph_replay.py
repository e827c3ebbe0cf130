"""Decoding steps of one token as a CUDA graph that `model.generate` replays.

At batch 1 the kernels of a step take less time than their launches from Python; a graph launches
all of them at once. Sampling, penalties and stopping stay with `generate`: only the model's forward
is recorded. Source: CUDA graphs; ours: what is recorded, and growth by a new tail and graph.
"""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module
from transformers import GenerationMixin

from gracekv.hf.cache import GraceCache
from gracekv.hf.input_checks import before_forward, before_masks
from gracekv.prefill.cache_keyword import NAMES, cache_keyword, given_cache
from gracekv.prefill.model_layers import own_decoder, rope_parameters
from gracekv.prefill.options import is_out_of_memory
from gracekv.undo import replaced_forward

# Places of the first static tail; each further one is twice as long. Ours.
_FIRST_CAPACITY = 128
# Fewer new tokens do not repay the steps that warm up and record. Ours.
_FEWEST_TOKENS = 16
# Steps before recording: the first compiles kernels, libraries choose theirs in the second.
_WARM_UP_STEPS = 2
# Options of `generate` that change rows, and those that feed several tokens per step or keep more
# than the logits.
_ROWS = ("num_beams", "num_return_sequences")
_UNSUITED = (
    "assistant_early_exit", "assistant_model", "cache_implementation", "compile_config",
    "custom_generate", "dola_layers", "generation_config", "output_attentions",
    "output_hidden_states", "penalty_alpha", "prefill_chunk_size", "prompt_lookup_num_tokens",
    "use_mtp",
)  # fmt: skip
_lock = threading.Lock()
# A second recording at the same time would end both.
_recording = threading.Lock()
# Models whose step could not be recorded. Each attempt takes several steps, and with torch before
# 2.14 some of the GPU's memory.
_unrecordable: weakref.WeakSet[Any] = weakref.WeakSet()


def setting(model: Any, options: Mapping[str, Any], name: str) -> Any:
    """A setting's value: from the options, else their config, else the model's config."""
    if name in options:
        return options[name]
    given = getattr(options.get("generation_config"), name, None)
    return getattr(model.generation_config, name, None) if given is None else given


def suits(model: Any, cache: GraceCache, max_new_tokens: int, options: Mapping[str, Any]) -> bool:
    """Whether generation with these `options` replays a graph: plain steps on one NVIDIA GPU.

    peft's and torch.compile's wrappers run another module's forward than their own. A replay runs
    no hooks.
    """
    return (
        isinstance(model, GenerationMixin)
        and model not in _unrecordable
        # Layers of bitsandbytes in 8 bits look for outliers, for which the host waits.
        and not getattr(model, "is_loaded_in_8bit", False)
        and not cache.packed.other_layers
        and cache.grace_layers[0].packed.entries.device.type == "cuda"
        and max_new_tokens >= _FEWEST_TOKENS
        and all(setting(model, options, name) in (None, 1) for name in _ROWS)
        and not any(setting(model, options, name) for name in _UNSUITED)
        and setting(model, options, "use_cache") is not False
        and {x.device for x in model.parameters()} == {cache.grace_layers[0].packed.entries.device}
        # These branch on a number on the GPU, which aborts a recording.
        and rope_parameters(model).get("rope_type") not in ("dynamic", "longrope")
        and all(layer.packed.backend.name == "triton" for layer in cache.grace_layers)
        and not _has_hooks(model)
        and not any(map(_is_compiled, model.modules()))
    )


def _is_compiled(part: Any) -> bool:
    """Whether torch.compile has been applied to a module, in place or as a wrapper."""
    own = vars(part).get("forward")
    return part._compiled_call_impl is not None or hasattr(own, "_torchdynamo_orig_callable")


def _end_failed(device: torch.device, pool: Any) -> None:
    """Undo what torch before 2.13 leaves set after a recording that failed."""
    if torch.__version__ >= "2.13":  # torch compares the numbers
        return
    # The generator is still marked as recording, and would refuse to draw numbers.
    generator = torch.cuda.default_generators[device.index]
    generator.graphsafe_set_state(generator.clone_state())
    # The allocator still serves the graph's pool, and would never free cached memory.
    before = "_cuda_endAllocateCurrentStreamToPool"  # before 2.8
    end = getattr(torch._C, "_cuda_endAllocateToPool", None) or getattr(torch._C, before)
    # It refuses if the recording itself ended well.
    with suppress(RuntimeError):
        end(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)


def _has_hooks(model: Any) -> bool:
    """Whether the model runs hooks other than ours and transformers' own, which stay installed."""
    every = (module._global_forward_hooks, module._global_forward_pre_hooks)
    by_module = (y for x in model.modules() for y in (x._forward_hooks, x._forward_pre_hooks))
    hooks = (hook for table in (*every, *by_module) for hook in table.values())
    ours, theirs = (before_forward, before_masks), "transformers.utils.output_capturing"
    return any(x not in ours and getattr(x, "__module__", "") != theirs for x in hooks)


@contextmanager
def replaying(model: Any, cache: GraceCache, max_new_tokens: int) -> Iterator[GraceCache]:
    """Yield the cache to generate with, a static one whose steps `model.forward` then replays.

    Yields `cache` itself if another thread replays steps of the same model.
    """
    with ExitStack() as stack:
        with _lock:
            if not isinstance(vars(model).get("forward"), ReplayedForward):
                forward = ReplayedForward(model, cache, max_new_tokens)
                stack.enter_context(replaced_forward(model, forward))
                cache = forward.cache
        yield cache


@functools.lru_cache(maxsize=32)
def _side_stream(device: torch.device, model: int) -> torch.cuda.Stream:
    """The stream for all recordings of the model with this `id`.

    cuBLAS keeps a workspace for each stream that it has seen. Since torch 2.12, the end of a graph
    frees that of its stream, which another model's graph may still use.
    """
    return torch.cuda.Stream(device)


class ReplayedForward:
    """A `model.forward` that replays a recorded step of one token per row over its own cache.

    All other calls, such as those with other caches, go to the model's own forward. On CPUs the
    same step runs without being recorded.

    Args:
        model: an attached model.
        cache: the cache to continue.
        max_new_tokens: bounds the tail.

    Attributes:
        cache: a static cache that continues the one given.
        records: whether steps become CUDA graphs; otherwise the same step runs unrecorded.
        recordings: how many graphs were recorded.
    """

    def __init__(self, model: Any, cache: GraceCache, max_new_tokens: int) -> None:
        self._forward, self._model = model.forward, model
        # `generate` reads the signature to decide which arguments to pass.
        self.__signature__ = inspect.signature(self._forward)
        first = cache.grace_layers[0]
        self._used = int(first.tail_length)
        self._most = self._used + max_new_tokens
        self._rows, device = first.batch, first.packed.entries.device
        self._start = (cache.packed_length - cache.packed_padding(self._rows, device))[:, None]
        self.cache = cache.with_static_tail(min(_FIRST_CAPACITY, self._most))
        # `generate` must neither compile the step nor make 4D masks for it.
        for layer in self.cache.layers:
            layer.is_compileable = False
        self.records, self.recordings = self._start.is_cuda, 0
        self._options: dict[str, Any] | None = None
        self._config, self._experts = own_decoder(model).config, None
        self._ids = torch.zeros(self._rows, 1, dtype=torch.int64, device=device)
        self._graph: Any = None
        self._output: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        ids, cache = kwargs.get("input_ids"), given_cache(kwargs)
        if args or cache is not self.cache or ids is None:
            return self._forward(*args, **kwargs)
        self._most += ids.shape[1] - 1
        self._make_room(ids.shape[1])
        self._used += ids.shape[1]
        given = (*NAMES, "input_ids", "attention_mask", "position_ids", "cache_position")
        options = {name: value for name, value in kwargs.items() if name not in given}
        if ids.shape != self._ids.shape or any(isinstance(x, Tensor) for x in options.values()):
            return self._forward(**kwargs)
        self._ids.copy_(ids)
        # `generate` switches the experts' implementation of a mixture at the second token.
        experts = getattr(self._config, "_experts_implementation", None)
        if (options, experts) != (self._options, self._experts):
            self._options, self._experts, self._graph = options, experts, None
            # The first token's `grouped_mm` waits for the GPU in most dtypes and on most GPUs.
            if self.records and experts != "grouped_mm":
                with _recording:
                    self._record()
        if self._graph is None:
            return self._step()
        self._graph.replay()
        return self._output

    def _make_room(self, tokens: int) -> None:
        """Make the tail hold `tokens` more; a longer one needs another graph."""
        capacity = self.cache.layers[0].capacity
        if self._used + tokens > capacity:
            capacity = max(self._used + tokens, min(2 * capacity, self._most))
            larger = self.cache.with_static_tail(capacity)
            self.cache.layers, self.cache.grace_layers = larger.layers, larger.grace_layers
            for layer in self.cache.layers:
                layer.is_compileable = False
            self._options = self._graph = self._output = None

    def _step(self) -> Any:
        """One token per row, with every tensor read at its fixed address."""
        options = {cache_keyword(self._forward): self.cache, **(self._options or {})}
        length = self.cache.layers[0].length
        places = self._start + length[:, None]
        fed = {"input_ids": self._ids, "attention_mask": None, "position_ids": places}
        # `generate` still passes it to models of remote code.
        if "cache_position" in self.__signature__.parameters:
            fed["cache_position"] = length[:1] + self.cache.packed_length
        self.cache.is_replayed = True
        try:
            return self._forward(**fed, **options)
        finally:
            self.cache.is_replayed = False

    def _record(self) -> None:
        """Record a step on a side stream; afterwards the tail is as before."""
        lengths = [layer.length for layer in self.cache.layers]
        before = [length.clone() for length in lengths]

        def restore() -> None:
            for length, old in zip(lengths, before, strict=True):
                length.copy_(old)

        device = self._ids.device
        current, side = torch.cuda.current_stream(device), _side_stream(device, id(self._model))
        side.wait_stream(current)
        graph, pool, began = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle(), False
        kind: dict[str, Any] = {"pool": pool, "stream": side, "capture_error_mode": "thread_local"}
        with torch.cuda.stream(side):
            try:
                for _ in range(_WARM_UP_STEPS):
                    self._step()
                    restore()
                current.wait_stream(side)
                began = True
                # torch's default capture stream is on the GPU that was current when it was made, so
                # nothing of a model on another GPU would be recorded. A failed recording leaves its
                # stream current; the outer block resets that.
                with torch.cuda.graph(graph, **kind):
                    self._output = self._step()
                self._graph, self.recordings = graph, self.recordings + 1
            except RuntimeError as error:
                # There may be more memory the next time.
                self.records, again = False, is_out_of_memory(error)
                if began:
                    _end_failed(device, pool)
                else:
                    # Some layers may be a step ahead.
                    restore()
                    current.wait_stream(side)
                    if not again:
                        raise
                if not again:
                    _unrecordable.add(self._model)
                warnings.warn(
                    f"A decoding step of {type(self._model).__name__} could not be recorded as a "
                    f"CUDA graph ({error}); {'this answer is' if again else 'its answers are'} "
                    f"generated without one.",
                    stacklevel=2,
                )
