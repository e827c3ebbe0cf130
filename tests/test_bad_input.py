"""One row per way to misuse the library: the error's type, and advice in its message."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
import transformers

import gracekv
from gracekv import Budget, Pipeline, Prompt
from gracekv.errors import (
    BudgetError,
    ConfigError,
    GracekvError,
    NonFiniteError,
    PromptError,
    ShapeError,
    UnknownStrategyError,
    UnsupportedModelError,
)
from gracekv.hf import detach
from gracekv.testing import synthetic_prefill
from gracekv.testing.models import tiny_llama, tiny_model, tiny_tokenizer


def prompt() -> Prompt:
    return Prompt.from_ids(torch.arange(90), context=(4, 80))


def compress(model: object = None, **options: object) -> object:
    return gracekv.compress(model or tiny_llama(), prompt(), **options)


def run(ratio: object) -> object:
    return Pipeline.named("gracekv").run(synthetic_prefill(), Budget.ratio(ratio))


def poisoned(name: str, value: float) -> object:
    prefill = synthetic_prefill()
    broken = [tensor.clone() for tensor in getattr(prefill, name)]
    broken[1][0, 5, 3] = value
    return dataclasses.replace(prefill, **{name: tuple(broken)})


def reshaped(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> object:
    prefill = synthetic_prefill()
    return dataclasses.replace(prefill, **{name: tuple(map(change, getattr(prefill, name)))})


def without_rope() -> object:
    config = transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4)
    return transformers.GPT2LMHeadModel(config).eval()


def with_template(template: str) -> object:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def chat_by(template: str) -> object:
    return Prompt.from_chat(with_template(template), context="one two three", question="four")


# fmt: off
TABLE = {
    "ratio below 1": (lambda: compress(ratio=0.5), BudgetError, "1 keeps all"),
    "ratio of kvpress": (lambda: compress(ratio=0.875), BudgetError, r"compression_ratio=0\.875"),
    "compression_ratio 1": (lambda: compress(compression_ratio=1), BudgetError, "below 1"),
    "ratio NaN": (lambda: run(float("nan")), BudgetError, "finite"),
    "ratio infinite": (lambda: run(float("inf")), BudgetError, "finite"),
    "ratio not a number": (lambda: run("eight"), BudgetError, "finite number"),
    "ratio True": (lambda: run(True), BudgetError, "must be a finite number"),
    "no budget": (compress, BudgetError, "ratio=8"),
    "two budgets": (lambda: compress(ratio=2, kv_bytes="1MB"), BudgetError, "exactly one"),
    "entries 0": (lambda: compress(entries_per_head=0), BudgetError, "positive whole"),
    "bytes in cubits": (lambda: compress(kv_bytes="3 cubits"), BudgetError, "'64MiB'"),
    "budget below the window": (lambda: run(30), BudgetError, "at most 24"),
    "bytes below the window": (lambda: compress(kv_bytes=1), BudgetError, "at least"),
    "recipe misspelt": (lambda: compress(ratio=2, pipeline="gracekw"), UnknownStrategyError,
        "mean 'gracekv'"),
    "recipe as a press": (lambda: compress(ratio=2, pipeline="AdaKVPress"), UnknownStrategyError,
        "mean 'ada-snapkv'"),
    "strategy misspelt": (lambda: Pipeline.from_dict({"refine": "binary_extrat"}),
        UnknownStrategyError, "Did you mean 'binary_extract'"),
    "keys NaN": (lambda: poisoned("keys", float("nan")), NonFiniteError, "bfloat16"),
    "values infinite": (lambda: poisoned("values", float("inf")), NonFiniteError, "layer 1"),
    "queries NaN": (lambda: poisoned("queries", float("nan")), NonFiniteError, "weights"),
    "keys with a batch axis": (lambda: reshaped("keys", lambda k: k[None]), ShapeError, "one by"),
    "values too short": (lambda: reshaped("values", lambda v: v[:, 1:]), ShapeError, "layer 0"),
    "heads that do not divide": (lambda: reshaped("queries", lambda q: q[:3]), ShapeError, "multi"),
    "no RoPE": (lambda: compress(without_rope(), ratio=2), UnsupportedModelError, "rotary"),
    "sliding window": (lambda: compress(tiny_model("mistral", window=8), ratio=2),
        UnsupportedModelError, "sliding window of 8"),
    "training mode": (lambda: compress(tiny_llama().train(), ratio=2), UnsupportedModelError,
        r"model\.eval\(\)"),
    "not a model": (lambda: compress(object(), ratio=2), UnsupportedModelError, "got object"),
    "a base model": (lambda: compress(tiny_llama().model, ratio=2), UnsupportedModelError,
        "AutoModelForCausalLM"),
    "a text for a prompt": (lambda: gracekv.compress(tiny_llama(), "text", ratio=2), PromptError,
        "list of Prompts or"),
    "a length to compress": (lambda: compress(ratio=2, max_new_tokens=8), BudgetError,
        r"result\.generate\(max_new_tok"),
    "max_length": (lambda: compress(ratio=4).generate_ids(max_length=9), ConfigError,
        "as max_new_tokens"),
    "no model to load for": (lambda: gracekv.load("a.gracekv", None), UnsupportedModelError,
        "got NoneType"),
    "no model to detach": (lambda: detach(3), UnsupportedModelError, "got int"),
    "no file to load": (lambda: gracekv.load(None, tiny_llama()), ConfigError, "file name is"),
    "no file to save to": (lambda: compress(ratio=4).save(None), ConfigError, "got NoneType"),
    "no capture options": (lambda: compress(ratio=4, capture=None), ConfigError, "CaptureOptions"),
    "no options": (lambda: gracekv.capture(tiny_llama(), prompt(), options=None), ConfigError,
        "CaptureOptions"),
    "needs by name": (lambda: gracekv.capture(tiny_llama(), prompt(), needs="all"), ConfigError,
        "Needs; got str"),
    "progress that cannot be called": (lambda: gracekv.CaptureOptions(progress=3), ConfigError,
        "takes a function; got 3"),
    "no prefill": (lambda: Pipeline.named("snapkv").run(None, Budget.ratio(4)), ConfigError,
        "got NoneType"),
    "a number for a budget": (lambda: Pipeline.named("snapkv").run(synthetic_prefill(), 4),
        ConfigError, r"ratio\(8\)"),
    "no tokenizer": (lambda: Prompt.from_chat(None, context="a b"), PromptError, "from_ids"),
    "a template that raises": (lambda: chat_by("{{ raise_exception('no system') }}"), PromptError,
        "no system. Render"),
    "a template that fails": (lambda: chat_by("{{ 1 / 0 }}"), PromptError, "division by zero"),
    "a template of bad syntax": (lambda: chat_by("{% broken"), PromptError, "unknown tag"),
    "a template without such messages": (
        lambda: Prompt.from_messages(
            with_template("{{ raise_exception('no system') }}"), [{"role": "user", "content": "a"}]
        ),
        PromptError, "fails on messages of user: no system. Render",
    ),
    "a cache of another kind": (
        lambda: compress(ratio=4).generate_ids(2, cache_implementation="static"), ConfigError,
        "Leave out cache_implementation: ids, mask and cache are those of the compressed prompt"),
}
# fmt: on


@pytest.mark.parametrize("case", TABLE)
def test_misuse_is_named_and_explained(case: str) -> None:
    call, error, message = TABLE[case]
    with pytest.raises(error, match=message) as caught:
        call()
    assert isinstance(caught.value, GracekvError)
    assert len(str(caught.value)) > 40
