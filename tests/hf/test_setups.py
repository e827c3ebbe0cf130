"""Setups that need more than the checks in tests/fuzz/test_random_setups.py."""

import dataclasses

import pytest
import torch

import gracekv
from gracekv.errors import CacheError, UnsupportedModelError
from gracekv.fit import LeastSquares, Regression, ValuesAndMass
from gracekv.testing.models import tiny_llama, tiny_model
from support.prompts import IDS, PROMPT


def test_a_result_of_autocast_is_saved_and_loaded_under_it(tmp_path):
    model = tiny_llama()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = gracekv.compress(model, PROMPT, ratio=4)
        answer = result.generate_ids(6)
        result.save(tmp_path / "cache")
        assert gracekv.load(tmp_path / "cache", model).generate_ids(6).equal(answer)
    with pytest.raises(CacheError, match="autocast"):
        result.generate_ids(6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        prefill = gracekv.capture(model, PROMPT)
    # Bytes count the prefill's numbers, which take half of the model's.
    outside = gracekv.compress(model, PROMPT, prefill=prefill, kv_bytes=1_536, pipeline="snapkv")
    assert outside.accounting.spent == 1_536 // prefill.info.entry_bytes
    sliding = gracekv.compress(tiny_model("gemma3_text", layers=4, window=32), PROMPT, ratio=4)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(CacheError, match="autocast"):
        sliding.generate_ids(6)
    sliding.model.bfloat16()
    with pytest.raises(CacheError, match=r"dtype \(float32 then, bfloat16 now\) differ"):
        sliding.generate_ids(6)


def test_queries_are_computed_again_under_the_autocast_of_the_prompt():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for limit in (None, 0):
            how = gracekv.CaptureOptions(memory_limit=limit)
            result = gracekv.compress(
                tiny_llama(), PROMPT, ratio=4, pipeline="gracekv", capture=how
            )
            assert result.packed.layers[0].dtype == torch.bfloat16


@pytest.mark.parametrize("recipe", ["gracekv", "critical-snapkv"])
def test_projections_that_can_only_be_called_are_read_under_autocast(recipe):
    accelerate = pytest.importorskip("accelerate")
    hidden = accelerate.cpu_offload(tiny_llama(), execution_device=torch.device("cpu"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        one, other = (
            gracekv.compress(model, PROMPT, ratio=4, pipeline=recipe)
            for model in (tiny_llama(), hidden)
        )
    assert (one.accounting.entries - other.accounting.entries).abs().sum() <= 4


def emptied(model):
    """The model with weights that exist only while their module runs, as under ZeRO-3."""

    def before(module, _):
        for name, own in module.full.items():
            module._parameters[name].data = own

    def after(module, *_):
        for name in module.full:
            module._parameters[name].data = torch.empty(0)

    for module in model.modules():
        module.full = {x: own.data for x, own in module.named_parameters(recurse=False)}
        if module.full:
            module.register_forward_pre_hook(before)
            module.register_forward_hook(after)
            after(module)
    return model


def test_weights_that_come_and_go_are_called_and_have_no_marks():
    model = emptied(tiny_llama())
    one, other = (
        gracekv.compress(x, PROMPT, ratio=4, pipeline="gracekv") for x in (model, tiny_llama())
    )
    assert one.accounting.entries.equal(other.accounting.entries)
    assert "weights" not in gracekv.prefill.fingerprint.fingerprint(model)


def test_a_dropout_layer_in_training_mode_is_refused():
    model = tiny_llama()
    # peft leaves a combined adapter's dropout in this mode although the model is in eval mode.
    model.model.layers[1].self_attn.dropout = torch.nn.Dropout(0.1)
    with pytest.raises(UnsupportedModelError, match="one of its dropout layers is in training"):
        gracekv.compress(model, PROMPT, ratio=4)
    gracekv.compress(model.eval(), PROMPT, ratio=4)


@pytest.mark.parametrize("fit", [None, Regression(), LeastSquares(), ValuesAndMass()])
def test_a_fit_of_no_entries_changes_nothing(fit):
    # Without a prefix, one entry per head is that of the last token, which is fed again.
    prompt = gracekv.Prompt.from_ids(IDS[:40], (0, 40))
    pipe = gracekv.Pipeline.named("attention-matching")
    pipe = pipe if fit is None else dataclasses.replace(pipe, fit=fit)
    result = gracekv.compress(tiny_llama(), prompt, entries_per_head=1, pipeline=pipe)
    assert not result.packed.entries().any()
    assert result.generate_ids(2).shape == (1, 2)
