"""Exported contexts: the folder's content, refusals, and keys rotated to position zero."""

import json
import os

import pytest
import torch

import gracekv
from gracekv.cache.base import RaggedCache
from gracekv.errors import PromptError, StoreError, UnsupportedModelError
from gracekv.prefill.fingerprint import differences
from gracekv.prefill.messages import first_turn
from gracekv.prefill.model_layers import model_layers
from gracekv.testing.models import tiny_model, tiny_tokenizer
from gracekv.vllm import ContextStore, export, request
from gracekv.vllm.exporting import _alone_in, delete_context, rotated_back
from gracekv.vllm.served_model import checkpoint_digests, model_facts
from support.killed import killed_at_each_line
from support.tried_families import tried_model

TEXT = "Alice was beginning to get very tired of sitting by her sister on the bank. " * 6


MODEL = {"vocabulary": 500}


@pytest.fixture(scope="module")
def book(model, tokenizer):
    return gracekv.compress(model, gracekv.Prompt.from_chat(tokenizer, context=TEXT), ratio=2)


@pytest.mark.parametrize("rope", ["default", "linear", "llama3", "yarn"])
def test_keys_of_a_context_are_moved_to_where_the_question_begins(rope):
    model = tiny_model(rope=rope)
    rotary, rng = model.get_decoder().rotary_emb, torch.Generator().manual_seed(1)
    ids = torch.randint(0, 97, (60,), generator=rng)
    result = gracekv.compress(model, gracekv.Prompt.from_ids(ids, (0, 50)), ratio=1)

    def rotated(x, position):
        cos, sin = rotary(x, torch.tensor([[position]]))
        half = x.shape[-1] // 2
        return x * cos[0] + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin[0]

    query = torch.randn(1, 16, generator=rng)
    for before, after in zip(
        result.packed.layers, rotated_back(model, result.packed).layers, strict=True
    ):
        for ahead in (0, 7):
            want = rotated(query, result.packed.length + ahead) @ before.keys.T
            got = rotated(query, ahead) @ after.keys.T
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
            assert not torch.allclose(rotated(query, ahead) @ before.keys.T, want, atol=1e-2)


