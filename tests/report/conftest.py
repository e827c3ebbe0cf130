"""Results without a model, from synthetic prefills and real pipelines."""

from types import SimpleNamespace

import pytest
import torch

from gracekv import Prompt
from gracekv.allocate import Budget
from gracekv.pipeline import Pipeline
from gracekv.testing import synthetic_prefill
from support.report_pages import data, open_page, opened, page, pair

__all__ = ["data", "open_page", "opened", "page", "pair"]


class Words:
    """A tokenizer whose ids are words, one in seven with a line break."""

    def __init__(self, special=None):
        self.special = special or {}

    def decode(self, ids, skip_special_tokens):
        return "".join(self.word(number) for number in ids.tolist())

    def word(self, number):
        if number in self.special:
            return self.special[number]
        return f" word{number}" + (".\n" if number % 7 == 6 else "")


def make_result(
    recipe="gracekv", ratio=3, *, seed=0, tokenizer=None, fields=None, layers=2, kv_heads=2, **sizes
):
    prefill = synthetic_prefill(seed=seed, layers=layers, kv_heads=kv_heads, **sizes)
    pipeline = Pipeline.named(recipe)
    # A short recent window, so that trees have a budget even in such short contexts.
    data = {**pipeline.to_dict(), "window": {"size": 4, "minimum": 2}, **(fields or {})}
    pipeline = Pipeline.from_dict(data)
    run = pipeline.run(prefill, Budget.ratio(ratio))
    spans = prefill.spans
    prompt = Prompt(torch.arange(spans.length), spans, None, tokenizer or Words())
    model = SimpleNamespace(config=SimpleNamespace(name_or_path="somebody/a-model"))
    given = {"model": model, "prompt": prompt, "pipeline": pipeline, "prefill": prefill}
    return SimpleNamespace(**given, run=run, accounting=run.accounting)


@pytest.fixture(scope="session")
def make():
    return make_result


@pytest.fixture(scope="session")
def words():
    return Words
