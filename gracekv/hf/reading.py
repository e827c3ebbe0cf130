"""`Reading`: runs a prompt through a model, in chunks of tokens.

`by_chunks` runs each chunk through all layers before the next chunk, and holds the keys and values
of all layers at the end. `by_layers` runs all chunks through a layer before the next layer, and
holds the residual stream and the keys and values of one layer. Both use the stock model: in
`by_layers` the forward of each chunk is a coroutine that pauses before every decoder layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import copy_context
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gracekv.distributed.sharding import head_shard
from gracekv.errors import LayerOrderError, required
from gracekv.kernels.uploads import upload
from gracekv.prefill.attention_patch import base_attention, own_thread, patched_attention
from gracekv.prefill.fingerprint import fingerprint
from gracekv.prefill.layer_capture import CaptureInfo, FiniteChecks, LayerCapture, check_observation
from gracekv.prefill.layer_state import LayerState
from gracekv.prefill.model_layers import (
    compressed_layers,
    final_logits,
    has_rope,
    input_device,
    rotary_positions,
    rotation_table,
    text_config,
)
from gracekv.prefill.needs import Needs
from gracekv.prefill.observations import Clock, Observations
from gracekv.prefill.observer import FinalRun, LayerObserver, Observer
from gracekv.prefill.options import trim_memory
from gracekv.prefill.partial_attention import CausalMasks, PartialAttention, rotations
from gracekv.prefill.prompt import Prompt
from gracekv.prefill.recorder import Recorder, no_rotation
from gracekv.prefill.spans import Past, Region
from gracekv.prefill.stock_cache import StockLayers
from gracekv.undo import hooked, undone

# Number of layers between returns of freed memory to the system. Returned memory must be allocated
# again, which takes longer than the return itself.
_TRIM = 4


# Known once the last layer was read: states of the layers that are not compressed, wall
# seconds of the forward pass ("prefill") and of each observer, and the fingerprint.
_End = tuple[tuple[LayerState, ...], Mapping[str | Observer, float], Mapping[str, str]]


class Reading:
    """Runs one prompt through a model; call `by_chunks` or `by_layers`, once.

    Args:
        model: as for `gracekv.capture`.
        prompt: the prompt to read.
        past: the packed entries that precede it, or None.
        needs: what to capture.
        held: int64 [n] ascending, the positions whose queries are held.
        size: maximum tokens of a chunk.
        progress: called with the tokens done and the total; in `by_layers`, each layer counts as
            an equal part of a token.

    Attributes:
        record: the captured keys, values and queries.
        observations: the observers and their results.
        others: the layers that are not compressed.
        shard: which KV heads this process holds.
        seconds: wall seconds so far, of the model's forward ("prefill") and of each observer.
    """

    def __init__(
        self,
        model: Any,
        prompt: Prompt,
        past: Past | None,
        needs: Needs,
        held: Tensor,
        size: int,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.model, self.prompt, self._past, self._progress = model, prompt, past, progress
        self.shard = head_shard(model)
        self.layers, self.device = compressed_layers(model), input_device(model)
        self.observations = Observations(needs.observers, len(self.layers), prompt.spans)
        self.record = Recorder(self.observations, held, self.layers)
        past_layers, past_length = ((), 0) if past is None else (past.other_layers, past.length)
        self.others, self._clock = StockLayers(model, past_layers, past_length), Clock[str]()
        length, start = prompt.spans.length, prompt.spans.past
        self._total, edges = length - start, self.others.edges(start, length, size)
        self._chunks = [Region(*pair) for pair in itertools.pairwise(edges)]
        self._in_parts = len(self._chunks) > 1 or past is not None
        self._places = torch.arange(length, device=self.device)[None]
        self._base = base_attention(model)
        self._masks = CausalMasks(self._base, length)

    @property
    def seconds(self) -> Mapping[str | Observer, float]:
        """Wall seconds so far, of the model's forward ("prefill") and of each observer."""
        times = self.observations.seconds
        # These run inside the model's forward.
        inside = sum(took for x, took in times.items() if isinstance(x, LayerObserver))
        return {"prefill": self._clock.seconds()["prefill"] - inside} | times

    def by_chunks(self) -> Tensor:
        """Capture all layers in `record`; returns the last logits [V]."""
        output: Any = None
        with self._patch():
            for chunk in self._chunks:
                self._begin(chunk)
                output = self._time(partial(self._forward, chunk))
                self.others.read(self.prompt.spans.length - chunk.end)
                self._finish(chunk)
                self._tell(chunk.end - self.prompt.spans.past)
        logits: Tensor = output.logits[0, -1]
        return logits

    def by_layers(self, each: Callable[[int], None]) -> None:
        """Run all chunks through a layer, then through the next.

        Args:
            each: called with the number of each compressed layer, 0-based, once `record` holds all
                of it. It drops the layer from `record`.

        Raises `LayerOrderError` if the model does not call its layers one after the other, or its
        forward changes torch's settings.
        """
        greenlets = required("greenlet", "hf")
        driver, blocks = greenlets.getcurrent(), self.model.get_decoder().layers
        index = {layer.number: i for i, layer in enumerate(self.layers)}

        def pause(number: int, module: Any, args: Any) -> None:
            driver.switch(number)

        runs: list[Any] = []
        # An error also ends the paused forwards, newest first: each restores the settings of torch
        # that it found.
        with self._patch(), hooked() as hooks, undone(lambda: [x.throw() for x in runs[::-1]]):
            for number, block in enumerate(blocks):
                # Before the recorder's hooks, which belong to the chunk that resumes.
                hook = own_thread(partial(pause, number))
                hooks.append(block.register_forward_pre_hook(hook, prepend=True))
            runs += [greenlets.greenlet(partial(self._forward, chunk)) for chunk in self._chunks]
            for chunk, run in zip(self._chunks, runs, strict=True):
                run.gr_context = copy_context()
                self._begin(chunk)
                settings = _settings()
                with self.others.beginning(chunk.start - self.prompt.spans.past):
                    reached = self._time(run.switch)
                # Forwards end in the order in which they began, and each would restore the settings
                # that it found.
                self._check_order(reached if len(runs) == 1 or _settings() == settings else None, 0)
            for number in range(len(blocks)):
                tokens = 0
                for chunk, run in zip(self._chunks, runs, strict=True):
                    self._begin(chunk)
                    reached = self._time(run.switch)
                    self.others.read(self.prompt.spans.length - chunk.end, number)
                    self._check_order(len(blocks) if run.dead else reached, number + 1)
                    if run.dead:
                        self._finish(chunk)
                    tokens += chunk.length
                    self._tell((number * self._total + tokens) // len(blocks))
                if number in index:
                    each(index[number])

    def _check_order(self, reached: Any, number: int) -> None:
        if not isinstance(reached, int) or reached != number:
            raise LayerOrderError(
                f"{type(self.model).__name__} does not call its decoder layers one after the "
                f"other, or changes torch's settings while it runs (autocast, inference mode or "
                f"attention kernels), so it can only be read as a whole: "
                f"CaptureOptions(stream=False)."
            )

    def _tell(self, tokens: int) -> None:
        if self._progress is not None:
            past = 0 if self._past is None else self._past.length
            self._progress(past + tokens, past + self._total)

    def _time(self, run: Callable[[], Any]) -> Any:
        with self._clock.time("prefill", self.device):
            return run()

    def _begin(self, chunk: Region) -> None:
        """Route the next attention calls to `chunk`."""
        attend = None
        if self._in_parts:
            positions = torch.arange(chunk.start, chunk.end)
            attend = PartialAttention(self._base, positions, self._masks, self.prompt.spans.past)
        self.record.begin(chunk, attend)

    def _forward(self, chunk: Region) -> Any:
        options = self.others.options()
        if self._in_parts:
            options["position_ids"] = self._places[:, chunk.start : chunk.end]
        ids = upload(self.prompt.ids[None, chunk.start : chunk.end], self.device)
        return self.model(input_ids=ids, logits_to_keep=1, **options)

    def _finish(self, chunk: Region) -> None:
        """Show observers the decoder's output of a chunk."""
        following = self.prompt.ids[chunk.start + 1 : chunk.end + 1]
        if self.observations.reads("final") and len(following):
            factor, cap = final_logits(self.model)
            rows, self.record.final = self.record.final[: len(following)] * factor, None
            head = self.model.get_output_embeddings()
            size = text_config(self.model).vocab_size
            self.observations.add_final(FinalRun(chunk.start, rows, following, head, size, cap))

    @contextmanager
    def _patch(self) -> Iterator[None]:
        """Inside, the model records keys, values and queries; it is restored afterwards."""
        model, past, start = self.model, self._past, self.prompt.spans.past
        turned: AbstractContextManager[None] = nullcontext()
        if self._in_parts and has_rope(model):
            places = self._places
            if past is not None:
                places = torch.where(places < start, places, places - start + past.length)
            every = rotary_positions(model, places)
            turned = rotations(model.get_decoder(), lambda rope, x: rope(x, every.to(x.device)))
        with patched_attention(model, self.record.attend), self.record.hooks(model), turned:
            if past is not None:
                self.record.follow(past, _rotation(model, past, self._places[:, :start]))
            yield


def _settings() -> list[Any]:
    """Settings of torch that a `with` block changes in the thread or the process."""
    kernels, kinds = torch.backends.cuda, ("cpu", "cuda", "xpu")
    autocast = [(torch.is_autocast_enabled(x), torch.get_autocast_dtype(x)) for x in kinds]
    kinds_of_attention = kernels.flash_sdp_enabled(), kernels.math_sdp_enabled()
    return [*autocast, torch.is_inference_mode_enabled(), *kinds_of_attention]


def _rotation(model: Any, past: Past, places: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [1, P, d_rot] of the places of `past`."""
    if not has_rope(model):
        return no_rotation(past.places, places.device)
    return rotation_table(model, past.layers[0][0][0], places)


def layer_by_layer(reading: Reading, *, each: Callable[[LayerCapture], None], trims: bool) -> _End:
    """Read a layer at a time: `each` is called with every layer once it is whole.

    A layer's tensors are only valid during the call: the next layer overwrites them. Queries cannot
    be computed again, so all that are needed are held. `trims` returns freed CPU memory to the
    system in between; otherwise the heap would grow with every layer, since kept entries lie
    between freed blocks.
    """
    record, count = reading.record, len(reading.layers)
    devices: list[torch.device] = []
    checks = FiniteChecks()

    def show(number: int) -> None:
        keys, values, queries = record.layer(number)
        devices.append(keys.device)
        info = CaptureInfo(
            spans=reading.prompt.spans, layers=count, kv_heads=len(keys), query_heads=len(queries),
            head_dim=keys.shape[-1], dtype=keys.dtype, device=devices[0],
            query_positions=record.query_positions, scale=record.scale, softcap=record.softcap,
            token_ids=reading.prompt.ids, shard=reading.shard,
        )  # fmt: skip
        rope, sinks = record.rope_of(number), record.sinks.get(number)
        observed = reading.observations.layer_results(number, keys.device)
        capture = LayerCapture(info, number, keys, values, queries, rope, sinks, observed)
        capture.check(checks)
        for observer, seen in observed.items():
            check_observation(observer, observer.shape(info)[1:], seen, checks)
        each(capture)
        record.drop(number)
        if trims and reading.device.type == "cpu" and (number + 1 == count or number % _TRIM == 0):
            trim_memory()

    reading.by_layers(show)
    # After the layers, so that the host reads weights while a GPU still computes.
    identity = fingerprint(reading.model, reading.prompt.tokenizer)
    checks.finish()
    return reading.others.states, reading.seconds, identity
