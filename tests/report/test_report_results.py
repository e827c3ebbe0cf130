"""Reports from the public API and the command line, for real results of a tiny model."""

import io
import json
import re

import pytest
import torch

import gracekv
from gracekv.cli import demo
from gracekv.errors import OutputError, ReportError
from gracekv.testing.models import tiny_llama

TEXT = "The rabbit ran away because it was late. Alice followed it down the hole.\n" * 4


class Letters:
    """A tokenizer with one token per character."""

    def __call__(self, text, add_special_tokens, truncation):
        return {"input_ids": [ord(letter) % 128 for letter in text]}

    def decode(self, ids, skip_special_tokens):
        return "".join(map(chr, ids.tolist()))

    def get_vocab(self):
        return {chr(number): number for number in range(128)}


@pytest.fixture(scope="module")
def model():
    return tiny_llama(vocabulary=128)


@pytest.fixture(scope="module")
def prompt():
    return gracekv.Prompt.from_chat(Letters(), context=TEXT, question="Who was late?")


def header(path):
    text = path.read_text(encoding="utf-8")
    return json.loads(re.search(r'id="header">(.*?)</script>', text, re.DOTALL)[1])


def test_a_result_writes_its_report(model, prompt, tmp_path):
    result = gracekv.compress(model, prompt, ratio=4)
    result.report(tmp_path / "page.html", label="mine", answer="Alice")
    (column,) = header(tmp_path / "page.html")["columns"]
    assert (column["label"], column["answer"]) == ("mine", "Alice")
    assert column["accounting"]["spent"] == result.accounting.spent
    assert column["accounting"]["backend_bytes"] == result.accounting.backend_bytes
    result.report(tmp_path / "page.html")
    assert header(tmp_path / "page.html")["columns"][0]["label"] == "gracekv-plus 4x"


def test_a_batch_writes_a_page_a_prompt(model, prompt, tmp_path):
    other = gracekv.Prompt.from_chat(prompt.tokenizer, context=TEXT[:200], question="Why?")
    batch = gracekv.compress(model, [prompt, other], ratio=3)
    pages = batch.report(tmp_path / "page.html", answers=batch.generate(4))
    assert [page.name for page in pages] == ["page-1.html", "page-2.html"]
    for page, kept in zip(pages, batch.accountings, strict=True):
        shown = header(page)["columns"][0]["accounting"]
        # The backend's copies are those of all prompts together.
        assert (shown["entries"], shown["backend_bytes"]) == (kept.entries.tolist(), None)
    with pytest.raises(OutputError, match="Name a file"):
        batch.report(".")
    with pytest.raises(ReportError, match="each of the 2 prompts; got 1"):
        batch.report(tmp_path / "page.html", answers=["first"])
    with pytest.raises(ReportError, match=r"one prompt; got BatchResult.*batch\.report\(path\)"):
        gracekv.report.compare({"b": batch}, tmp_path / "page.html")


def test_a_loaded_result_reports_or_says_why_not(model, prompt, tmp_path):
    page = tmp_path / "page.html"
    for pipeline in ("snapkv", "fullkv"):
        result = gracekv.compress(model, prompt, ratio=3, pipeline=pipeline)
        result.save(tmp_path / "saved")
        again = gracekv.load(tmp_path / "saved", model, tokenizer=Letters())
        again.report(page)
        assert header(page)["columns"][0]["relevance"] is None
        gracekv.report.compare({"then": result, "now": again}, page)
        then, now = header(page)["columns"]
        assert then["accounting"]["entries"] == now["accounting"]["entries"]
        page.unlink()
    gracekv.compress(model, prompt, ratio=3, pipeline="gracekv").save(tmp_path / "saved")
    again = gracekv.load(tmp_path / "saved", model)
    with pytest.raises(ReportError, match="loaded from a file"):
        again.report(page)
    assert not page.exists()


def test_the_command_writes_a_report(cli, monkeypatch, model, tmp_path):
    monkeypatch.setattr("gracekv.hf.smollm2.load_model", lambda name, dtype: (model, Letters()))
    story, page = tmp_path / "story.txt", tmp_path / "new" / "page.html"
    story.write_text(TEXT)
    asked = ["--model", "m", "--context", story, "--question", "Who?", "--max-new-tokens", 6]
    status, out, _ = cli("compress", *asked, "--report", page)
    assert status == 0
    (column,) = header(page)["columns"]
    assert column["answer"] + "\n" == out


def test_the_demo_writes_one(model, monkeypatch, tmp_path):
    from rich.console import Console

    monkeypatch.setattr(demo, "load_smollm2", lambda: (model, Letters()))
    monkeypatch.setattr(demo, "Console", lambda: Console(file=io.StringIO(), width=200))
    from_chat = gracekv.Prompt.from_chat

    class Short:
        @staticmethod
        def from_chat(tokenizer, *, context, **texts):
            return from_chat(tokenizer, context=context[:700], **texts)

    monkeypatch.setattr(gracekv, "Prompt", Short, raising=False)
    demo.run_demo(tmp_path, max_new_tokens=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html"]
    found = header(tmp_path / "report.html")["columns"]
    labels = "gracekv-plus 8x, gracekv 8x, snapkv 8x, gracekv-plus 4x, gracekv-plus 16x"
    assert [x["label"] for x in found] == labels.split(", ")
    assert all(x["answer"] for x in found)


def test_prompts_that_differ_are_told_apart(model, tmp_path):
    prompts = (gracekv.Prompt.from_ids(torch.arange(length), (4, 50)) for length in (60, 61))
    results = {str(len(x.ids)): gracekv.compress(model, x, ratio=2) for x in prompts}
    other = gracekv.compress(tiny_llama(vocabulary=128, seed=1), results["60"].prompt, ratio=2)
    others = {"a": results["60"], "b": other}
    with pytest.raises(ReportError, match=r"those of 'a' and 'b' differ: weights"):
        gracekv.report.compare(others, tmp_path / "page.html")
    # Neither a runtime setting nor a dtype makes it another model.
    same = tiny_llama(vocabulary=128).bfloat16()
    same.config.pad_token_id = 3
    others["b"] = gracekv.compress(same, results["60"].prompt, ratio=3)
    gracekv.report.compare(others, tmp_path / "page.html")
    same.config.name_or_path = "another"
    others["b"] = gracekv.compress(same, results["60"].prompt, ratio=3)
    with pytest.raises(ReportError, match=r"differ: names\. Compress with one model"):
        gracekv.report.compare(others, tmp_path / "page.html")
    with pytest.raises(ReportError, match="'60' and '61' have different token ids"):
        gracekv.report.compare(results, tmp_path / "page.html")
