"""Prompts of a batch that share nothing, and a tokenizer for their answers."""

import torch

import gracekv

# Lengths, and the span of each context.
SPANS = [(90, 4, 80), (61, 10, 50), (150, 0, 139)]


class Numbers:
    """A tokenizer whose words are the ids."""

    def __init__(self, size=97, template=None):
        self.size, self.chat_template = size, template

    def decode(self, ids, skip_special_tokens):
        return " ".join(map(str, ids.tolist()))

    def get_vocab(self):
        return {str(i): i for i in range(self.size)}


def prompts_of(seed=0, spans=SPANS, tokenizer=None):
    rng = torch.Generator().manual_seed(seed)

    def prompt(length, start, end):
        ids = torch.randint(0, 97, (length,), generator=rng)
        return gracekv.Prompt.from_ids(ids, (start, end), length - 3, tokenizer)

    return [prompt(*span) for span in spans]
