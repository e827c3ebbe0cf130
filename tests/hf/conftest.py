"""A context that is compressed once, to ask about.

Modules override `MODEL` and `VOCABULARY`, the tokenizer's, or replace the context by a `PROMPT`.
"""

import pytest

import gracekv
from gracekv.testing.models import tiny_llama, tiny_tokenizer
from support.asked_context import TEXT
from support.static_tails import prompts

MODEL = {"layers": 3, "vocabulary": 2000}


@pytest.fixture(scope="module")
def model(request):
    return tiny_llama(**getattr(request.module, "MODEL", MODEL))


@pytest.fixture(scope="module")
def tokenizer(request):
    return tiny_tokenizer(vocabulary=getattr(request.module, "VOCABULARY", 2000))


@pytest.fixture(scope="module")
def prompt(request):
    if hasattr(request.module, "PROMPT"):
        return request.module.PROMPT
    tokenizer = request.getfixturevalue("tokenizer")
    return gracekv.Prompt.from_chat(tokenizer, context=TEXT, instruction="Read.")


@pytest.fixture(scope="module")
def whole(model, prompt):
    return gracekv.compress(model, prompt, ratio=1)


@pytest.fixture(scope="module")
def book(model, prompt):
    return gracekv.compress(model, prompt, ratio=4)


@pytest.fixture(scope="module")
def result(request, model, prompt):
    return gracekv.compress(model, prompt, ratio=getattr(request.module, "RATIO", 2))


@pytest.fixture(scope="module")
def batch(model):
    return gracekv.compress(model, prompts(80, 55, 61), ratio=4)
