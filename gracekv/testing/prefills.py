"""Synthetic prefills, and a check that an observer keeps its contract on one.

They have structure: topics, coherent slots, and a few tokens of high attention.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any, get_args

import torch
from torch import Tensor

from gracekv.kernels.rope import Rope
from gracekv.prefill import Observer, PassObserver, Prefill, PromptSpans
from gracekv.prefill.observations import Observations
from gracekv.prefill.observer import FinalRun, Source, TokenRun
from gracekv.prefill.projection import Projection
from gracekv.prefill.spans import widened
from gracekv.segment.curvature import BlockInput
from gracekv.segment.surprisal import Surprisal
from gracekv.value.critical import WrittenNorms
from gracekv.value.draft_attention import Draft
from gracekv.value.kvzip_two_pass import Reconstruction
from gracekv.value.output_projection import ProjectedNorms, ProjectionNorms
from gracekv.value.repeated_attention import RepeatedQueries


def normal(rng: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal random numbers [*shape] from `rng`, whatever torch's default dtype."""
    return torch.randn(*shape, generator=rng, dtype=dtype)


def synthetic_prefill(
    *,
    layers: int = 2,
    kv_heads: int = 2,
    group: int = 2,
    dim: int = 16,
    context: int = 96,
    prefix: int = 4,
    question: int = 8,
    tail: int = 3,
    hidden_dim: int = 24,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Prefill:
    """A `Prefill` of prefix + context + question + tail tokens, with every capture present.

    Hidden states wander around topics that change every few dozen tokens; keys, values and
    queries are noisy projections of them, so slots cohere and a few tokens draw most attention.
    """
    rng = torch.Generator().manual_seed(seed)

    draw = partial(normal, rng, dtype=torch.float64)
    length = prefix + context + question + tail
    spans = PromptSpans(prefix, prefix + context, prefix + context + question, length)
    topic = torch.randint(0, 5, (length // 12 + 1,), generator=rng).repeat_interleave(12)[:length]
    hidden = 2.0 * draw(5, hidden_dim)[topic] + 0.3 * draw(length, hidden_dim).cumsum(0)
    hidden = hidden + 0.5 * draw(length, hidden_dim)
    # As after a model's input norm, so that logits have realistic magnitudes.
    normed = hidden / hidden.square().mean(-1, keepdim=True).sqrt()
    rope = Rope.of_theta(length, dim)
    positions = torch.arange(length)

    def project(heads: int, rotate: bool) -> Tensor:
        flat = normed @ draw(hidden_dim, heads * dim) / hidden_dim**0.5
        x = flat.view(length, heads, dim).transpose(0, 1)
        return (rope.rotate(x, positions) if rotate else x).to(dtype).contiguous()

    heads = kv_heads * group
    keys = tuple(project(kv_heads, True) for _ in range(layers))
    values = tuple(project(kv_heads, False) for _ in range(layers))
    queries = tuple(project(heads, True) for _ in range(layers))

    # Any depth may be requested, so every layer's input is included.
    inputs = [(hidden + i * draw(length, hidden_dim) * 0.1).to(dtype) for i in range(layers)]
    repeated = torch.stack(queries)[:, :, prefix:][:, :, :context]
    observed: dict[Observer, Tensor] = {
        **{BlockInput(i / layers): x for i, x in enumerate(inputs)},
        Surprisal(): draw(length).abs().float(),
        ProjectedNorms(): draw(layers, kv_heads, len(spans.question_probes())).abs().float() + 0.1,
        ProjectionNorms(): draw(layers, heads).abs().float() + 0.1,
        WrittenNorms(): draw(layers, kv_heads, length).abs().float() + 0.1,
        Reconstruction(): draw(layers, kv_heads, context).abs().float().tanh(),
        RepeatedQueries(512): repeated[:, :, :512],
        RepeatedQueries(4096): repeated[:, :, :4096],
        RepeatedQueries(192, 2048): repeated[:, :, :192],
        Draft(64): draw(layers, kv_heads, 5, context).float().softmax(dim=-1),
        Reconstruction(power=3.0): draw(layers, kv_heads, context).abs().float().tanh(),
    }
    return Prefill(
        spans=spans,
        token_ids=torch.arange(length),
        scale=dim**-0.5,
        keys=tuple(x.to(device) for x in keys),
        values=tuple(x.to(device) for x in values),
        queries=tuple(x.to(device) for x in queries),
        query_positions=positions,
        rope=Rope(rope.cos.to(device), rope.sin.to(device)),
        observed={observer: x.to(device) for observer, x in observed.items()},
    )


_HIDDEN, _VOCABULARY = 24, 40


def check_observer(
    observer: Observer, seed: int = 0, *, rtol: float = 1e-3, atol: float = 1e-4
) -> Tensor:
    """Check `observer` on a random prompt and return its result, [...].

    Raises `AssertionError` unless it is a hashable value, and its result has the declared shape, is
    finite, and is the same (within `rtol` and `atol`) however the tokens are split into runs,
    whichever layer comes first, whatever follows a run in memory, and even though all tensors are
    overwritten after each run. The prompt follows packed entries if `seed` is odd and the observer
    does not run the model again.
    """
    name = repr(observer)
    assert dataclasses.is_dataclass(observer), f"{name} is not a dataclass."
    again = dataclasses.replace(observer)
    assert again == observer, f"{name} is not equal to a copy of itself."
    assert hash(again) == hash(observer), f"{name} and a copy of itself have different hashes."
    assert observer.reads <= set(get_args(Source)), f"{name} reads an unknown source."
    prefill = synthetic_prefill(context=90, prefix=6, question=9, layers=3, seed=seed)
    if seed % 2 and not isinstance(observer, PassObserver):
        spans = dataclasses.replace(prefill.spans, past=4)
        scales = {"keys": None, "values": None, "queries": prefill.scale}
        wide: dict[str, Any] = {
            name: tuple(widened(x, scale) for x in getattr(prefill, name))
            for name, scale in scales.items()
        }
        prefill = dataclasses.replace(prefill, spans=spans, observed={}, **wide)
    drive, draw = _Driver(prefill, seed), random.Random(seed)
    seen = drive(observer, [prefill.spans.past, prefill.spans.length])
    # Checks shape and numbers.
    dataclasses.replace(prefill, observed={observer: seen})
    for by_layer in (False, True):
        inner = range(prefill.spans.past + 1, prefill.spans.length)
        cuts = sorted(draw.sample(inner, draw.randint(1, 6)))
        edges = [prefill.spans.past, *cuts, prefill.spans.length]
        other = drive(observer, edges, by_layer=by_layer)
        told = partial("{}, tokens split at {}: {}".format, name, edges)
        torch.testing.assert_close(other, seen, rtol=rtol, atol=atol, msg=told)
    return seen


def with_observed(prefill: Prefill, observers: Iterable[Observer], seed: int = 0) -> Prefill:
    """`prefill` with the results of `observers`; inputs from a model are random."""
    drive, edges = _Driver(prefill, seed), [prefill.spans.past, prefill.spans.length]
    seen = {observer: drive(observer, edges) for observer in observers}
    return dataclasses.replace(prefill, observed={**prefill.observed, **seen})


class _Driver:
    """Shows a prompt as a model would, in copies that are overwritten after each run."""

    def __init__(self, prefill: Prefill, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        self._prefill, length = prefill, prefill.spans.length
        heads, dim = prefill.query_heads, prefill.info.entry_dim
        self._hidden = normal(rng, prefill.layers, length, _HIDDEN)
        self._outputs = normal(rng, prefill.layers, heads, length, dim)
        self._projection = _linear(heads * dim, _HIDDEN, rng)
        self._head = _linear(_HIDDEN, _VOCABULARY, rng)
        self._ids = torch.randint(_VOCABULARY, (length,), generator=rng)

    def __call__(self, observer: Observer, edges: list[int], *, by_layer: bool = False) -> Tensor:
        prefill = self._prefill
        found = Observations([observer], prefill.layers, prefill.spans)
        runs = list(itertools.product(range(prefill.layers), itertools.pairwise(edges)))
        if not by_layer:
            runs.sort(key=lambda run: run[1])
        for layer, (start, end) in runs:
            lent = self._run(observer, layer, start, end)
            found.add(layer, lambda lent=lent: lent)  # type: ignore[misc]
            for name in ("queries", "keys", "values", "hidden", "outputs"):
                if getattr(lent, name) is not None:
                    getattr(lent, name).fill_(torch.nan)
        for start, end in itertools.pairwise(edges):
            following = self._ids[start + 1 : end + 1].clone()
            states = self._hidden[-1, start : start + len(following)].clone()
            if len(following):
                found.add_final(FinalRun(start, states, following, self._head, _VOCABULARY))
                states.fill_(torch.nan)
        passes = _Passes(prefill, self._ids) if "passes" in observer.reads else None
        return found.results(torch.device("cpu"), passes)[observer]

    def _run(self, observer: Observer, layer: int, start: int, end: int) -> TokenRun:
        prefill, reads = self._prefill, observer.reads
        own = {
            "hidden": self._hidden[layer, start:end].clone(),
            "outputs": self._outputs[layer, :, start:end].clone(),
            "projection": Projection(self._projection, self._projection.in_features),
        }
        queries = prefill.queries[layer][:, start:end].clone()
        keys, values = _known(prefill.keys[layer], end), _known(prefill.values[layer], end)
        given: dict[str, Any] = {name: x for name, x in own.items() if name in reads}
        rope = prefill.rope_of(layer)
        return TokenRun(start, queries, keys, values, rope, prefill.scale, **given)


class _Passes:
    """A "model" whose keys and queries are looked up by token."""

    def __init__(self, prefill: Prefill, ids: Tensor) -> None:
        self.spans: PromptSpans = prefill.spans
        self.ids, self.first, self.stops, self.prefill = ids, 7, frozenset[int](), prefill
        self.tail = ids[self.spans.question_end :]
        rng = torch.Generator().manual_seed(1)
        heads, groups, dim = prefill.query_heads, prefill.kv_heads, prefill.head_dim
        self.queries = normal(rng, _VOCABULARY, prefill.layers, heads, dim)
        self.keys = normal(rng, _VOCABULARY, prefill.layers, groups, dim)

    def after(self, end: int, count: int) -> Any:
        known: list[int] = []

        def run(ids: Tensor, observe: Callable[[int, TokenRun], None]) -> Tensor:
            start = end + len(known)
            known.extend(ids.tolist())
            assert len(known) <= count, "More tokens run than were announced."
            for layer, keys in enumerate(self.prefill.keys):
                whole = torch.cat([keys[:, :end], self.keys[known, layer].transpose(0, 1)], dim=1)
                queries = self.queries[ids, layer].transpose(0, 1).clone()
                scale, rope = self.prefill.scale, self.prefill.rope
                observe(layer, TokenRun(start, queries, whole, whole.clone(), rope, scale))
            return self.queries[int(ids[-1]), 0].flatten()

        return SimpleNamespace(run=run)

    def likeliest(self, state: Tensor) -> int:
        return int(state.argmax()) % _VOCABULARY

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % _VOCABULARY for letter in text]


def _known(states: Tensor, end: int) -> Tensor:
    """A copy of [G, T, d] with NaN from `end` on."""
    copy = states.clone()
    copy[:, end:] = torch.nan
    return copy


def _linear(inputs: int, outputs: int, rng: torch.Generator) -> torch.nn.Linear:
    module = torch.nn.Linear(inputs, outputs, bias=False).requires_grad_(False)
    module.weight.copy_(normal(rng, outputs, inputs))
    return module
