"""Engines, models and stores for tests of vLLM; those of a real vLLM run by `make test-vllm`."""

import importlib.util
import shutil
from types import SimpleNamespace

import pytest
import torch

# tests/ is on the path, so `vllm` alone would be found there.
FOUND = importlib.util.find_spec("vllm")
HAVE_VLLM = FOUND is not None and bool(FOUND.origin)


def pytest_collection_modifyitems(items):
    skip = pytest.mark.skip(reason="vLLM is not installed; run: make test-vllm")
    for item in items:
        if item.get_closest_marker("vllm") and not HAVE_VLLM:
            item.add_marker(skip)


TEXT = "Alice was beginning to get very tired of sitting by her sister on the bank. " * 8


@pytest.fixture(scope="session")
def tiny_served(tmp_path_factory):
    """A tiny model with two KV heads, and its contexts in a store."""
    import gracekv
    from gracekv.testing.models import tiny_llama, tiny_tokenizer
    from gracekv.vllm import export

    model, tokenizer = tiny_llama(vocabulary=500, dim=32), tiny_tokenizer(vocabulary=500)
    folder = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    prompt = gracekv.Prompt.from_chat(tokenizer, context=TEXT)
    results = {f"c{ratio}": gracekv.compress(model, prompt, ratio=ratio) for ratio in (2, 8)}
    for name, result in results.items():
        export(result, folder / "store" / name)
    known = {"model": model, "tokenizer": tokenizer, "results": results}
    return SimpleNamespace(folder=folder / "model", store=folder / "store", **known)


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    """The embedded model, and its contexts in a store."""
    from support.served_model import serve

    return serve(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A tiny model, and an engine that compresses, with an empty store."""
    from support.compressing_engine import started

    running = started(tmp_path_factory.mktemp("made"))
    yield running
    running.engine.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """A server for tests under load."""
    from support.loaded_server import loaded_server

    with loaded_server(tmp_path_factory.mktemp("load")) as running:
        yield running


@pytest.fixture(scope="module")
def model(request):
    """The model that workers compress for; modules with another one set `MODEL`."""
    from gracekv.testing.models import tiny_model

    return tiny_model(**getattr(request.module, "MODEL", {"kv_heads": 4}))


@pytest.fixture(scope="module")
def prefill(model):
    """The document of `recording_worker`, as transformers reads it."""
    from support.recording_worker import read_by_transformers

    return read_by_transformers(model)


@pytest.fixture(scope="session")
def stored(tmp_path_factory):
    import gracekv
    from gracekv.testing.models import tiny_model
    from gracekv.vllm import export

    model = tiny_model(kv_heads=4)
    root = tmp_path_factory.mktemp("store")
    rng = torch.Generator().manual_seed(0)
    for number in range(3):
        prompt = gracekv.Prompt.from_ids(torch.randint(0, 97, (60,), generator=rng), (0, 50))
        export(gracekv.compress(model, prompt, ratio=2), root / f"c{number}")
    return root


@pytest.fixture
def root(stored, tmp_path):
    """A test's own store, with the contexts c0, c1 and c2."""
    shutil.copytree(stored, tmp_path / "store")
    return tmp_path / "store"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """The tokenizer of the stand-in for vLLM's server; modules with another define their own."""
    from gracekv.testing.models import tiny_tokenizer

    folder = tmp_path_factory.mktemp("served")
    made = tiny_tokenizer(vocabulary=500)
    made.save_pretrained(folder)
    made.name_or_path = str(folder)
    return made


@pytest.fixture
def server(tokenizer):
    from support.context_server import context_server

    with context_server(tokenizer) as running:
        yield running


@pytest.fixture
def client(server, monkeypatch):
    from gracekv.vllm import Client

    monkeypatch.setattr("gracekv.vllm.server._POLL_SECONDS", 0.001)
    return Client(server.url)
