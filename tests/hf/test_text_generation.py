"""The transformers pipeline: registered on demand, with the results of `gracekv.compress`."""

import pytest
import torch
from transformers import pipeline as hf_pipeline

import gracekv
from gracekv.errors import BudgetError, ConfigError, PromptError
from gracekv.hf import GraceTextGeneration
from support.forward_passes import fed_shapes

MODEL = {"layers": 3}
WORDS = [f"w{i}" for i in range(90)]


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(["<unk>", "<pad>", *WORDS])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", pad_token="<pad>")


@pytest.fixture
def pipe(model, tokenizer):
    return hf_pipeline("gracekv-text-generation", model=model, tokenizer=tokenizer)


def text(seed, length):
    picks = torch.randint(0, len(WORDS), (length,), generator=torch.Generator().manual_seed(seed))
    return " ".join(WORDS[i] for i in picks)


CONTEXT = text(0, 220)
QUESTIONS = [text(1, 4), text(2, 25), text(3, 11)]


def test_a_question_is_answered_within_its_budget(pipe, model, tokenizer):
    assert isinstance(pipe, GraceTextGeneration)
    asked = {"context": CONTEXT, "question": QUESTIONS[0], "ratio": 4, "max_new_tokens": 7}
    found = pipe(**asked)
    assert found["question"] == QUESTIONS[0]
    assert found["spent"] <= found["budget"] == 3 * 2 * 220 // 4
    assert found["kv_bytes"] < found["full_bytes"]
    assert len(found["answer"].split()) <= 7
    prompt = gracekv.Prompt.from_chat(tokenizer, context=CONTEXT, question=QUESTIONS[0])
    for recipe in ("gracekv-plus", "gracekv"):
        own = gracekv.compress(model, prompt, ratio=4, pipeline=recipe)
        found = pipe(**asked, pipeline=recipe)
        assert (found["answer"], found["spent"]) == (own.generate(7), own.accounting.spent)
    together = pipe(**asked | {"question": QUESTIONS})
    assert [x["question"] for x in together] == QUESTIONS
    assert together[0] == pipe(**asked)


def test_defaults_of_the_constructor_give_way_to_the_call(model, tokenizer):
    pipe = GraceTextGeneration(
        model=model, tokenizer=tokenizer, ratio=4, max_new_tokens=3, instruction="w5 w6"
    )
    first = pipe(context=CONTEXT, question=QUESTIONS[0])
    assert first["budget"] == 3 * 2 * 220 // 4
    assert pipe(context=CONTEXT, question=QUESTIONS[0], entries_per_head=40)["budget"] == 240
    longer = pipe(context=CONTEXT, question=QUESTIONS[0], max_new_tokens=9)
    # A token may not be a word, or may join the next.
    assert longer["answer"].startswith(first["answer"].rstrip())
    assert pipe(context=CONTEXT, question=QUESTIONS[0], instruction="")["full_bytes"] == (
        first["full_bytes"] - 2 * 3 * 2 * 2 * 16 * 4
    )


def test_reused_questions_are_asked_about_one_compressed_context(model, tokenizer, monkeypatch):
    options = {"model": model, "tokenizer": tokenizer, "ratio": 3, "max_new_tokens": 5}
    pipe = GraceTextGeneration(**options)
    prompt = gracekv.Prompt.from_chat(tokenizer, context=CONTEXT, instruction="w5 w6")
    book = gracekv.compress(model, prompt, ratio=3)
    fed = fed_shapes(model, monkeypatch)
    found = pipe(question=QUESTIONS, context=CONTEXT, instruction="w5 w6", reuse=True)
    assert sum(length > 200 for _, length in fed) == 1
    assert [x["question"] for x in found] == QUESTIONS
    assert [x["answer"] for x in found] == book.ask(QUESTIONS, max_new_tokens=5)
    kept = book.accounting
    assert {(x["budget"], x["spent"], x["kv_bytes"], x["full_bytes"]) for x in found} == {
        (kept.budget, kept.spent, kept.bytes, kept.full_bytes)
    }
    always = GraceTextGeneration(**options, reuse=True)
    one = always(question=QUESTIONS[1], context=CONTEXT, instruction="w5 w6")
    assert one["answer"] == book.ask(QUESTIONS[1], max_new_tokens=5)
    apart = {"question": QUESTIONS[1], "context": CONTEXT}
    assert always(**apart, reuse=False) == pipe(**apart)


BAD_CALLS = [
    ({"question": ["w1", " "], "ratio": 2, "reuse": True}, PromptError, "non-empty text; got ' '"),
    (
        {"question": "w1", "ratio": 2, "reuse": True, "answer_prefix": "w2"},
        ConfigError,
        "Leave out answer_prefix or reuse=True",
    ),
    ({"question": "w1"}, BudgetError, "exactly one budget"),
    ({"question": [], "ratio": 2}, PromptError, "non-empty list; got an empty list"),
    ({"question": "w1", "ratio": 2, "kv_bytes": 9}, BudgetError, "got ratio and kv_bytes"),
    ({"question": 3, "ratio": 2}, PromptError, "a string or a list of strings; got int"),
    ({"question": [3], "ratio": 2}, PromptError, "question must be text; got int"),
    ({"questions": ["w1"], "ratio": 2}, ConfigError, "Give question= and pipeline= instead of que"),
    ({"context": " ", "question": "w1", "ratio": 2}, PromptError, "context is empty"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD_CALLS)
def test_bad_calls_are_refused(pipe, options, error, message):
    with pytest.raises(error, match=message):
        pipe(**({"context": CONTEXT} | options))


def test_a_tokenizer_is_needed(model):
    pipe = GraceTextGeneration(model=model)
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        pipe(context=CONTEXT, question="w1", ratio=2)
