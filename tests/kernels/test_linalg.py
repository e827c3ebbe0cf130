"""Full float32 inside the block, the user's settings outside."""

import pytest
import torch

import gracekv
from gracekv import Budget, Pipeline
from gracekv.testing import synthetic_prefill
from gracekv.testing.models import tiny_llama
from gracekv.undo import full_float32
from gracekv.value import draft_attention, kvzip_two_pass
from support.fresh_python import fresh_python


def watched(stock, seen):
    """The function, which also notes the precision of each call."""

    def call(*args, **kwargs):
        seen.append(torch.get_float32_matmul_precision())
        return stock(*args, **kwargs)

    return call


@pytest.mark.parametrize("setting", ["highest", "high", "medium"])
def test_the_setting_is_full_inside_and_as_before_outside(precision, setting):
    precision(setting)
    with full_float32():
        assert torch.get_float32_matmul_precision() == "highest"
        assert not torch.backends.cuda.matmul.allow_tf32
    assert torch.get_float32_matmul_precision() == setting
    with pytest.raises(ZeroDivisionError), full_float32():
        1 / 0  # noqa: B018
    assert torch.get_float32_matmul_precision() == setting


def test_stages_compute_in_full_float32(precision, monkeypatch):
    pipeline, seen = Pipeline.named("snapkv"), []
    for stage in (pipeline.value, pipeline.sensitivity, pipeline.quota, pipeline.fit):
        monkeypatch.setattr(type(stage), "layer", watched(type(stage).layer, seen))
    precision("high")
    pipeline.run(synthetic_prefill(context=150, layers=2), Budget.ratio(4))
    assert seen == ["highest"] * 8
    assert torch.get_float32_matmul_precision() == "high"


@pytest.mark.parametrize(("recipe", "module", "product"), [
    ("gracekv-draft", draft_attention, "softmax_columns"),
    ("kvzip-two-pass", kvzip_two_pass, "received_attention"),
])  # fmt: skip
def test_what_further_passes_see_is_computed_in_full_float32(
    precision, monkeypatch, recipe, module, product
):
    seen = []
    monkeypatch.setattr(module, product, watched(getattr(module, product), seen))
    precision("high")
    prompt = gracekv.Prompt.from_ids(torch.arange(90), (4, 80))
    gracekv.compress(tiny_llama(), prompt, ratio=2, pipeline=recipe)
    assert set(seen) == {"highest"}


def test_settings_by_backend_are_kept_too():
    """torch cannot report mixed settings as one, nor undo them; so in a separate process."""
    code = """
import torch
from gracekv.undo import full_float32
torch.backends.cuda.matmul.fp32_precision = "tf32"
with full_float32():
    assert torch.backends.cuda.matmul.fp32_precision == "ieee"
assert torch.backends.cuda.matmul.fp32_precision == "tf32"
"""
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("this torch has no settings by backend")
    fresh_python("-c", code)
