"""A context that is compressed once, to ask about; modules with another model define their own."""

import pytest

import gracekv
from gracekv.testing.models import tiny_llama, tiny_tokenizer
from support.asked_context import TEXT


@pytest.fixture(scope="module")
def model():
    return tiny_llama(layers=3, vocabulary=2000, positions=4096)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(vocabulary=2000)


@pytest.fixture(scope="module")
def prompt(tokenizer):
    return gracekv.Prompt.from_chat(tokenizer, context=TEXT, instruction="Read.")


@pytest.fixture(scope="module")
def book(model, prompt):
    return gracekv.compress(model, prompt, ratio=4)
