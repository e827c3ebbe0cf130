"""Saved caches: identical in a new process, refused if damaged or another model's."""

import copy
import hashlib
import json
import os
import pickle
import sys
from types import SimpleNamespace

import pytest
import torch

import gracekv
from gracekv.backends import Eager
from gracekv.cache import serialization
from gracekv.errors import CacheError, OutputError, SavedCacheError
from gracekv.hf import BatchResult, CompressionResult, detach
from gracekv.prefill.fingerprint import fingerprint
from gracekv.testing.models import tiny_llama
from support.batches import Numbers, prompts_of
from support.same_results import assert_same_accounting, assert_same_entries

safetensors = pytest.importorskip("safetensors.torch")
SafetensorError = pytest.importorskip("safetensors").SafetensorError

MODEL = {"layers": 3}
SPANS = [(90, 4, 80), (150, 0, 139)]


@pytest.fixture(scope="module", params=["one", "batch"])
def result(request, model):
    prompts = prompts_of(0, SPANS, Numbers())
    return gracekv.compress(model, prompts if request.param == "batch" else prompts[0], ratio=3)


@pytest.fixture
def saved(result, tmp_path):
    path = tmp_path / "folder" / "cache.gracekv"
    result.save(path)
    assert os.listdir(path.parent) == [path.name]
    return path


def test_everything_comes_back_bit_for_bit(model, result, saved):
    again = gracekv.load(saved, model)
    assert type(again) is type(result)
    assert again.pipeline == result.pipeline
    assert_same_entries(again.packed, result.packed)
    assert_same_accounting(again.accounting, result.accounting)
    if isinstance(result, CompressionResult):
        assert again.timings == result.timings
        assert again.runs[0].plan == result.runs[0].plan
        assert again.packed.length == result.packed.length
    else:
        assert isinstance(again, BatchResult)
        assert again.new_cache().padding == result.packed.padding == (60, 0)
    assert torch.equal(again.inputs["input_ids"], result.inputs["input_ids"])
    assert torch.equal(again.generate_ids(9), result.generate_ids(9))


def test_a_pickle_is_refused_and_names_what_works(result):
    for refused in (pickle.dumps, copy.deepcopy, lambda x: pickle.dumps(x.new_cache())):
        with pytest.raises(CacheError, match=r"result\.save.*gracekv\.load"):
            refused(result)
    # A result passed as a cache.
    for run in (result.model, result.model.generate):
        with pytest.raises(CacheError, match=r"result\.new_cache\(\)"):
            run(**result.inputs, past_key_values=result)


def test_text_needs_the_same_tokenizer(model, result, saved):
    assert gracekv.load(saved, model, tokenizer=Numbers()).generate(5) == result.generate(5)
    # Saved again by a result that does not know its tokenizer.
    gracekv.load(saved, model).save(saved)
    with pytest.raises(SavedCacheError, match="tokenizer differ"):
        gracekv.load(saved, model, tokenizer=Numbers(98))
    with pytest.raises(SavedCacheError, match="chat_template differ"):
        gracekv.load(saved, model, tokenizer=Numbers(template="{{ x }}"))


def test_the_backend_may_be_another(model, saved):
    again = gracekv.load(saved, model, backend="eager")
    assert again.new_cache().layers[0].packed.backend == again.pipeline.backend == Eager()


def test_a_detached_model_is_the_same_model_and_gets_attached(model, result, saved):
    detach(model)
    again = gracekv.load(saved, model)
    assert model.config._attn_implementation == "gracekv"
    assert torch.equal(again.generate_ids(3), result.generate_ids(3))


OTHER_MODELS = [
    ({"layers": 3, "seed": 1}, "weights differ"),
    ({"layers": 2}, r"config .*, weights differ"),
    (
        {"layers": 3, "dtype": torch.bfloat16},
        r"its dtype \(float32 then, bfloat16 now\), weights differ from those of the model",
    ),
    ({"layers": 3, "rope": "yarn"}, r"config \(1 of .*, rope_parameters first\) differ"),
]


@pytest.mark.parametrize(("fields", "what"), OTHER_MODELS)
def test_another_model_is_refused(saved, fields, what):
    with pytest.raises(SavedCacheError, match=f"LlamaForCausalLM.*{what}"):
        gracekv.load(saved, tiny_llama(**fields))


def test_a_model_is_known_after_it_was_saved_and_loaded(tmp_path):
    from transformers import AutoModelForCausalLM

    model = tiny_llama()
    before = fingerprint(model)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    known = {name: mark for name, mark in fingerprint(again).items() if name != "model_name"}
    assert known == {name: before[name] for name in known}


