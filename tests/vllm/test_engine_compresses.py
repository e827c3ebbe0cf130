"""A stock vLLM compresses prompts itself: its contexts match those made with transformers.

One engine with a tiny model, few pages and short steps, so that documents are read in chunks and
preempted.
"""

import itertools
import shutil

import pytest
import torch

from support.compressing_engine import SEQUENCES, TEXT, asking, compress, params, said, tokens_of

pytestmark = [pytest.mark.vllm, pytest.mark.long]


@pytest.mark.parametrize("recipe", ["gracekv-agnostic", "knorm", "snapkv", "expected-attention"])
def test_a_context_is_that_of_transformers(made, recipe):
    from gracekv.vllm import ContextStore

    ids = made.tokenizer(TEXT).input_ids
    order = compress(recipe, recipe=recipe, save=True)
    first, answer = made.run((ids, order), (made.question(), asking(recipe)))
    assert said(first) == {"name": recipe, "state": "compressing"}
    result = made.by_transformers(ids, pipeline=recipe)
    made.check(answer.outputs[0], result)
    stored = tokens_of(ContextStore(made.store).load(recipe).layers)
    kept = tokens_of(result.packed.layers)
    assert len(stored) == len(kept)
    assert len(stored & kept) >= 0.99 * len(kept)
    one = made.listing()[recipe]
    assert (one["state"], one["saved"], one["recipe"]) == ("ready", True, recipe)
    facts = len(ids), len(kept), pytest.approx(4, 0.1)
    assert (one["length"], one["entries"], one["ratio"]) == facts
    assert one["seconds"] > 0
    # Keys and values of all tokens in float32, and the queries that the recipe needs.
    config = made.model.config
    token = config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2 * 4
    assert one["recorded_bytes"] >= (len(ids) + 1) * token


def test_documents_questions_and_ordinary_requests_at_once(made):
    """Questions arrive before their contexts exist; documents are preempted on the way."""
    rng = torch.Generator().manual_seed(0)
    documents = {
        f"d{number}": torch.randint(5, 400, (100 + 7 * number,), generator=rng).tolist()
        for number in range(20)
    }
    plain = [torch.randint(5, 400, (20,), generator=rng).tolist() for _ in range(20)]
    ordinary = params(None, 60, ignore_eos=True)
    alone = [list(x.outputs[0].token_ids) for x in made.run(*((ids, ordinary) for ids in plain))]
    before = made.usage("num_preemptions")
    requests = []
    for (name, ids), other in zip(documents.items(), plain, strict=True):
        requests += [(ids, compress(name)), (made.question(), asking(name)), (other, ordinary)]
    outputs = made.run(*requests)
    assert made.usage("num_preemptions") > before, "the pages were enough for all"
    for (name, ids), answer in zip(documents.items(), outputs[1::3], strict=True):
        made.check(answer.outputs[0], made.by_transformers(ids))
        assert made.listing()[name]["state"] == "ready"
    assert [list(x.outputs[0].token_ids) for x in outputs[2::3]] == alone
    for metric in ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting"):
        assert made.usage(metric) == 0


def test_a_new_document_takes_the_old_one_s_place(made):
    for text in (TEXT, TEXT[::-1]):
        ids = made.tokenizer(text).input_ids
        made.run((ids, compress("book")))
        assert made.wait("book")["saved"] is False
        made.check_about("book", made.by_transformers(ids))
    (gone,) = made.run(([0], params({"delete": "book"})))
    assert said(gone) == {"name": "book", "state": "deleted"}
    for order in ({"delete": "book"}, "book"):
        (refused,) = made.run((made.question(), params(order)))
        assert refused.outputs[0].finish_reason == "error"
        assert not refused.outputs[0].token_ids
        assert (said(refused)["state"], said(refused)["status"]) == ("failed", 404)
        assert "There is no context 'book'" in said(refused)["reason"]


def test_a_context_that_goes_before_its_request_begins_is_refused_by_name(made):
    from gracekv.vllm import export

    ids = made.tokenizer(TEXT).input_ids
    folder = export(made.by_transformers(ids, ratio=3), made.store / "brief")
    core = made.engine.llm_engine
    for number in range(SEQUENCES):
        prompt = {"prompt_token_ids": [7 + number] * 3}
        core.add_request(str(number), prompt, params(None, 50, ignore_eos=True))
    core.add_request("late", {"prompt_token_ids": made.question()}, asking("brief"))
    outputs = [core.step()]
    while max((len(x.outputs[0].token_ids) for x in outputs[-1]), default=0) < 20:
        outputs.append(core.step())
    shutil.rmtree(folder)
    while core.has_unfinished_requests():
        outputs.append(core.step())
    finished = {x.request_id.partition("-")[0]: x for x in itertools.chain(*outputs) if x.finished}
    late = finished.pop("late")
    assert not late.outputs[0].token_ids
    assert (late.outputs[0].finish_reason, said(late)["status"]) == ("error", 404)
    assert "There is no context 'brief'" in said(late)["reason"]
    assert {len(x.outputs[0].token_ids) for x in finished.values()} == {50}
    assert made.usage("kv_cache_usage_perc") == 0


@pytest.mark.parametrize(
    "options", [{"n": 2, "temperature": 1.0}, {"logprobs": 1}, {"prompt_logprobs": 0}]
)
@pytest.mark.parametrize("order", [{"compress": {"name": "bad", "ratio": 4}}, {"delete": "bad"}])
def test_what_a_compressing_request_cannot_have_is_refused(made, order, options):
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    extra = {"kv_transfer_params": {"gracekv": order}}
    asked = SamplingParams(max_tokens=1, extra_args=extra, **options)
    with pytest.raises(VLLMValidationError, match="takes no"):
        made.run(([7] * 50, asked))
