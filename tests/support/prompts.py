"""Prompts of random ids, and of numbered words."""

import torch

import gracekv
from gracekv import Prompt
from gracekv.testing.models import tiny_model, tiny_tokenizer


def random_prompt(length=70, context=None, question_end=None, tokenizer=None, seed=0):
    """`length` ids below 97; by default a prefix of 5, a question of 6 and a tail of 4 tokens."""
    ids = torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(seed))
    return Prompt.from_ids(ids, context or (5, length - 10), question_end or length - 4, tokenizer)


PROMPT = random_prompt(150, (4, 138))
IDS = PROMPT.ids
BOOK = torch.randint(0, 97, (400,), generator=torch.Generator().manual_seed(5))
END = 90


def book_prompt(context=(4, END), tail=5):
    """A prompt without a question: `BOOK` up to the context's end, and the template's tail."""
    ids = torch.cat([BOOK[: context[1]], BOOK[:tail]])
    return Prompt.from_ids(ids, context=context, question_end=context[1])


WORDS = " ".join(f"word{i % 37} and{i % 11}" for i in range(30))


def words_book(positions, ratio, pipeline=None, **options):
    """`WORDS`, compressed by a model of that many positions whose tokens are these words."""
    tokenizer = tiny_tokenizer([WORDS])
    model = tiny_model(vocabulary=len(tokenizer), positions=positions)
    prompt = Prompt.from_chat(tokenizer, context=WORDS)
    return gracekv.compress(model, prompt, ratio=ratio, pipeline=pipeline, **options)
