"""Engines of a tiny model: tensor-parallel ranks that hold their own heads, compiled, no plugin."""

import contextlib
import shutil
from types import SimpleNamespace

import pytest

from support.engine_answers import check_answer

pytestmark = pytest.mark.vllm

TEXT = "Alice was beginning to get very tired of sitting by her sister on the bank. " * 8


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A tiny model of two KV heads, and a context in a store."""
    import gracekv
    from gracekv.testing.models import tiny_llama
    from gracekv.testing.tokenizers import tiny_tokenizer

    model, tokenizer = tiny_llama(vocabulary=500, dim=32), tiny_tokenizer(vocabulary=500)
    folder = tmp_path_factory.mktemp("ranks")
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    prompt = gracekv.Prompt.from_chat(tokenizer, context=TEXT)
    results = {f"c{ratio}": gracekv.compress(model, prompt, ratio=ratio) for ratio in (2, 8)}
    equal = {"pipeline": "gracekv-agnostic-equal", "ratio": 2}
    results["equal"] = gracekv.compress(model, prompt, **equal)
    for name, result in results.items():
        shares = "equal" if name == "equal" else "ragged"
        result.export(folder / "store" / name, shares=shares)
    return SimpleNamespace(
        model=model,
        tokenizer=tokenizer,
        folder=folder / "model",
        store=folder / "store",
        results=results,
    )


@contextlib.contextmanager
def engine(served, **options):
    from vllm import LLM
    from vllm.config import KVTransferConfig

    from gracekv.vllm import kv_transfer_config

    made = LLM(
        str(served.folder),
        dtype="float32",
        max_model_len=256,
        kv_transfer_config=KVTransferConfig(**kv_transfer_config(served.store)),
        **{"enforce_eager": True, **options},
    )
    try:
        yield made
    finally:
        made.llm_engine.engine_core.shutdown()


def answers(made, served):
    """An answer about each context, all in one batch."""
    from gracekv.vllm import request

    asked = [request(served.store, name, "Why?", served.tokenizer) for name in served.results]
    outputs = made.generate(
        [one.prompt for one in asked],
        [one.sampling_params(16, logprobs=0, ignore_eos=True) for one in asked],
        use_tqdm=False,
    )
    return {name: made.outputs[0] for name, made in zip(served.results, outputs, strict=True)}


def test_two_ranks_answer_as_one_model(served):
    lengths = served.results["c8"].packed.entries()
    assert (lengths[:, 0] != lengths[:, 1]).any(), "the ranks hold different numbers of entries"
    with engine(served, tensor_parallel_size=2) as made:
        found = answers(made, served)
    for name, answer in found.items():
        check_answer(served, name, "Why?", answer)
    with pytest.raises(AssertionError):
        check_answer(served, "c8", "Why?", found["c2"])


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++")
def test_a_compiled_model_answers_the_same(served):
    with engine(served, enforce_eager=False) as made:
        assert made.llm_engine.vllm_config.compilation_config.mode
        found = answers(made, served)
    for name, answer in found.items():
        check_answer(served, name, "Why?", answer)


def test_without_the_plugin_stock_attention_reads_equal_shares(served, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "none")
    with engine(served) as made:
        found = answers(made, served)
    check_answer(served, "equal", "Why?", found.pop("equal"))
    assert [answer.finish_reason for answer in found.values()] == ["error", "error"]
