"""With tensor parallelism each rank holds its own heads of a context."""

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
    results = {ratio: gracekv.compress(model, prompt, ratio=ratio) for ratio in (2, 8)}
    for ratio, result in results.items():
        result.export(folder / "store" / f"c{ratio}")
    return SimpleNamespace(
        model=model,
        tokenizer=tokenizer,
        folder=folder / "model",
        store=folder / "store",
        results={f"c{ratio}": result for ratio, result in results.items()},
    )


def test_two_ranks_answer_as_one_model(served):
    from vllm import LLM
    from vllm.config import KVTransferConfig

    from gracekv.vllm import kv_transfer_config, request

    lengths = served.results["c2"].packed.entries()
    assert (lengths[:, 0] != lengths[:, 1]).any(), "the ranks hold different numbers of entries"
    engine = LLM(
        str(served.folder),
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        tensor_parallel_size=2,
        kv_transfer_config=KVTransferConfig(**kv_transfer_config(served.store)),
    )
    try:
        asked = [request(served.store, name, "Why?", served.tokenizer) for name in served.results]
        outputs = engine.generate(
            [one.prompt for one in asked],
            [one.sampling_params(16, logprobs=0, ignore_eos=True) for one in asked],
            use_tqdm=False,
        )
    finally:
        engine.llm_engine.engine_core.shutdown()
    for name, output in zip(served.results, outputs, strict=True):
        check_answer(served, name, "Why?", output.outputs[0])
    with pytest.raises(AssertionError):
        check_answer(served, "c8", "Why?", outputs[0].outputs[0])
