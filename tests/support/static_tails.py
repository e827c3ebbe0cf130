"""Prompts of given lengths, and decoding over a growing or a static tail, step by step."""

import torch

from support.batches import prompts_of


def prompts(*lengths):
    return prompts_of(spans=[(length, 2, length - 9) for length in lengths])


def steps(model, cache, ids):
    """Logits of the ids [B, n], fed one by one; a full static tail is replaced by a longer one."""
    logits = []
    with torch.no_grad():
        for column in ids.T:
            layer = cache.grace_layers[0]
            if layer.length is not None and layer.tail_length == layer.capacity:
                cache = cache.with_static_tail(2 * layer.capacity)
            logits.append(model(column[:, None], past_key_values=cache).logits[:, -1])
    return torch.stack(logits)


def assert_same_answer(model, result, answer):
    """The answer's tokens are those of the growing tail, up to tied logits."""
    cache, ids = result.new_cache(), result.inputs["input_ids"]
    logits = steps(model, cache, torch.cat([ids[:, -1:], answer[:, :-1]], dim=1))
    assert bool((logits.gather(2, answer.T[..., None])[..., 0] >= logits.amax(-1) - 1e-3).all())
