"""`capture`: one standard forward pass, and everything that compression reads from it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gracekv.errors import PromptError, UnsupportedModelError
from gracekv.prefill.attention_patch import patched_attention
from gracekv.prefill.base import Needs, Prefill, depth_layers
from gracekv.prefill.draft import draft
from gracekv.prefill.fingerprint import fingerprint
from gracekv.prefill.length_limits import check_prompt_length
from gracekv.prefill.projection import projected_norms, projection_norms
from gracekv.prefill.prompt import Prompt
from gracekv.prefill.reconstruction import reconstruction
from gracekv.prefill.supported import check_model
from gracekv.prefill.surprisal import surprisal
from gracekv.rope import Rope

EVERYTHING = Needs(
    context_queries=True,
    hidden_depths=frozenset({0.33, 0.5, 0.67, 0.75}),
    surprisal=True,
    head_outputs=True,
)
"""What `capture` keeps unless told less: all that the strategies with default fields read of one
pass. What runs the model again (`reconstruction`, `draft`) is made only when asked for."""

# Queries kept beside the direct probes: the observation windows of window-based scorers.
_WINDOW = 32


@torch.no_grad()
def capture(model: Any, prompt: Prompt, needs: Needs | None = None) -> Prefill:
    """Run the model once over the prompt and keep what compression reads.

    The pass is the stock one: its keys, values and last logits are those of `model(ids)`. While it
    runs, a temporary attention function and hooks listen; afterwards, or if it fails, the model
    and transformers' registries are as before. Not for two threads with one model at a time.

    Args:
        model: a transformers causal language model of a tested family, in evaluation mode, with
            "sdpa" or "eager" attention.
        prompt: one sequence.
        needs: what to keep beyond keys and values; default: `EVERYTHING`. The queries of every
            position (`context_queries`) are the large part: L*H*T*d numbers of the model's dtype,
            H/(2G) times the memory of keys and values together. Without them the queries of the
            direct probes and of the last 32 positions of prompt and context stay, or of as many
            as `last_queries` asks for.

    Raises:
        UnsupportedModelError: the model breaks an assumption, has a sliding window that does not
            cover the prompt, or is in training mode.
        PromptError: `prompt` is not a `Prompt`, has ids outside the vocabulary, or a length at
            which transformers drops the cache.
        NonFiniteError: keys, values or queries hold NaN or infinity.

    Warns (`LengthWarning`) about a prompt longer than what the model was made for.
    """
    check_model(model)
    if not isinstance(prompt, Prompt):
        raise PromptError(
            f"capture takes one Prompt; got {type(prompt).__name__}. Build it with "
            f"Prompt.from_chat or Prompt.from_ids."
        )
    embeddings = model.get_input_embeddings()
    if int(prompt.ids.max()) >= embeddings.num_embeddings:
        raise PromptError(
            f"The prompt holds token id {int(prompt.ids.max())}, the model knows "
            f"{embeddings.num_embeddings}. Use the tokenizer that belongs to the model."
        )
    check_prompt_length(model, prompt.spans.length)
    needs = EVERYTHING if needs is None else needs
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    layers = list(decoder.layers)
    record = _Record(_query_positions(prompt, needs), prompt.spans.question_probes(), needs)
    ids = prompt.ids[None].to(input_device(model))

    seconds: dict[str, float] = {}
    with _clock(seconds, "prefill", ids.device), _listening(model, layers, record):
        output = model(input_ids=ids, use_cache=False, logits_to_keep=1)
    found = None
    if needs.surprisal:
        with _clock(seconds, "surprisal", ids.device):
            found = surprisal(record.final, head, prompt.ids, model.config.vocab_size)
    repeated = None
    if needs.reconstruction:
        with _clock(seconds, "reconstruction", ids.device):
            keys, values = (
                [x[i] for i in range(len(layers))] for x in (record.keys, record.values)
            )
            repeated = reconstruction(model, prompt, keys, values, ids.device)
    drafted = None
    if needs.draft:
        with _clock(seconds, "draft", ids.device):
            keys, values = (
                [x[i] for i in range(len(layers))] for x in (record.keys, record.values)
            )
            last = output.logits[0, -1]
            drafted = draft(model, prompt, keys, values, last, needs.draft, ids.device)
    outputs = projected = weights = None
    if needs.head_outputs:
        with _clock(seconds, "projections", ids.device):
            by_layer = [record.outputs[layer] for layer in range(len(layers))]
            groups = record.keys[0].shape[0]
            modules = [layer.self_attn.o_proj for layer in layers]
            # Layers of a sharded model lie on several devices; these few numbers go to the first.
            first = by_layer[0].device
            outputs = torch.stack([x.to(first) for x in by_layer])
            projected = torch.stack(
                [
                    projected_norms(module, x, groups).to(first)
                    for module, x in zip(modules, by_layer, strict=True)
                ]
            )
            weights = torch.stack(
                [
                    projection_norms(module, x).to(first)
                    for module, x in zip(modules, by_layer, strict=True)
                ]
            )
    return Prefill(
        spans=prompt.spans,
        keys=tuple(record.keys[layer] for layer in range(len(layers))),
        values=tuple(record.values[layer] for layer in range(len(layers))),
        queries=tuple(record.queries[layer] for layer in range(len(layers))),
        query_positions=record.query_positions,
        rope=record.rope(),
        scale=record.scale,
        hidden=record.hidden,
        surprisal=found,
        head_outputs=outputs,
        projected_norms=projected,
        projection_norms=weights,
        reconstruction=repeated,
        draft=drafted,
        logits=output.logits[0, -1],
        token_ids=prompt.ids,
        fingerprint=fingerprint(model, prompt.tokenizer),
        seconds=seconds,
    )


@dataclass(slots=True, eq=False)
class _Record:
    """What the attention function and the hooks write down during the pass."""

    query_positions: Tensor
    output_positions: list[int]
    needs: Needs
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    queries: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)
    hidden: dict[int, Tensor] = field(default_factory=dict)
    rotation: Any = None
    final: Any = None
    scale: float = 0.0

    def attention(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, output: Tensor, scale: float
    ) -> None:
        """query [1, H, T, d], key and value [1, G, T, d], output [1, T, H, d]."""
        every = len(self.query_positions) == query.shape[2]
        chosen = query[0] if every else query[0][:, self.query_positions.to(query.device)]
        self.queries[layer] = chosen.contiguous()
        self.keys[layer], self.values[layer] = key[0].contiguous(), value[0].contiguous()
        if self.needs.head_outputs:
            self.outputs[layer] = output[0, self.output_positions].transpose(0, 1).contiguous()
        self.scale = float(scale)

    def rope(self) -> Rope:
        """The table of positions 0..T-1, as the model passed it to its first attention."""
        pair = self.rotation
        if not isinstance(pair, tuple) or len(pair) != 2 or any(x.ndim != 3 for x in pair):
            raise UnsupportedModelError(
                "The model does not pass cos and sin [1, T, d] to its attention as "
                "`position_embeddings`, so its rotation cannot be captured."
            )
        cos, sin = (x[0].float() for x in pair)
        return Rope(cos, sin)


def input_device(model: Any) -> torch.device:
    """Where the model wants its token ids."""
    device: torch.device = model.get_input_embeddings().weight.device
    # Weights that accelerate offloads lie on "meta" between calls; its hooks move the ids.
    return torch.device("cpu") if device.type == "meta" else device


def _query_positions(prompt: Prompt, needs: Needs) -> Tensor:
    spans = prompt.spans
    if needs.context_queries:
        return torch.arange(spans.length)
    ends = (spans.length, spans.context_end)
    width = max(_WINDOW, needs.last_queries)
    windows = (range(max(0, end - width), end) for end in ends)
    return torch.tensor(sorted({*spans.direct_probes(), *itertools.chain(*windows)}))


@contextmanager
def _listening(model: Any, layers: list[Any], record: _Record) -> Iterator[None]:
    """Route the model's attention through a recorder, and hook what the recorder cannot see."""

    def recording(own: Any) -> Any:
        def attention(
            module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
        ) -> Any:
            output = own(module, query, key, value, mask, **kwargs)
            record.attention(module.layer_idx, query, key, value, output[0], kwargs["scaling"])
            return output

        return attention

    with ExitStack() as undo:
        undo.enter_context(patched_attention(model, recording))
        if record.needs.hidden_depths:
            for layer in depth_layers(sorted(record.needs.hidden_depths), len(layers)):

                def block_input(module: Any, args: Any, kwargs: Any, layer: int = layer) -> None:
                    stream = args[0] if args else kwargs["hidden_states"]
                    record.hidden[layer] = stream[0]

                hook = layers[layer].register_forward_pre_hook(block_input, with_kwargs=True)
                undo.callback(hook.remove)

        def rotation(module: Any, args: Any, kwargs: Any) -> None:
            record.rotation = kwargs.get("position_embeddings")

        hook = layers[0].self_attn.register_forward_pre_hook(rotation, with_kwargs=True)
        undo.callback(hook.remove)
        if record.needs.surprisal:

            def final(module: Any, args: Any, output: Any) -> None:
                record.final = output.last_hidden_state[0]

            undo.callback(model.get_decoder().register_forward_hook(final).remove)
        yield


@contextmanager
def _clock(seconds: dict[str, float], part: str, device: torch.device) -> Iterator[None]:
    start = time.perf_counter()
    yield
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds[part] = time.perf_counter() - start
