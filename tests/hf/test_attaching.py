"""Attaching to a model and restoring it; what importing registers."""

import copy
from unittest.mock import Mock

import pytest
import torch
from transformers import StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention

import gracekv
from gracekv.errors import CacheError, UnsupportedModelError
from gracekv.hf import attach, detach
from gracekv.prefill import supported
from gracekv.testing.models import tiny_llama, tiny_model
from support.fresh_python import fresh_python

PROMPT = gracekv.Prompt.from_ids(torch.arange(60), (4, 50))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_an_attached_model_with_eager_attention_gives_its_attention_weights(family):
    model = tiny_model(family, attention="eager")
    ids = torch.arange(2, 42).view(2, 20)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    inputs = [{"input_ids": ids}, {"input_ids": ids, "attention_mask": mask}]
    before = [model(**x, output_attentions=True) for x in inputs]
    answer = model.generate(**inputs[1], max_new_tokens=4, do_sample=False)
    attach(model)
    for given, want in zip(inputs, before, strict=True):
        got = model(**given, output_attentions=True)
        assert torch.equal(got.logits, want.logits)
        assert all(map(torch.equal, got.attentions, want.attentions))
    assert model.generate(**inputs[1], max_new_tokens=4, do_sample=False).equal(answer)


class Watched(LlamaAttention):
    """A user's own class, defined in this file, which has no attention function."""


def test_layers_may_have_a_class_of_the_user_s():
    model, ids = tiny_llama(layers=4, attention="eager"), PROMPT.ids
    for layer in model.model.layers:
        layer.self_attn.__class__ = Watched
    want = model(ids[None]).logits
    gracekv.compress(model, PROMPT, ratio=2)
    assert torch.equal(model(ids[None]).logits, want)


def test_an_attached_model_reads_stock_sliding_layers_under_a_longer_mask():
    model, ids = tiny_model("gemma3_text", layers=4, window=16), torch.arange(2, 42)[None]

    def read():
        cache = StaticCache(config=model.config, max_cache_len=64)
        mask, longer = ((torch.arange(64) < n).long()[None] for n in (30, 31))
        model(ids[:, :30], attention_mask=mask, past_key_values=cache)
        return model(ids[:, 30:31], attention_mask=longer, past_key_values=cache).logits

    want = read()
    attach(model)
    torch.testing.assert_close(read(), want)


def test_an_attached_model_runs_in_another_process_and_what_that_registers(tmp_path):
    """Loading the model imports `gracekv.hf`, without which nothing is registered."""
    model = tiny_llama(attention="eager")
    result = gracekv.compress(model, PROMPT, ratio=2)
    result.save(tmp_path / "cache")
    torch.save(model, tmp_path / "model")
    script = f"""
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.pipelines import PIPELINE_REGISTRY
tables = AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping
before = [dict(table) for table in tables]
assert "gracekv-text-generation" not in PIPELINE_REGISTRY.supported_tasks
model = torch.load({str(tmp_path / "model")!r}, weights_only=False)
assert "gracekv-text-generation" in PIPELINE_REGISTRY.supported_tasks
for table, known in zip(tables, before):
    assert table.keys() - known.keys() == {{"gracekv", "gracekv_eager"}}
    assert all(table[name] is known[name] for name in known)
print(model(torch.arange(60)[None]).logits[0, -1].argmax())
import gracekv
result = gracekv.load({str(tmp_path / "cache")!r}, model)
print(result.generate_ids(4).tolist())
prompt = gracekv.Prompt.from_ids(torch.arange(60), (4, 50))
print(gracekv.compress(model, prompt, ratio=2).generate_ids(4).tolist())
gracekv.hf.detach(model)
print(model.config._attn_implementation)
"""
    run = fresh_python("-c", script)
    answer = str(result.generate_ids(4).tolist())
    likeliest = str(model(torch.arange(60)[None]).logits[0, -1].argmax())
    assert run.stdout.split("\n") == [likeliest, answer, answer, "eager", ""]


def hooks_of(model):
    return list(model.get_decoder()._forward_pre_hooks)


def test_models_that_share_a_config_are_attached_and_detached_apart():
    one, other = tiny_llama(), tiny_llama(seed=1)
    for module in other.modules():
        if hasattr(module, "config"):
            module.config = one.config
    results = [gracekv.compress(model, PROMPT, ratio=2) for model in (one, other)]
    masked = results[1].inputs
    masked["attention_mask"][:, 10] = 0
    with pytest.raises(CacheError, match="hides tokens of the compressed prompt"):
        other.generate(**masked, past_key_values=results[1].new_cache(), max_new_tokens=2)
    detach(one)
    assert not hooks_of(one)
    assert results[1].generate_ids(3).shape == (1, 3)
    detach(other)
    assert not hooks_of(other)
    assert other.config._attn_implementation == "sdpa"


def test_detaching_a_copy_leaves_nothing_and_the_original_as_it_is():
    model = tiny_llama()
    attach(model)
    copied = copy.deepcopy(model)
    detach(copied)
    detach(copied)
    assert not hooks_of(copied)
    assert copied.config._attn_implementation == "sdpa"
    assert len(hooks_of(model)) == 1
    attach(copied)
    attach(copied)
    assert len(hooks_of(copied)) == 1
    attach(wrapper := torch.compile(copied, backend="eager"))
    detach(copied)
    assert wrapper.config._attn_implementation == "sdpa"


def test_a_users_own_sdpa_is_called_before_and_after(monkeypatch):
    own, model = Mock(side_effect=sdpa_attention_forward), tiny_llama()
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", own)
    for run in (model, lambda ids: gracekv.capture(model, PROMPT), model):
        run(PROMPT.ids[None])
        assert own.call_count == len(model.model.layers)
        own.reset_mock()
        attach(model)


def test_a_program_without_source_files_attaches_and_reads(monkeypatch):
    model = tiny_llama()
    want = gracekv.compress(model, PROMPT, ratio=2).generate_ids(3)
    detach(model)
    # The original reads the source file of the class.
    monkeypatch.setattr(type(model.model), "_can_set_attn_implementation", lambda *_: False)
    assert torch.equal(gracekv.compress(model, PROMPT, ratio=2).generate_ids(3), want)


def test_a_block_refuses_what_is_no_model_and_leaves_others_as_they_are():
    with pytest.raises(UnsupportedModelError, match="got NoneType"), gracekv.attached(None):
        pass
    model = tiny_llama()
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(UnsupportedModelError, match="'flex_attention'"), gracekv.attached(model):
        pass
    assert model.config._attn_implementation == "flex_attention"


def test_a_call_checks_its_model_once(monkeypatch, tmp_path):
    checks = []
    monkeypatch.setattr(supported, "check_sharding", checks.append)
    model, ids = tiny_llama(), torch.arange(60) + 1
    prompt = gracekv.Prompt.from_ids(ids, (4, 60))
    book = gracekv.compress(model, prompt, ratio=2)
    calls = [
        lambda: gracekv.compress(model, [prompt, prompt], ratio=2),
        lambda: gracekv.compress(model, prompt, prefill=gracekv.capture(model, prompt), ratio=2),
        lambda: book.extend(ids, ratio=2),
        lambda: gracekv.load(tmp_path / "book", model),
        lambda: book.generate_ids(2),
    ]
    book.save(tmp_path / "book")
    counts = []
    for call in calls:
        checks.clear()
        call()
        counts.append(len(checks))
    assert counts == [1, 2, 1, 1, 1]
