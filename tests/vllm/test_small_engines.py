"""Engines with a tiny model: tensor-parallel ranks with their own heads, compiled, no plugin."""

import contextlib
import shutil

import pytest
import torch

from gracekv.decode import Limit
from gracekv.hf.extend import limited_run
from support.compressing_engine import TEXT, Compressing, asking, compress, params, said, tokens_of
from support.context_engine import context_engine
from support.engine_answers import check_answer

# Each engine is a few processes, which take half a minute to import vLLM.
pytestmark = [pytest.mark.vllm, pytest.mark.long]


@contextlib.contextmanager
def engine(served, limit=None, **options):
    made = context_engine(served.folder, served.store, limit, max_model_len=256, **options)
    try:
        yield made
    finally:
        made.llm_engine.engine_core.shutdown()


def answers(made, served):
    """An answer about each context, all in one batch."""
    from gracekv.vllm import request

    asked = [request(served.store, name, "Why?", served.tokenizer) for name in served.results]
    prompts = [one.prompt for one in asked]
    sampled = [one.sampling_params(16, logprobs=0, ignore_eos=True) for one in asked]
    outputs = made.generate(prompts, sampled, use_tqdm=False)
    return {name: made.outputs[0] for name, made in zip(served.results, outputs, strict=True)}


@pytest.fixture(scope="module")
def big(tiny_served):
    """A context whose first rank's part is smaller than the second's."""
    alone = Compressing(tiny_served.model, tiny_served.tokenizer)
    made = alone.by_transformers(tiny_served.tokenizer(TEXT).input_ids, ratio=1.2)
    first, second = made.packed.entries().sum(0).tolist()
    # Sums in another order may change a few entries, but not this many.
    assert second - first > 0.02 * (first + second)
    return made


@pytest.fixture(scope="module")
def two_ranks(tiny_served, big):
    """An engine of two ranks with a memory limit between the sizes of the parts of `big`."""
    limit = (big.packed.kv_bytes + big.packed.metadata_bytes) // 2
    with engine(tiny_served, limit, tensor_parallel_size=2, max_num_batched_tokens=64) as made:
        yield Compressing(tiny_served.model, tiny_served.tokenizer, made, tiny_served.store)


def test_two_ranks_answer_as_one_model(tiny_served, two_ranks):
    lengths = tiny_served.results["c8"].packed.entries()
    assert (lengths[:, 0] != lengths[:, 1]).any(), "the ranks hold different numbers of entries"
    found = answers(two_ranks.engine, tiny_served)
    for name, answer in found.items():
        check_answer(tiny_served, name, "Why?", answer)
    with pytest.raises(AssertionError):
        check_answer(tiny_served, "c8", "Why?", found["c2"])


@pytest.mark.parametrize("recipe", ["gracekv-agnostic", "snapkv"])
@pytest.mark.parametrize("save", [False, True])
def test_two_ranks_make_the_context_of_one_process(two_ranks, recipe, save):
    from gracekv.vllm import ContextStore

    ids, name = two_ranks.tokenizer(TEXT).input_ids, f"{recipe}-{save}"
    # The question arrives before its context exists.
    order = compress(name, recipe=recipe, save=save)
    first, answer = two_ranks.run((ids, order), (two_ranks.question(), asking(name)))
    assert said(first) == {"name": name, "state": "compressing"}
    result = two_ranks.by_transformers(ids, pipeline=recipe)
    two_ranks.check(answer.outputs[0], result)
    kept, one = tokens_of(result.packed.layers), two_ranks.listing()[name]
    assert (one["state"], one["saved"], one["recipe"]) == ("ready", save, recipe)
    assert (one["entries"], one["bytes"]) == (len(kept), result.packed.kv_bytes)
    assert one["recorded_bytes"] > 0
    assert (name in ContextStore(two_ranks.store).names()) == save
    if save:
        stored = tokens_of(ContextStore(two_ranks.store).load(name).layers)
        assert len(stored) == len(kept)
        assert len(stored & kept) >= 0.99 * len(kept)