@pytest.mark.parametrize("family", ["llama", "glm4", "smollm3"])
def test_keys_are_moved_as_each_layer_rotates_them(family):
    """Keys of a first layer depend only on token and position; some layers have no RoPE."""
    model, ids = tiny_model(family), torch.arange(60)

    def full(ids, end):
        prompt = gracekv.Prompt.from_ids(ids, (0, end))
        return gracekv.compress(model, prompt, ratio=1, pipeline="fullkv").packed

    late, early = full(ids, 50), full(ids[10:], 40)
    turned = rotated_back(model, RaggedCache(late.layers, 10))
    want = early.layers[0].keys.view(2, early.length, -1)
    before, after = (x.layers[0].keys.view(2, late.length, -1)[:, 10:] for x in (late, turned))
    torch.testing.assert_close(after, want, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(before, want, atol=1e-2)
    for layer, old, new in zip(model_layers(model), late.layers, turned.layers, strict=True):
        assert torch.equal(old.keys, new.keys) == (layer.rotation == "none")


def test_the_folder_holds_entries_and_header(book, model, tokenizer, tmp_path):
    folder = export(book, tmp_path / "store" / "book")
    names = sorted(path.name for path in folder.iterdir())
    assert names == [ContextStore(folder.parent).header("book").entries_file, "header.json"]
    assert [path.name for path in folder.parent.iterdir()] == ["book"]
    store = ContextStore(tmp_path / "store", model=model_facts(model))
    header, context = store.header("book"), store.load("book")
    assert store.names() == ["book"]
    assert header.length == book.packed.length
    assert (header.dtype, header.recipe) == ("float32", "gracekv-agnostic")
    assert header.entries == sum(layer.entries for layer in context.layers)
    for mine, made in zip(context.layers, book.packed.layers, strict=True):
        assert torch.equal(mine.values, made.values)
        assert torch.equal(mine.offsets, made.offsets)
        # Rotations preserve norms.
        torch.testing.assert_close(mine.keys.norm(dim=1), made.keys.norm(dim=1))
    assert "{question}" in header.question_text


def test_a_second_export_replaces_the_first(book, model, tokenizer, tmp_path):
    folder = export(book, tmp_path / "book")
    before = ContextStore(tmp_path).header("book").digest
    for path in folder.iterdir():
        path.chmod(0o600)
    assert export(gracekv.compress(model, book.prompt, ratio=3), tmp_path / "book") == folder
    header = ContextStore(tmp_path).header("book")
    assert header.digest != before
    assert [path.name for path in tmp_path.iterdir()] == ["book"]
    assert {path.name for path in folder.iterdir()} == {"header.json", header.entries_file}
    # It is as private as the first one.
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_what_no_export_wrote_is_not_replaced(book, tmp_path):
    theses = tmp_path / "theses"
    theses.mkdir()
    (theses / "chapter.tex").write_text("ten years of work")
    (tmp_path / "link").symlink_to(theses)
    (tmp_path / "file").write_text("mine")
    export(book, tmp_path / "mixed")
    (tmp_path / "mixed" / "notes.txt").write_text("mine")
    for name in ("theses", "link", "file", "mixed"):
        with pytest.raises(StoreError, match="not replaced"):
            export(book, tmp_path / name)
    assert (theses / "chapter.tex").read_text() == "ten years of work"
    assert (tmp_path / "file").read_text() == "mine"
    assert (tmp_path / "mixed" / "notes.txt").read_text() == "mine"
    # Files of earlier versions are a context, and so are remains of a killed export.
    (tmp_path / "mixed" / "notes.txt").rename(tmp_path / "mixed" / "entries.safetensors")
    (tmp_path / "mixed" / ".new.safetensors-ab12").write_text("")
    (tmp_path / "mixed" / ".tmpAb12Cd").write_text("")
    assert len(list(export(book, tmp_path / "mixed").iterdir())) == 2
    with _alone_in(tmp_path / "mixed"), pytest.raises(StoreError, match="being written"):
        delete_context(tmp_path / "mixed")
    (tmp_path / "left").mkdir()
    (tmp_path / "left" / "new.safetensors").write_text("")
    assert not any(map(delete_context, (tmp_path / "left", theses)))
    assert not (tmp_path / "left").exists()


def test_an_export_that_is_killed_leaves_the_old_or_the_new_context(book, tmp_path):
    others = [book, gracekv.compress(book.model, book.prompt, ratio=3)]
    stores = (ContextStore(export(x, tmp_path / "want").parent) for x in others)
    digests = [store.header("want").digest for store in stores]
    functions = ("export", "write_context", "_alone_in", "_delete", "replacing", "write_cache")
    before = tmp_path / "store" / "book"
    seen = []
    for count in killed_at_each_line(functions, lambda n: export(others[n % 2], before)):
        store = ContextStore(tmp_path / "store")
        if before.is_dir() and store.names():
            seen.append(digests.index(store.load("book").header.digest))
        else:
            assert not seen, f"gone after {count} lines"
    assert count > 30
    assert set(seen) == {0, 1}
    assert len(list(before.iterdir())) == 2


@pytest.mark.parametrize("step", ["describe", "rotated_back"])
def test_a_failed_export_leaves_nothing(book, tmp_path, monkeypatch, step):
    monkeypatch.setattr(f"gracekv.vllm.exporting.{step}", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export(book, tmp_path / "book")
    assert not list(tmp_path.iterdir())


def test_a_batch_writes_a_folder_for_each_prompt(model, tokenizer, tmp_path):
    prompts = [gracekv.Prompt.from_chat(tokenizer, context=text) for text in (TEXT, TEXT[:300])]
    folders = export(gracekv.compress(model, prompts, ratio=2), tmp_path / "two")
    assert [folder.name for folder in folders] == ["two-1", "two-2"]
    lengths = [ContextStore(tmp_path).header(folder.name).length for folder in folders]
    assert lengths == [prompt.spans.context_end for prompt in prompts]


def test_requests_hold_what_follows_the_context(book, model, tokenizer, tmp_path):
    export(book, tmp_path / "book")
    asked = request(tmp_path, "book", "Who is tired?", tokenizer)
    turn = first_turn(tokenizer, "Who is tired?", "\n\n", True)
    assert list(asked.prompt_ids) == turn
    assert asked.prompt == {"prompt_token_ids": turn}
    body = asked.body("tiny", 5, stream=True)
    assert body["kv_transfer_params"] == {"gracekv": "book"}
    told = asked.body("served", kv_transfer_params={"client": "alice"})["kv_transfer_params"]
    assert told == {"client": "alice", "gracekv": "book"}
    assert (body["prompt"], body["max_tokens"], body["stream"]) == (turn, 5, True)
    assert asked.room == 4096 - book.packed.length
    with pytest.raises(PromptError, match="pass the"):
        asked.body("tiny", 4096)


def test_a_prompt_with_its_question_goes_on_after_it(model, tokenizer, tmp_path):
    prompt = gracekv.Prompt.from_chat(tokenizer, context=TEXT, question="Who is tired?")
    export(gracekv.compress(model, prompt, ratio=2), tmp_path / "asked")
    assert list(request(tmp_path, "asked").prompt_ids) == prompt.ids[-1:].tolist()
    with pytest.raises(PromptError, match="has a question already"):
        request(tmp_path, "asked", "Another?", tokenizer)


BAD_QUESTIONS = [
    (None, True, PromptError, "pass question"),
    ("", True, PromptError, "must be non-empty"),
    ("Why?", False, PromptError, "needs the tokenizer"),
    ("Why?", None, StoreError, "another tokenizer: tokenizer differ"),
]


@pytest.mark.parametrize(("question", "tokens", "error", "said"), BAD_QUESTIONS)
def test_unusable_questions_are_refused(book, tokenizer, tmp_path, question, tokens, error, said):
    export(book, tmp_path / "book")
    given = {True: tokenizer, False: None, None: tiny_tokenizer(vocabulary=400)}[tokens]
    with pytest.raises(error, match=said):
        request(tmp_path, "book", question, given)


UNSERVED = [
    ({"rope": "dynamic"}, "RoPE 'dynamic'"),
    ({"family": "phi3", "rope": "longrope"}, "RoPE 'longrope'"),
    ({"family": "mistral", "window": 64}, "sliding window of 64"),
    ({"family": "ministral3"}, "scales its queries"),
]


@pytest.mark.parametrize(("options", "said"), UNSERVED)
@pytest.mark.filterwarnings("ignore::gracekv.errors.LengthWarning")
def test_models_that_vllm_would_see_otherwise_are_refused(options, said, tmp_path):
    model = (tried_model if options.get("family") == "ministral3" else tiny_model)(**options)
    result = gracekv.compress(model, gracekv.Prompt.from_ids(torch.arange(40), (0, 36)), ratio=2)
    with pytest.raises(UnsupportedModelError, match=said):
        export(result, tmp_path / "book")


@pytest.mark.parametrize("name", ["..", ".hidden", "a b", "b" * 129, "nul", "book."])
def test_names_that_are_no_folder_names_are_refused(book, tmp_path, name):
    with pytest.raises(StoreError, match="A context's name"):
        export(book, tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_is_known_by_its_weights(model, tmp_path):
    facts = model_facts(model)
    for folder, size in (("one", "1GB"), ("sharded", "100KB")):
        model.save_pretrained(tmp_path / folder, max_shard_size=size)
        assert checkpoint_digests(tmp_path / folder, model.dtype) == facts["weights"]
    (other,) = differences(facts, model_facts(tiny_model(vocabulary=500, seed=1)))
    assert other.startswith("weights (")
    linear = model_facts(tiny_model(vocabulary=500, rope="linear"))
    assert differences(facts, linear) == ["rope (1 of 2, rope_type first)"]
    (other,) = differences(facts, {**facts, "dtype": "bfloat16"})
    assert other == "dtype (float32 then, bfloat16 now)"
    assert differences(facts, {**facts, "quantised": True}) == ["quantised"]
    assert differences(facts, {**facts, "weights": {"other": ""}}) == ["weights (0 of 0)"]
    assert not differences(facts, json.loads(json.dumps(facts)))
    assert checkpoint_digests(tmp_path / "nowhere", model.dtype) is None


def test_no_weight_changes_unnoticed():
    """Embeddings, norms and every projection of every layer, also where input 0 stays."""
    model = tiny_model(layers=4)
    made = model_facts(model)
    for name, weight in model.named_parameters():
        with torch.no_grad():
            before = weight.clone()
            weight[..., 1:] += 0.5
            (changed,) = differences(made, model_facts(model))
            weight.copy_(before)
        place = name.replace("model.", "")
        assert changed == f"weights (1 of {len(made['weights'])}, {place} first)"
    assert not differences(made, model_facts(model))


def test_a_model_that_caps_logits_or_has_an_active_adapter_is_refused(book, tmp_path, monkeypatch):
    monkeypatch.setattr(book.model.config, "attn_logit_softcapping", 30.0, raising=False)
    monkeypatch.setattr("gracekv.vllm.served_model.active_adapters", lambda model: ["poet"])
    with pytest.raises(UnsupportedModelError, match=r"adapters poet.*caps .* logits at 30\.0"):
        export(book, tmp_path / "book")


def test_a_lock_on_a_folder_that_is_removed_meanwhile_is_taken_anew(book, tmp_path, monkeypatch):
    fcntl, locked, folder = pytest.importorskip("fcntl"), [], tmp_path / "book"

    def late(handle, how):
        # The previous export deletes the context, and another starts it again.
        for change in () if locked else (folder.rmdir, folder.mkdir):
            change()
        locked.append(os.fstat(handle).st_ino)

    monkeypatch.setattr(fcntl, "flock", late)
    export(book, folder)
    assert locked[1:] == [folder.stat().st_ino]