def rewritten(path, change):
    """The file with other metadata or tensors, and everything else intact."""
    with safetensors.safe_open(path, "pt") as file:
        parts = SimpleNamespace(
            metadata=dict(file.metadata()),
            tensors={name: file.get_tensor(name) for name in file.keys()},  # noqa: SIM118
        )
    change(parts)
    safetensors.save_file(parts.tensors, path, metadata=parts.metadata)


def headed(text):
    """The text in place of the header, with a valid checksum."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    return lambda parts: parts.metadata.update(gracekv=text, gracekv_sha256=digest)


def reheaded(**fields):
    def change(parts):
        headed(json.dumps(json.loads(parts.metadata["gracekv"]) | fields))(parts)

    return change


def without_adapters(parts):
    """As written by versions that did not record adapters."""
    model = json.loads(parts.metadata["gracekv"])["model"]
    del model["adapters"]
    reheaded(model=model)(parts)


def emptied(name):
    """The tensor [E] as [E, 0], with a valid checksum."""

    def change(parts):
        parts.tensors[name] = parts.tensors[name][:, None][:, :0].clone()
        sums = json.loads(parts.metadata["gracekv"])["sha256"]
        reheaded(sha256=sums | {name: serialization._digest(parts.tensors[name])})(parts)

    return change


NESTED = "last_query"
for _ in range(170):
    NESTED = {"name": "mixture", "scorers": [NESTED]}


@pytest.fixture
def stock_recursion_limit():
    """Python's own: compiling a model raises it for the rest of the process."""
    raised = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(raised)


DAMAGED = [
    (lambda p: p.metadata.update(gracekv_format="5"), "format '5', .* reads formats 1 to 4"),
    (lambda p: p.metadata.clear(), "not a cache saved by gracekv"),
    (
        lambda p: p.metadata.update(gracekv=p.metadata["gracekv"].replace("spans", "sqans")),
        "header of .* is damaged",
    ),
    (lambda p: p.tensors["layers.1.values"][3, 2].add_(1), r"layers\.1\.values .*checksum"),
    (lambda p: p.tensors["prompts.0.ids"].add_(1), r"prompts\.0\.ids .*checksum"),
    (lambda p: p.tensors.pop("layers.2.keys"), r"lacks or adds layers\.2\.keys"),
    (lambda p: p.tensors.update(more=torch.ones(1)), "lacks or adds more"),
    (without_adapters, r"earlier versions\. Compress and save again"),
    (reheaded(layers=2), "holds 2 layers, but the model has 3"),
    (reheaded(padding=[0, 0, 0]), "does not hold a whole cache"),
    (emptied("layers.1.positions"), "does not hold a whole cache"),
    (reheaded(pipeline={"value": NESTED}), r"pipeline cannot be made here\. .*recursion"),
    (headed("{"), "does not hold a header"),
    (reheaded(prompts=[{"accounting": {"utility": float("inf")}}]), "not JSON compliant"),
    (headed("[" * 100_000), "does not hold a header"),
]


@pytest.mark.usefixtures("stock_recursion_limit")
@pytest.mark.parametrize(("change", "message"), DAMAGED)
def test_what_cannot_be_trusted_is_refused(model, saved, change, message):
    rewritten(saved, change)
    with pytest.raises(SavedCacheError, match=message):
        gracekv.load(saved, model)


def test_a_missing_file_or_another_kind_is_refused(model, tmp_path):
    (tmp_path / "text").write_text("no tensors here")
    for name in ("none", "text", "a name that is too long" * 20):
        with pytest.raises(SavedCacheError, match="Cannot read"):
            gracekv.load(tmp_path / name, model)


def test_a_head_need_not_keep_the_last_token_of_a_prompt_that_is_all_context(model, tmp_path):
    pipeline = gracekv.Pipeline.from_dict({"window": {"size": 0, "minimum": 0}}, base="knorm")
    prompt = gracekv.Prompt.from_ids(torch.arange(60), (4, 60))
    result = gracekv.compress(model, prompt, ratio=3, pipeline=pipeline)
    result.save(tmp_path / "x")
    assert gracekv.load(tmp_path / "x", model).accounting.spent == result.accounting.spent


def test_a_failed_save_leaves_the_old_file(model, result, saved, monkeypatch):
    before = saved.read_bytes()

    def breaks(tensors, path, metadata):
        path.write_bytes(b"half")
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(safetensors, "save_file", breaks)
    with pytest.raises(OutputError, match=r"Cannot write to .*No space left.*is unchanged"):
        result.save(saved)
    assert saved.read_bytes() == before
    assert os.listdir(saved.parent) == [saved.name]
