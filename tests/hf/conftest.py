"""A context that is compressed once, to ask about; modules override `MODEL` and `PROMPT`."""

import pytest

import gracekv
from gracekv.testing.models import tiny_llama, tiny_tokenizer
from support.asked_context import TEXT
from support.static_tails import prompts

MODEL = {"layers": 3, "vocabulary": 2000, "positions": 4096}


@pytest.fixture(scope="module")
def model(request):
    return tiny_llama(**getattr(request.module, "MODEL", MODEL))


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(vocabulary=2000)


@pytest.fixture(scope="module")
def prompt(tokenizer):
    return gracekv.Prompt.from_chat(tokenizer, context=TEXT, instruction="Read.")


@pytest.fixture(scope="module")
def whole(model, prompt):
    return gracekv.compress(model, prompt, ratio=1)


@pytest.fixture(scope="module")
def book(model, prompt):
    return gracekv.compress(model, prompt, ratio=4)


@pytest.fixture(scope="module")
def result(request, model):
    return gracekv.compress(model, request.module.PROMPT, ratio=2)


@pytest.fixture(scope="module")
def batch(model):
    return gracekv.compress(model, prompts(80, 55, 61), ratio=4)
