"""Commands that read a saved cache: generate, ask, chat and export, over a tiny real model."""

import dataclasses
import io
import sys
from types import SimpleNamespace

import pytest

import gracekv
from gracekv.hf.conversation import Conversation
from gracekv.hf.smollm2 import MODEL_NAME


@pytest.fixture
def loads(monkeypatch):
    """Load a tiny model for every name; returns the requested names and dtypes."""
    from gracekv.hf import smollm2
    from gracekv.testing.models import tiny_llama, tiny_tokenizer

    model, tokenizer = tiny_llama(vocabulary=2000, positions=4096), tiny_tokenizer()
    seen = []

    def load_model(name, dtype):
        seen.append((name, dtype))
        return model, tokenizer

    monkeypatch.setattr(smollm2, "load_model", load_model)
    return SimpleNamespace(seen=seen, model=model, tokenizer=tokenizer)


@pytest.fixture
def book(loads, tmp_path):
    """A saved context without a question, and its path."""
    prompt = gracekv.Prompt.from_chat(loads.tokenizer, context="Alice fell. " * 40)
    result = gracekv.compress(loads.model, prompt, ratio=2)
    result.save(tmp_path / "book")
    return result, tmp_path / "book"


def test_a_saved_cache_is_generated_from(cli, refused, loads, tmp_path):
    """With a real, tiny model: `generate` prints the result's answer."""
    prompts = [
        gracekv.Prompt.from_chat(loads.tokenizer, context="Alice fell. " * n, question="Who?")
        for n in (20, 30)
    ]
    path = tmp_path / "cache"
    one = gracekv.compress(loads.model, prompts[0], ratio=2)
    one.save(path)
    shown = cli("generate", path, "--model", "m", "--max-new-tokens", 5)
    assert shown == (0, one.generate(5) + "\n", "")
    assert loads.seen == [("m", "float32")]
    both = gracekv.compress(loads.model, prompts, ratio=2)
    both.save(path)
    _, out, _ = cli("generate", path, "--model", "m", "--max-new-tokens", 5)
    assert out == "\n\n".join(both.generate(5)) + "\n"
    for argv in (("ask", path, "Who?"), ("chat", path)):
        err = refused(*argv, "--model", "m")
        assert "PromptError: " in err
        assert "holds 2 contexts" in err


def test_a_saved_context_is_asked(cli, refused, loads, book):
    result, path = book
    status, out, _ = cli("ask", path, "Who fell?", "--model", "m", "--max-new-tokens", 5)
    assert (status, out) == (0, result.ask("Who fell?", 5) + "\n")
    _, out, _ = cli("ask", path, "Who fell?", "Why?", "--model", "m", "--max-new-tokens", 5)
    first, second = result.ask(["Who fell?", "Why?"], 5)
    assert out == f"> Who fell?\n{first}\n\n> Why?\n{second}\n\n"
    assert "A question must be non-empty text" in refused("ask", path, " ", "--model", "m")
    told = refused("generate", path, "--model", "m")
    assert "was saved without a question: use gracekv ask." in told


def rename(result, path, name):
    """Save a file that names `model`."""
    fingerprint = {**result.fingerprint, "model_name": name}
    runs = tuple(dataclasses.replace(run, fingerprint=fingerprint) for run in result.runs)
    dataclasses.replace(result, runs=runs).save(path)


def test_a_model_that_a_file_names_is_not_downloaded(cli, refused, loads, book):
    result, path = book
    rename(result, path, "somebody/a-model")
    for command in (("ask", path, "Who fell?"), ("chat", path), ("generate", path)):
        err = refused(*command)
        assert "names the model 'somebody/a-model', which is not a folder here" in err
        assert "give it with --model" in err
    assert loads.seen == []
    # If the user names it, it is loaded.
    assert cli("ask", path, "Who fell?", "--model", "somebody/a-model")[0] == 0


def test_the_file_names_its_model(cli, refused, loads, book, tmp_path):
    result, path = book
    assert "does not name its model. Give it with --model" in refused("ask", path, "Who fell?")
    for name, wanted in ((str(tmp_path), str(tmp_path)), (MODEL_NAME, "smollm2")):
        rename(result, path, name)
        assert cli("ask", path, "Who fell?", "--max-new-tokens", 2)[0] == 0
        assert loads.seen[-1] == (wanted, "float32")


def test_a_conversation_keeps_its_history(cli, loads, book, monkeypatch):
    result, path = book
    monkeypatch.setattr(sys, "stdin", io.StringIO("Who fell?\n\nWhy?\n"))
    status, out, _ = cli("chat", path, "--model", "m", "--max-new-tokens", 5)
    with result.chat() as chat:
        answers = [chat.ask("Who fell?", 5), chat.ask("Why?", 5)]
    assert (status, out) == (0, "".join(f"{answer}\n\n" for answer in answers) + "\n")


def test_a_conversation_is_text(refused, book, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Zo\xe9?\n"), "utf-8"))
    assert "not UTF-8 text" in refused("chat", book[1], "--model", "m")


def test_an_interrupt_stops_the_answer_and_then_the_conversation(cli, loads, book, monkeypatch):
    result, path = book
    said = iter(["Who fell?", "Why?", KeyboardInterrupt()])

    def spoken(prompt):
        line = next(said)
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", spoken)
    ask = Conversation.ask

    def interrupted(self, question, *args, **options):
        stream = ask(self, question, *args, **options)
        if question == "Who fell?":
            yield next(stream)
            stream.close()
            raise KeyboardInterrupt
        yield from stream

    monkeypatch.setattr(Conversation, "ask", interrupted)
    status, out, err = cli("chat", path, "--model", "m", "--max-new-tokens", 5)
    assert status == 0
    assert "question and its answer are forgotten" in err
    assert result.ask("Why?", 5) in out


def test_a_saved_context_is_exported(cli, refused, loads, book, tmp_path):
    from gracekv.vllm import ContextStore

    result, path = book
    store = tmp_path / "store"
    line = f"{store / 'alice'}\n"
    options = ("--store", store, "--engine", "vllm", "--model", "m")
    assert cli("export", path, *options, "--name", "alice") == (0, line, "")
    assert ContextStore(store).header("alice").length == result.packed.length
    assert cli("export", path, *options)[1] == f"{store / 'book'}\n"
    other = ("--store", store, "--engine", "tgi", "--model", "m")
    assert "'tgi' is not" in refused("export", path, *other)


def test_an_export_stays_in_its_store_which_is_a_folder(refused, loads, book, story, tmp_path):
    for name in ("../evil", "/evil", "..", "a/b", "nul"):
        said = refused("export", book[1], "--store", tmp_path / "store", "--name", name)
        assert "A context's name" in said
    assert not (tmp_path / "store").exists()
    assert not (tmp_path / "evil").exists()
    assert refused("export", book[1], "--store", story).startswith("OutputError: Cannot write to")
    assert not loads.seen


def test_a_file_that_is_no_cache_is_told_before_the_model_is_loaded(refused, story, loads):
    for argv in (("generate", story), ("ask", story, "Who?"), ("chat", story)):
        err = refused(*argv)
        assert "SavedCacheError: Cannot read the saved cache" in err
        assert "it is not a file written by result.save" in err
    assert "is a folder" in refused("generate", story.parent)
    assert not loads.seen
