"""A context to ask about, and greedy answers to it by hand."""

import torch

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


def same_greedy(got, want, logits):
    """Equal, or tied within the margin at the first different token."""
    assert_same_tokens(got, want, lambda tokens: logits[len(tokens)])
