"""`compress` and its result, from model and prompt to text."""

import pytest
import torch

import gracekv
from gracekv.backends import Eager
from gracekv.errors import BudgetError, CacheError, ConfigError, PromptError, UnknownStrategyError
from gracekv.hf import CompressionResult, detach
from gracekv.testing.models import tiny_llama
from support.batches import Numbers
from support.margins import assert_same_tokens, logits_over
from support.prompts import IDS, random_prompt

PROMPT, RATIO = random_prompt(150, (4, 138), tokenizer=Numbers()), 3


def test_a_compressed_prompt_can_be_continued_again_and_again(result):
    first = result.generate_ids(8)
    assert first.shape == (1, 8)
    # Exactly: the same computation again.
    assert torch.equal(result.generate_ids(8), first)
    assert result.generate_ids(4, do_sample=True, num_return_sequences=3).shape == (3, 4)
    assert result.generate(8) == " ".join(map(str, first[0].tolist()))
    with_scores = result.generate_ids(8, return_dict_in_generate=True, output_scores=True)
    assert torch.equal(with_scores, first)


def test_the_result_reports_what_was_spent(result):
    assert isinstance(result, CompressionResult)
    assert result.accounting.spent <= result.accounting.budget == 3 * 2 * 134 // 3
    assert result.timings.prefill > 0
    assert result.timings.value > 0
    assert result.packed.length == 149


def test_one_prefill_serves_many_pipelines_and_budgets(model, prompt, result):
    prefill = gracekv.capture(model, prompt)
    before = [k.clone() for k in prefill.keys]
    for options in ({"ratio": 3}, {"ratio": 8}, {"entries_per_head": 20, "pipeline": "fullkv"}):
        alone = gracekv.compress(model, prompt, **options)
        shared = gracekv.compress(model, prompt, prefill=prefill, **options)
        assert torch.equal(shared.accounting.entries, alone.accounting.entries)
        for ours, theirs in zip(shared.packed.layers, alone.packed.layers, strict=True):
            torch.testing.assert_close(ours.keys, theirs.keys)
        assert_same_tokens(shared.generate_ids(6), alone.generate_ids(6), logits_over(alone))
        assert shared.accounting.backend_bytes == alone.accounting.backend_bytes
    assert all(torch.equal(x, y) for x, y in zip(before, prefill.keys, strict=True))


def test_a_prefill_of_something_else_is_refused(model, prompt):
    prefill = gracekv.capture(model, prompt)
    with pytest.raises(CacheError, match=r"from another model: config .*, weights differ"):
        gracekv.compress(tiny_llama(layers=3, heads=8), prompt, prefill=prefill, ratio=2)
    moved = gracekv.Prompt.from_ids(IDS, (4, 137), question_end=146)
    for other in (moved, gracekv.Prompt.from_ids(IDS.flip(0), (4, 138), question_end=146)):
        with pytest.raises(CacheError, match="belongs to another prompt"):
            gracekv.compress(model, other, prefill=prefill, ratio=2)


def test_the_backend_may_be_named(model, prompt, result):
    named = gracekv.compress(model, prompt, ratio=3, backend="eager")
    assert named.new_cache().layers[0].packed.backend == Eager()
    assert_same_tokens(named.generate_ids(8), result.generate_ids(8), logits_over(result))


def test_a_pipeline_may_be_a_name_or_a_value(model, prompt):
    by_name = gracekv.compress(model, prompt, ratio=3, pipeline="fullkv")
    by_value = gracekv.compress(
        model, prompt, ratio=3, pipeline=gracekv.Pipeline.from_dict({"keep_all": True})
    )
    assert by_name.accounting.spent == by_value.accounting.spent == 3 * 2 * 134


