"""A context to ask about, and greedy answers to it by hand."""

import torch

import gracekv
from support.chapter import CHAPTER
from support.margins import assert_same_tokens

TEXT = CHAPTER[:900]


def steps(model, ids, cache, count):
    """Greedy ids after `ids` [T], one forward pass per token, and the logits that chose them."""
    fed, chosen, logits = ids[cache.get_seq_length() :], [], []
    with torch.no_grad():
        for _ in range(count):
            logits.append(model(fed[None], past_key_values=cache).logits[0, -1])
            chosen.append(int(logits[-1].argmax()))
            fed = torch.tensor(chosen[-1:])
    return torch.tensor(chosen), torch.stack(logits)


def stock_steps(model, ids, count):
    """Greedy ids after `ids` [T] of the stock model, without a cache, and the logits."""
    gracekv.hf.detach(model)
    start, logits = len(ids), []
    with torch.no_grad():
        for _ in range(count):
            logits.append(model(ids[None]).logits[0, -1])
            ids = torch.cat([ids, logits[-1].argmax()[None]])
    return ids[start:], torch.stack(logits)


def same_greedy(got, want, logits):
    """Equal, or tied within the margin at the first different token."""
    assert_same_tokens(got, want, lambda tokens: logits[len(tokens)])