def test_two_ranks_extend_a_context_as_one_process(two_ranks):
    ids = two_ranks.tokenizer(TEXT).input_ids[:150]
    # An engine reads a prompt's last token again, transformers the one after the document.
    passage, limit = [*ids[20:60], ids[-1]], {"entries_per_head": 60, "window": 8}
    two_ranks.run((ids, compress("talk")))
    before = two_ranks.wait("talk")
    result = two_ranks.by_transformers(ids).extend(passage, ratio=2)
    order = {"name": "talk", "ratio": 2, "limit": limit | {"positions": "closed"}}
    two_ranks.run((passage, params({"extend": order})))
    one = two_ranks.wait("talk")
    kept = limited_run(result, Limit(**limit))
    result = result.from_runs(two_ranks.model, result.prompts, [kept], result.pipeline)
    assert (one["state"], one["entries"]) == ("ready", int(result.packed.entries().sum()))
    assert one["length"] == before["length"] + len(passage)
    two_ranks.check_about("talk", result)


def test_what_one_rank_cannot_hold_is_refused_and_the_engine_goes_on(two_ranks, big):
    ids = two_ranks.tokenizer(TEXT).input_ids
    two_ranks.run((ids, compress("big", ratio=1.2)))
    failed = two_ranks.wait("big")
    assert failed["state"] == "failed"
    assert "Process 1 of the 2 that share this model has failed" in failed["reason"]
    assert "bytes of memory" in failed["reason"]
    (refused,) = two_ranks.run((two_ranks.question(), params("big")))
    assert (said(refused)["state"], said(refused)["status"]) == ("failed", 404)
    _, answer = two_ranks.run((ids, compress("after")), (two_ranks.question(), asking("after")))
    two_ranks.check(answer.outputs[0], two_ranks.by_transformers(ids))


def test_documents_that_two_ranks_read_at_once_and_one_that_is_aborted(two_ranks):
    """Meanwhile contexts are evicted for lack of room, on each rank when its own part has none."""
    rng = torch.Generator().manual_seed(0)
    documents = {
        f"d{number}": torch.randint(5, 400, (90 + 9 * number,), generator=rng).tolist()
        for number in range(8)
    }
    core = two_ranks.engine.llm_engine
    core.add_request("gone", {"prompt_token_ids": documents["d7"]}, compress("aborted"))
    core.step()
    core.abort_request(["gone"])
    requests = []
    for name, ids in documents.items():
        requests += [(ids, compress(name)), (two_ranks.question(), asking(name))]
    for ids, answer in zip(documents.values(), two_ranks.run(*requests)[1::2], strict=True):
        two_ranks.check(answer.outputs[0], two_ranks.by_transformers(ids))
    there = two_ranks.listing()
    assert not {"aborted", "d0"} & there.keys()
    assert there["d7"]["state"] == "ready"


def test_a_recipe_that_needs_all_heads_is_refused_on_two_ranks(two_ranks, monkeypatch):
    from vllm.exceptions import VLLMValidationError

    from gracekv.value import BlockReplay

    monkeypatch.setattr(BlockReplay, "works_sharded", False)
    with pytest.raises(VLLMValidationError, match="heads are spread over processes"):
        two_ranks.run(([7] * 50, compress("all")))


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++")
def test_a_compiled_model_answers_the_same(tiny_served):
    with engine(tiny_served, enforce_eager=False) as made:
        assert made.llm_engine.vllm_config.compilation_config.mode
        found = answers(made, tiny_served)
    for name, answer in found.items():
        check_answer(tiny_served, name, "Why?", answer)


def test_without_the_plugin_an_engine_with_a_store_does_not_start(tiny_served, monkeypatch, capfd):
    monkeypatch.setenv("VLLM_PLUGINS", "none")
    fails = pytest.raises(RuntimeError, match="Engine core initialization failed")
    with fails, engine(tiny_served):
        pass
    assert "cannot be served by CPUAttentionBackendImpl" in "".join(capfd.readouterr())
