"""A second pass in which the model repeats its context, and the attention that it pays meanwhile.

Chunk after chunk, the model reads a request to repeat, the prompt's tail (the template's change of
turn, and the answer prefix if there is one), and then the chunk itself, with the keys and values of
prefix and context before it. A context token's score is the most attention from any query of this
pass, in any query head of its KV head's group. The softmax runs over the prompt's first
tokens, the chunk, and what was read so far: over the whole context it would need L H T^2 logits.

Source: Kim et al. (2025), KVzip, arXiv:2505.23416, with the texts and sizes of its code in kvpress.
The prompt's own tail in place of an empty chat's is ours; so is a pass without a request where the
prompt has no tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from einops import rearrange, reduce
from torch import Tensor

from gracekv.errors import UnsupportedModelError
from gracekv.prefill.attention_patch import base_attention, patched_attention
from gracekv.prefill.length_limits import longest_sequence
from gracekv.prefill.prompt import Prompt
from gracekv.prefill.spans import Region

_WHOLE = "\n\nRepeat the previous context exactly."
_PART = "\n\nRepeat the part of the previous context exactly, starting with"
# Context tokens repeated by one pass, how many of the chunk before lead into a later one, and the
# first prompt tokens that the softmax always holds.
_CHUNK, _LEAD, _SINKS = 2048, 8, 4
# Bytes of float32 logits at once.
_LOGITS = 64 * 2**20


@torch.no_grad()
def reconstruction(
    model: Any,
    prompt: Prompt,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    device: torch.device,
    *,
    chunk: int = _CHUNK,
) -> Tensor:
    """The most attention that each context token gets in the second pass, float32 [L, G, N].

    Beside the result it holds, of one layer at a time, the keys and values of prefix and context
    once more, the mask [chunk, T] and a block of logits. Costs about as much as a prefill of twice
    the context in chunks.

    Args:
        model: as for `capture`.
        prompt: what was prefilled.
        keys: L tensors [G, T, d] of the prefill.
        values: L tensors [G, T, d].
        device: where the model wants its token ids.
        chunk: context tokens a pass.

    Raises `UnsupportedModelError` if the second pass exceeds a bound of the model (a sliding
    window, a switch of its RoPE).
    """
    start, end = prompt.spans.context_start, prompt.spans.context_end
    bound, base = longest_sequence(model, end), base_attention(model)
    scores = [key.new_zeros(key.shape[0], end - start, dtype=torch.float32) for key in keys]
    for part, ids in repetitions(prompt, chunk):
        if bound is not None and end + len(ids) > bound[0]:
            raise UnsupportedModelError(
                f"A second pass over the context takes {end + len(ids)} positions, "
                f"{type(model).__name__} has {bound[0]}: beyond, {bound[1]}. Use a shorter "
                f"context, or a scorer that needs no second pass."
            )
        places = torch.arange(end, end + len(ids), device=device)

        def repeating(own: Any, part: Region = part) -> Any:
            def attention(
                module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
            ) -> Any:
                layer = module.layer_idx
                seen, read = keys[layer][None, :, :end], values[layer][None, :, :end]
                scores[layer][:, part.start - start : part.end - start] = max_attention(
                    query[0], seen[0], key[0], part, kwargs["scaling"]
                )
                allowed = _causal(query.shape[2], end, query.device)
                if base == "eager":
                    allowed = torch.zeros_like(allowed, dtype=query.dtype).masked_fill_(
                        ~allowed, torch.finfo(query.dtype).min
                    )
                both = torch.cat([seen, key], dim=2), torch.cat([read, value], dim=2)
                return own(module, query, *both, allowed, **kwargs)

            return attention

        with patched_attention(model, repeating):
            model.get_decoder()(
                input_ids=ids[None].to(device), position_ids=places[None], use_cache=False
            )
    return torch.stack([score.to(scores[0].device) for score in scores])


def repetitions(prompt: Prompt, chunk: int = _CHUNK) -> Iterator[tuple[Region, Tensor]]:
    """The context's chunks as absolute positions, and the ids [n] whose pass repeats each."""
    spans, ids, tokenizer = prompt.spans, prompt.ids, prompt.tokenizer
    tail = ids[spans.question_end :]
    for first in range(spans.context_start, spans.context_end, chunk):
        part = Region(first, min(first + chunk, spans.context_end))
        later = first > spans.context_start
        text, lead = (_PART, ids[max(spans.context_start, first - _LEAD) : first])
        if not later:
            text, lead = _WHOLE, ids[:0]
        request = (
            [] if tokenizer is None else tokenizer(text, add_special_tokens=False)["input_ids"]
        )
        request_ids = torch.tensor(request, dtype=torch.int64)
        yield part, torch.cat([request_ids, lead, tail, ids[part.start : part.end]])


def max_attention(
    queries: Tensor,
    seen: Tensor,
    own: Tensor,
    part: Region,
    scale: float,
    *,
    block: int | None = None,
) -> Tensor:
    """The largest attention of any query and query head to each token of `part`: float32 [G, n].

    Args:
        queries: [H, Q, d] of the tokens of this pass.
        seen: [G, >= part.end, d] keys of prefix and context.
        own: [G, Q, d] keys of the tokens of this pass.
        part: absolute positions of the n tokens.
        scale: of the logits.
        block: queries at once; None: what `_LOGITS` bytes hold.
    """
    groups, count, heads = len(seen), queries.shape[1], len(queries)
    sinks = min(_SINKS, part.start)
    fixed = torch.cat([seen[:, :sinks], seen[:, part.start : part.end]], dim=1)
    whole = torch.cat([fixed, own], dim=1).float()
    width = fixed.shape[1]
    rows = block or max(1, _LOGITS // (4 * heads * whole.shape[1]))
    best = whole.new_zeros(groups, part.length)
    for first in range(0, count, rows):
        stop = min(first + rows, count)
        asked = rearrange(queries[:, first:stop].float(), "(g n) q d -> g (n q) d", g=groups)
        logits = scale * asked @ whole[:, : width + stop].transpose(1, 2)
        logits = rearrange(logits, "g (n q) s -> g n q s", q=stop - first)
        place = torch.arange(stop, device=queries.device)
        logits[..., width:].masked_fill_(place > place[first:, None], -torch.inf)
        chances = torch.softmax(logits, dim=-1)[..., sinks:width]
        best = torch.maximum(best, reduce(chances, "g n q s -> g s", "max"))
    return best


def _causal(count: int, before: int, device: torch.device) -> Tensor:
    """bool [1, 1, Q, before + Q]: `before` earlier keys, then causal within this pass."""
    place = torch.arange(-before, count, device=device)
    return (place <= torch.arange(count, device=device)[:, None])[None, None]
