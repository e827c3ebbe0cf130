"""The attention of an answer's first tokens, drafted over the full cache.

A compressed cache must hold what the answer's queries attend to, which its first tokens show best.
They are generated greedily from the captured keys and values: the full cache stays in memory
meanwhile, and compression waits for as many decoding steps.

Source: ours; the paper and the rivals that it names compress without having seen any answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from einops import reduce
from torch import Tensor

from gracekv.errors import UnsupportedModelError
from gracekv.prefill.attention_patch import patched_attention
from gracekv.prefill.length_limits import longest_sequence
from gracekv.prefill.prompt import Prompt


@torch.no_grad()
def draft(
    model: Any,
    prompt: Prompt,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    logits: Tensor,
    tokens: int,
    device: torch.device,
) -> Tensor:
    """Attention of up to `tokens` greedy answer tokens to the context, float32 [L, G, S, N_ctx].

    The mean over a KV head's query heads; the softmax runs over all that a token sees. S is smaller
    than `tokens` where the answer ends before; an end-of-sequence token counts only if it comes
    first.

    Args:
        model: as for `capture`.
        prompt: what was prefilled, T tokens.
        keys: L tensors [G, T, d] of the prefill.
        values: L tensors [G, T, d].
        logits: [vocabulary] of the last position.
        tokens: most tokens, at least 1.
        device: where the model wants its token ids.

    Raises `UnsupportedModelError` if the answer passes a bound of the model (a sliding window, a
    switch of its RoPE).
    """
    start, end = prompt.spans.context_start, prompt.spans.context_end
    length, bound = prompt.spans.length, longest_sequence(model, prompt.spans.length)
    if bound is not None and length + tokens > bound[0]:
        raise UnsupportedModelError(
            f"A draft of {tokens} tokens takes {length + tokens} positions, "
            f"{type(model).__name__} has {bound[0]}: beyond, {bound[1]}. Use a shorter context or "
            f"draft, or a scorer that needs none."
        )
    layers = len(keys)
    draft_keys: list[list[Tensor]] = [[] for _ in range(layers)]
    draft_values: list[list[Tensor]] = [[] for _ in range(layers)]
    seen: list[Tensor] = []

    def drafting(own: Any) -> Any:
        def attention(
            module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
        ) -> Any:
            layer = module.layer_idx
            draft_keys[layer].append(key)
            draft_values[layer].append(value)
            all_keys = torch.cat([keys[layer][None], *draft_keys[layer]], dim=2)
            all_values = torch.cat([values[layer][None], *draft_values[layer]], dim=2)
            groups = key.shape[1]
            shared = query[0].float().reshape(groups, -1, query.shape[-1]) * kwargs["scaling"]
            chance = torch.softmax(shared @ all_keys[0].float().transpose(1, 2), dim=-1)
            seen.append(reduce(chance[..., start:end], "g n t -> g t", "mean").to(keys[0].device))
            # One query that sees every key needs no mask.
            return own(module, query, all_keys, all_values, None, **kwargs)

        return attention

    stops, head = _stop_tokens(model), model.get_output_embeddings()
    token, rows = logits.argmax().reshape(1, 1).to(device), []
    with patched_attention(model, drafting):
        for step in range(tokens):
            place = torch.full((1, 1), length + step, device=device)
            hidden = model.get_decoder()(
                input_ids=token, position_ids=place, use_cache=False
            ).last_hidden_state
            rows.append(torch.stack(seen))
            seen.clear()
            token = head(hidden[:, -1:]).argmax(dim=-1).to(device)
            if int(token) in stops:
                break
    return torch.stack(rows, dim=2)


def _stop_tokens(model: Any) -> set[int]:
    """Token ids that end an answer."""
    config = getattr(model, "generation_config", None) or model.config
    ids = config.eos_token_id
    return set(ids) if isinstance(ids, list) else {-1 if ids is None else int(ids)}
