"""Compression inside transformers' own `generate`, as a callable and as a folder."""

import inspect
import shutil
from itertools import chain
from pathlib import Path

import pytest
import torch
import transformers

import gracekv
from gracekv.errors import BudgetError, ConfigError, PromptError
from support.streamed import Written

IDS = torch.randint(2, 97, (1, 200), generator=torch.Generator().manual_seed(0))
MODEL = {"layers": 3}
FOLDER = Path(__file__).parents[2] / "examples" / "custom_generate"


@pytest.mark.parametrize("question", [64, 20, 0])
def test_it_is_what_compress_and_generate_are(model, question):
    prompt = gracekv.Prompt.from_ids(IDS, (0, 200 - question))
    want = gracekv.compress(model, prompt, ratio=8).generate_ids(12)
    options = {"ratio": 8, "question_tokens": question, "max_new_tokens": 12, "pad_token_id": 1}
    got = model.generate(IDS, custom_generate=gracekv.generate, do_sample=False, **options)
    assert torch.equal(got[:, :200], IDS)
    assert torch.equal(got[:, 200:], want)


def test_the_folder_does_the_same_and_streams(model, monkeypatch, tmp_path):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    options = {"max_new_tokens": 8, "pad_token_id": 1, "ratio": 4, "attention_mask": IDS**0}
    own, pieces = Written(), Written()
    want = model.generate(IDS, custom_generate=gracekv.generate, text_streamer=own, **options)
    options |= {"custom_generate": str(FOLDER), "trust_remote_code": True}
    assert torch.equal(model.generate(IDS, streamer=pieces, **options), want)
    for each in (own, pieces):
        assert each.ended
        assert list(chain(*each.pieces)) == want[0].tolist()
    with pytest.raises(ConfigError, match=r"cannot use stop_strings. Use gracekv.compress"):
        model.generate(IDS, stop_strings=["a"], **options)


def test_a_model_s_own_repository_may_hold_the_folder(model, monkeypatch, tmp_path):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "x"))
    model.save_pretrained(tmp_path / "model")
    shutil.copytree(FOLDER / "custom_generate", tmp_path / "model" / "custom_generate")
    load = type(model).from_pretrained
    own = load(tmp_path / "model", trust_remote_code=True).eval()
    options = {"max_new_tokens": 8, "pad_token_id": 1, "attention_mask": IDS**0}
    want = model.generate(IDS, custom_generate=gracekv.generate, ratio=4, **options)
    for more in ({}, {"custom_generate": gracekv.generate}, {"custom_generate": str(FOLDER)}):
        assert own.generate(input_ids=IDS, ratio=4, **options, **more).equal(want)
    assert own.generate(IDS, ratio=4, **options).equal(want)
    assert own.generate(IDS, **options).equal(model.generate(IDS, **options))
    with pytest.raises(BudgetError, match="exactly one budget"):
        own.generate(IDS, pipeline="snapkv", **options)
    # Arguments by position and functions of the caller's own, as in the stock `generate`.
    fives = transformers.LogitsProcessorList(
        [lambda ids, x: x.index_fill(1, ids.new_tensor(5), 99)]
    )
    assert own.generate(IDS, None, fives, **options)[0, 200:].tolist() == 8 * [5]
    theirs = own.generate(IDS, custom_generate=lambda *_, **given: "theirs", **options)
    assert theirs == "theirs"
    with pytest.raises((OSError, ValueError), match="no-such-folder"):
        own.generate(IDS, custom_generate="./no-such-folder", trust_remote_code=True, **options)
    prompt = gracekv.Prompt.from_ids(IDS, (0, 136))
    results = [gracekv.compress(x, prompt, ratio=4).generate_ids(8) for x in (own, model)]
    assert results[0].equal(results[1])


def test_sampling_limits_and_other_outputs_work(model):
    limit = gracekv.Limit(entries_per_head=120, every=16, window=8)
    options = {"max_new_tokens": 40, "pad_token_id": 1, "ratio": 4, "pipeline": "snapkv"}
    torch.manual_seed(0)
    how = {"custom_generate": gracekv.generate, "return_dict_in_generate": True}
    made = model.generate(IDS, do_sample=True, limit=limit, **how, **options)
    torch.manual_seed(0)
    prompt = gracekv.Prompt.from_ids(IDS, (0, 136))
    result = gracekv.compress(model, prompt, ratio=4, pipeline="snapkv")
    want = result.generate_ids(40, limit=limit, do_sample=True)
    assert torch.equal(made.sequences[:, 200:], want)
    assert made.past_key_values.cuts > 0


def test_what_it_cannot_do_is_refused(model):
    options = {"custom_generate": gracekv.generate, "max_new_tokens": 2, "pad_token_id": 1}
    with pytest.raises(ConfigError, match="one answer without beams"):
        model.generate(IDS, ratio=4, num_beams=2, **options)
    with pytest.raises(PromptError, match="Leave inputs_embeds out"):
        model.generate(IDS, ratio=4, inputs_embeds=model.get_input_embeddings()(IDS), **options)
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    for ids, seen in ((IDS.repeat(2, 1), None), (IDS, mask)):
        with pytest.raises(PromptError, match="one prompt without padding"):
            model.generate(ids, ratio=4, attention_mask=seen, **options)
    for ids, question in ((IDS, 200), (IDS[:, :64], 64), (IDS[:, :1], 0)):
        with pytest.raises(PromptError, match=f"question_tokens={question} and {ids.shape[1]} tok"):
            model.generate(ids, ratio=4, question_tokens=question, **options)
    with pytest.raises(ConfigError, match="question_tokens takes a whole number of tokens; got st"):
        model.generate(IDS, ratio=4, question_tokens="4", **options)
    with pytest.raises(BudgetError, match="one budget: ratio, entries_per_head, kv_bytes; got no"):
        model.generate(IDS, **options)


def test_transformers_sees_its_arguments():
    assert {"ratio", "limit", "pipeline"} <= {*inspect.signature(gracekv.generate).parameters}