BAD_OPTIONS = [
    ({"ratoi": 2}, BudgetError, "no argument 'ratoi'. Did you mean 'ratio'"),
    ({"recipie": "h2o"}, BudgetError, "no argument 'recipie'. Did you mean 'pipeline'"),
    ({"questoin": "Who?"}, BudgetError, r"mean 'gracekv.Prompt.from_chat\(..., question="),
    ({"prefil": None}, BudgetError, "no argument 'prefil'. Did you mean 'prefill'"),
    ({"budget": 8}, BudgetError, r"takes a gracekv\.Budget, as Budget.ratio.8.; got int"),
    ({"budget": gracekv.Budget.ratio(2), "ratio": 2}, BudgetError, "got budget and ratio"),
    ({"ratio": 2, "prefill": 3}, CacheError, r"gracekv\.capture"),
    ({"ratio": 2, "pipeline": 3}, ConfigError, "the name of a recipe or file, or"),
    ({"ratio": 2, "backend": "sdpaa"}, UnknownStrategyError, "Did you mean 'sdpa'"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD_OPTIONS)
def test_bad_options_are_refused(model, prompt, options, error, message):
    with pytest.raises(error, match=message):
        gracekv.compress(model, prompt, **options)


@pytest.mark.parametrize("budget", [{"ratio": 1000}, {"kv_bytes": 100}, {"ratio": 134 / 3}])
def test_an_impossible_budget_is_refused_before_the_model_runs(model, prompt, budget, monkeypatch):
    monkeypatch.setattr(type(model), "forward", lambda *_, **__: pytest.fail("the model ran"))
    for given in (prompt, [prompt, prompt]):
        with pytest.raises(BudgetError, match="ratio of at most"):
            gracekv.compress(model, given, **budget)


def test_details_are_kept_on_demand(model, prompt, result):
    assert result.details is None
    kept = gracekv.compress(model, prompt, ratio=3, keep_run=True)
    assert kept.details.partition.region.start == 4
    pair = gracekv.compress(model, [prompt, prompt], ratio=3, keep_run=True)
    assert [len(run.relevance.scores) for run in pair.details] == [3, 3]


def test_results_print_in_one_line(model, prompt, result):
    kept = result.accounting
    assert repr(result) == (
        f"CompressionResult(LlamaForCausalLM, 'gracekv-plus', 150 tokens, {kept.spent} of 804 "
        f"context entries, {kept.bytes:,} bytes of keys and values and {kept.metadata_bytes:,} of "
        f"metadata, full cache {kept.full_bytes:,})"
    )
    assert repr(kept) == (
        f"Accounting({kept.spent} entries (budget {kept.budget}); {kept.bytes:,} bytes of keys and "
        f"values and {kept.metadata_bytes:,} of metadata, full cache {kept.full_bytes:,})"
    )
    coded = gracekv.Pipeline.from_dict({"precision": "uniform"}, base="gracekv-plus")
    # Bytes of such a pipeline are compared with a cache of 16-bit numbers.
    fewer = gracekv.compress(model, prompt, pipeline=coded, entries_per_head=70)
    assert repr(fewer).endswith(" in 16 bits)")
    assert repr(gracekv.compress(model, [prompt, prompt], ratio=3)).startswith(
        "BatchResult(LlamaForCausalLM, 'gracekv-plus', 2 prompts, 300 tokens, "
    )


def test_attached_holds_for_a_block(model, prompt):
    detach(model)
    with gracekv.attached(model):
        assert model.config._attn_implementation == "gracekv"
        gracekv.compress(model, prompt, ratio=3).generate_ids(2)
        with gracekv.attached(model):
            pass
        assert model.config._attn_implementation == "gracekv"
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match="inside"), gracekv.attached(model):
        raise ValueError("inside")
    assert model.config._attn_implementation == "sdpa"


def test_text_needs_a_tokenizer_and_one_sequence(model, result):
    bare = gracekv.compress(model, gracekv.Prompt.from_ids(IDS, (4, 138)), ratio=3)
    with pytest.raises(PromptError, match="without a tokenizer"):
        bare.generate()
    with pytest.raises(ConfigError, match="num_return_sequences=2"):
        result.generate(4, num_return_sequences=2, do_sample=True)
