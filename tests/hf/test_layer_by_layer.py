"""Compressing while reading keeps what compressing afterwards keeps, for families and recipes."""

import dataclasses

import pytest
import torch

pytest.importorskip("transformers")

import gracekv
from gracekv import CaptureOptions, Prompt
from gracekv.testing.models import tiny_llama
from support.families import FAMILIES

IDS = torch.randint(97, (150,), generator=torch.Generator().manual_seed(1))
STREAMED = (
    "gracekv-agnostic", "gracekv-plus", "gracekv-plus-allocated", "gracekv-plus-equal", "snapkv",
    "snapkv-4bit", "ada-snapkv", "pyramidkv", "chunkkv", "streaming-llm", "h2o", "tova", "knorm",
    "keydiff", "lagkv", "compactor", "expected-attention", "scissorhands", "critical-snapkv",
)  # fmt: skip


def prompt_of(length=150):
    return Prompt.from_ids(IDS[:length], context=(4, length - 12), question_end=length - 3)


def both(model, recipe, chunk=None, ratio=4, prompt=None):
    """Results of reading all first, and of compressing layer by layer."""
    return [
        gracekv.compress(
            model,
            prompt_of() if prompt is None else prompt,
            ratio=ratio,
            pipeline=recipe,
            capture=CaptureOptions(stream=stream, chunk=chunk),
            keep_run=True,
        )
        for stream in (False, True)
    ]


def assert_same(whole, streamed):
    for one, other in zip(whole.packed.layers, streamed.packed.layers, strict=True):
        for name, tensor in one.tensors().items():
            same = other.tensors()[name]
            if tensor.is_floating_point():
                torch.testing.assert_close(same, tensor, rtol=1e-4, atol=1e-4)
            else:
                assert torch.equal(same, tensor), name
    for one, other in zip(whole.packed.kept, streamed.packed.kept, strict=True):
        for name, tensor in one.tensors.items():
            torch.testing.assert_close(other.tensors[name], tensor, rtol=1e-4, atol=1e-4)
    accounts = [dataclasses.replace(x.accounting, entries=0) for x in (whole, streamed)]
    assert accounts[0].spent == accounts[1].spent
    assert accounts[0].bytes == accounts[1].bytes
    assert accounts[0].utility == pytest.approx(accounts[1].utility, rel=1e-5)


@pytest.mark.parametrize("chunk", [None, 40])
@pytest.mark.parametrize("recipe", STREAMED)
def test_every_recipe_keeps_the_same(recipe, chunk):
    assert_same(*both(tiny_llama(layers=3), recipe, chunk))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_keeps_the_same(family):
    whole, streamed = both(FAMILIES[family].model(), "gracekv-plus", chunk=40)
    assert_same(whole, streamed)
    assert torch.equal(whole.generate_ids(4), streamed.generate_ids(4))
