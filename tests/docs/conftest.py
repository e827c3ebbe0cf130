"""Stand-ins for models, texts and long runs while the pages' code is executed."""

import dataclasses
import shutil

import pytest
import torch
from docs_tools import tool
from page_blocks import ROOT

from support.chapter import CHAPTER
from support.context_server import context_server

VOCABULARY = 2000
LONGEST = 60


@pytest.fixture(scope="session")
def strategy_tables():
    return tool("strategy_tables")


@pytest.fixture(scope="session")
def tiny(request):
    """A model with random weights, and its tokenizer, which any model name loads.

    With the parameter "smollm2", the embedded model.
    """
    from gracekv.hf.smollm2 import load_smollm2
    from gracekv.testing.models import tiny_llama, tiny_tokenizer

    if getattr(request, "param", None) == "smollm2":
        return load_smollm2()

    return tiny_llama(vocabulary=VOCABULARY, positions=8192), tiny_tokenizer(vocabulary=VOCABULARY)


@pytest.fixture
def reader(tiny, tmp_path, monkeypatch, commands):
    """The reader's folder: a checkout's files, a book, and models that load at once.

    - No answer has more than `LONGEST` tokens.
    - `from_pretrained` and "smollm2" give the tiny model for any name.
    - `book.txt` is the beginning of the chapter that comes with gracekv.
    - `gracekv.vllm.Client` asks a stand-in for vLLM's server.
    - An evaluation runs with all its methods, but one sample of its first task at its first
      budget and length.
    """

    import gracekv.cli.demo
    import gracekv.evaluate.runner
    import gracekv.hf.smollm2
    import gracekv.vllm

    model, tokenizer = tiny
    model.config.name_or_path = gracekv.hf.smollm2.MODEL_NAME
    generate = model.generate

    def briefly(*args, max_new_tokens=20, **options):
        return generate(*args, max_new_tokens=min(max_new_tokens, LONGEST), **options)

    monkeypatch.setattr(model, "generate", briefly)
    for auto, made in (("AutoModelForCausalLM", model), ("AutoTokenizer", tokenizer)):
        monkeypatch.setattr(f"transformers.{auto}.from_pretrained", lambda *_, m=made, **__: m)
    for module in (gracekv.cli.demo, gracekv.hf.smollm2):
        monkeypatch.setattr(module, "load_smollm2", lambda *_, **__: (model, tokenizer))
    run = gracekv.evaluate.runner.run

    def short(experiment, *args, **kwargs):
        panel = experiment.panels[0]
        panel = dataclasses.replace(
            panel, tasks=panel.tasks[:1], lengths=panel.lengths[:1], ratios=panel.ratios[:1],
            entries=panel.entries[: 0 if panel.ratios else 1], samples=1, max_new_tokens=4,
        )  # fmt: skip
        return run(dataclasses.replace(experiment, panels=(panel,)), *args, **kwargs)

    monkeypatch.setattr(gracekv.evaluate.runner, "run", short)
    (tmp_path / "book.txt").write_text(CHAPTER[:2400], encoding="utf-8")
    shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    torch.manual_seed(0)
    with context_server(tokenizer) as server:
        client = gracekv.vllm.Client(server.url)
        monkeypatch.setattr(gracekv.vllm, "Client", lambda _: client)
        yield tmp_path
