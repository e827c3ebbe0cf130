"""Engines of a tiny model: tensor-parallel ranks that hold their own heads, compiled, no plugin."""

import contextlib
import shutil

import pytest

from support.engine_answers import check_answer

pytestmark = pytest.mark.vllm


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


def test_two_ranks_answer_as_one_model(tiny_served):
    lengths = tiny_served.results["c8"].packed.entries()
    assert (lengths[:, 0] != lengths[:, 1]).any(), "the ranks hold different numbers of entries"
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    order = {"gracekv": {"compress": {"name": "book", "ratio": 4}}}
    compressing = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": order})
    with engine(tiny_served, tensor_parallel_size=2) as made:
        found = answers(made, tiny_served)
        with pytest.raises(VLLMValidationError, match="2 processes, and compresses in one only"):
            made.generate({"prompt_token_ids": [7] * 50}, compressing, use_tqdm=False)
    for name, answer in found.items():
        check_answer(tiny_served, name, "Why?", answer)
    with pytest.raises(AssertionError):
        check_answer(tiny_served, "c8", "Why?", found["c2"])


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++")
def test_a_compiled_model_answers_the_same(tiny_served):
    with engine(tiny_served, enforce_eager=False) as made:
        assert made.llm_engine.vllm_config.compilation_config.mode
        found = answers(made, tiny_served)
    for name, answer in found.items():
        check_answer(tiny_served, name, "Why?", answer)


@pytest.mark.long
def test_without_the_plugin_an_engine_with_a_store_does_not_start(tiny_served, monkeypatch, capfd):
    monkeypatch.setenv("VLLM_PLUGINS", "none")
    with (
        pytest.raises(RuntimeError, match="Engine core initialization failed"),
        engine(tiny_served),
    ):
        pass
    assert "cannot be served by CPUAttentionBackendImpl" in "".join(capfd.readouterr())
