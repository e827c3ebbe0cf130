"""Several prompts in one cache: each row answers as its prompt alone would; refusals."""

import gc
import importlib
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig

import gracekv
from gracekv.errors import CacheError, PromptError
from gracekv.testing.models import tiny_model
from support.batches import SPANS, Numbers, prompts_of
from support.covering import cases
from support.greedy_decoding import with_logits
from support.margins import assert_same_beams, assert_same_steps, assert_same_tokens, logits_over

MODEL = {"layers": 3, "rope": "llama3"}


@pytest.fixture(scope="module")
def prompts():
    return prompts_of(tokenizer=Numbers())


@pytest.fixture(scope="module")
def batch(model, prompts):
    return gracekv.compress(model, prompts, ratio=3)


@pytest.fixture(scope="module")
def singles(model, prompts):
    return [gracekv.compress(model, prompt, ratio=3) for prompt in prompts]


def generated(model, result, cache=None, **kwargs):
    torch.manual_seed(3)
    ids, mask = result.inputs["input_ids"], result.inputs["attention_mask"]
    cache = result.new_cache() if cache is None else cache
    return with_logits(model, ids, mask, cache, 9, **kwargs)


@pytest.mark.parametrize("backend", ["eager", "sdpa", "auto"])
@settings(max_examples=cases(3, 5))
@given(seed=st.integers(0, 2**32 - 1), order=st.permutations(SPANS), count=st.integers(1, 3))
def test_each_row_is_what_its_prompt_gives_alone(model, backend, seed, order, count):
    prompts = prompts_of(seed, order[:count])
    batch = gracekv.compress(model, prompts, ratio=4, backend=backend)
    tokens, logits = generated(model, batch)
    for row, prompt in enumerate(prompts):
        alone = gracekv.compress(model, prompt, ratio=4, backend=backend)
        assert torch.equal(batch.accountings[row].entries, alone.accounting.entries)
        own, own_logits = generated(model, alone)
        assert_same_steps(tokens[row], logits[:, row], own[0], own_logits[:, 0])


def test_prompts_of_one_length_need_no_padding(model):
    prompts = prompts_of(1, [(70, 2, 60), (70, 9, 55)])
    batch = gracekv.compress(model, prompts, ratio=3)
    assert bool((batch.inputs["attention_mask"] == 1).all())
    for row, prompt in zip(batch.generate_ids(8), prompts, strict=True):
        alone = gracekv.compress(model, prompt, ratio=3)
        assert_same_tokens(row, alone.generate_ids(8), logits_over(alone))
    with torch.no_grad():  # `generate` drops a mask of ones; a caller's own must be accepted.
        masked = model(**batch.inputs, past_key_values=batch.new_cache()).logits
        bare = model(batch.inputs["input_ids"][:, -1:], past_key_values=batch.new_cache()).logits
    assert torch.equal(masked, bare)
    with pytest.raises(CacheError, match="holds 2 prompts, the model was given 3 rows"):
        batch.new_cache().update(torch.zeros(3, 2, 1, 16), torch.zeros(3, 2, 1, 16), 0)


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2}])
def test_beams_of_a_batch_are_those_of_its_prompts(batch, singles, options):
    together = batch.generate_ids(8, **options).split(options.get("num_return_sequences", 1))
    for beams, single in zip(together, singles, strict=True):
        assert_same_beams(beams, single.generate_ids(8, **options), single)


def test_each_prompt_of_a_batch_is_a_result_of_its_own(batch, singles):
    assert len(batch) == len(singles)
    for own, single in zip(batch, singles, strict=True):
        assert (own.prompt, own.accounting.bytes) == (single.prompt, single.accounting.bytes)
        assert_same_tokens(own.generate_ids(8)[0], single.generate_ids(8), logits_over(single))
    with pytest.raises(TypeError, match="slice"):
        batch[:1]


def test_accounting_is_per_prompt_and_in_total(batch, singles):
    parts = [single.accounting for single in singles]
    for ours, theirs in zip(batch.accountings, parts, strict=True):
        assert (ours.budget, ours.spent, ours.bytes) == (theirs.budget, theirs.spent, theirs.bytes)
    total = batch.accounting
    assert total.spent == sum(part.spent for part in parts) == int(total.entries.sum())
    assert total.entries.shape == (9, 2)
    assert total.bytes == batch.packed.kv_bytes
    assert total.full_bytes == sum(part.full_bytes for part in parts)
    assert total.backend_bytes == batch.new_cache().held_bytes > 0
    assert total.bound is None


def test_mask_and_positions_are_made_where_the_caller_leaves_them_out(model, batch, singles):
    with torch.no_grad():
        ids = torch.tensor([[5, 6], [7, 8], [9, 10]])
        cache = batch.new_cache()
        logits = [model(ids, past_key_values=cache).logits for _ in range(2)]
        for row, single in enumerate(singles):
            alone = single.new_cache()
            for step in logits:
                own = model(ids[row : row + 1], past_key_values=alone).logits
                torch.testing.assert_close(step[row], own[0], rtol=0, atol=2e-4)


def test_a_configs_padding_fills_rows_that_end_early(batch):
    config = GenerationConfig(eos_token_id=int(batch.generate_ids(1)[0]), pad_token_id=7)
    rows = batch.generate_ids(4, generation_config=config)
    assert rows.shape[1] > 1
    assert set(rows[0, 1:].tolist()) == {7}


def test_a_second_turn_follows_each_answer(model, batch, singles):
    cache = batch.new_cache()
    first, _ = generated(model, batch, cache, max_new_tokens=5)
    turn = torch.tensor([[3, 1], [4, 1], [5, 9]])
    ids = torch.cat([batch.inputs["input_ids"], first, turn], dim=1)
    mask = torch.cat([batch.inputs["attention_mask"], torch.ones(3, 7, dtype=torch.int64)], dim=1)
    second, _ = with_logits(model, ids, mask, cache, 6)
    for row, single in enumerate(singles):
        own = single.new_cache()
        answer, _ = generated(model, single, own, max_new_tokens=5)
        assert_same_tokens(first[row], answer, logits_over(single))
        if not torch.equal(first[row], answer[0]):
            continue  # a tie: the second turn follows another text
        whole = torch.cat([single.inputs["input_ids"], answer, turn[row : row + 1]], dim=1)
        expected, _ = with_logits(model, whole, torch.ones_like(whole), own, 6)
        logits = logits_over(single, whole[0, len(single.prompt.ids) :])
        assert_same_tokens(second[row], expected[0], logits)


def test_rows_can_be_selected_and_reordered_across_prompts(model, batch, singles):
    """Beams never do this, but a server that drops finished prompts does."""
    ids = torch.tensor([[5, 6], [7, 8], [9, 10]])
    with torch.no_grad():
        early = batch.new_cache()
        early.batch_select_indices(torch.tensor([2, 0]))
        logits = model(ids[:2], past_key_values=early).logits
        for row, source in enumerate((2, 0)):
            own = model(ids[row : row + 1], past_key_values=singles[source].new_cache()).logits
            torch.testing.assert_close(logits[row], own[0], rtol=0, atol=2e-4)

        repeated = batch.new_cache()
        repeated.batch_select_indices(torch.tensor([2, 0]))
        both = model(ids[[0, 0, 1, 1]], past_key_values=repeated).logits
        torch.testing.assert_close(both, logits.repeat_interleave(2, dim=0), rtol=0, atol=2e-4)

        late = batch.new_cache()
        model(ids, past_key_values=late)
        late.batch_repeat_interleave(2)
        assert late.layers[0].rows is None
        late.batch_select_indices(torch.tensor([True, False, True, False, True, False]))
        assert late.layers[0].rows is None
        late.reorder_cache(torch.tensor([1, 1, 2, 0]))
        logits = model(ids[[0, 0, 0, 0]], past_key_values=late).logits
        for row, source in enumerate((1, 1, 2, 0)):
            own = singles[source].new_cache()
            model(ids[source : source + 1], past_key_values=own)
            alone = model(ids[:1], past_key_values=own).logits
            torch.testing.assert_close(logits[row], alone[0], rtol=0, atol=2e-4)
        late.reset()
        assert late.layers[0].rows is None


def test_the_entries_are_stored_once(batch):
    """The prompts' own caches are views of the batch's, and so are fresh caches."""
    packed = batch.new_cache().layers[1].packed.entries
    views = [run.cache.layers[1].keys for run in batch.runs]
    assert {view.untyped_storage().data_ptr() for view in views} == {
        packed.keys.untyped_storage().data_ptr()
    }
    assert batch.new_cache().layers[1].packed.entries is packed
    cache = batch.new_cache()
    cache.update(torch.zeros(12, 2, 1, 16), torch.zeros(12, 2, 1, 16), 1)
    assert cache.layers[1].packed.entries is packed


def test_only_one_prefill_is_held_at_a_time(model, prompts, monkeypatch):
    module = importlib.import_module("gracekv.hf.capture")
    capture, alive, seen = module.run_capture, [], []

    def watched(*args, **options):
        gc.collect()
        seen.append(sum(ref() is not None for ref in alive))
        prefill = capture(*args, **options)
        alive.extend(weakref.ref(x) for x in (*prefill.queries, *prefill.keys))
        return prefill

    monkeypatch.setattr(module, "run_capture", watched)
    gracekv.compress(model, prompts, ratio=3, capture=gracekv.CaptureOptions(stream=False))
    assert seen == [0, 0, 0]


def masked(batch, change):
    mask = batch.inputs["attention_mask"].clone()
    change(mask)
    return mask


MISFITS = [
    (lambda b: {"attention_mask": masked(b, lambda m: m.fill_(1))}, "not hide the padding"),
    (
        lambda b: {"attention_mask": masked(b, lambda m: m[2, 7].fill_(0))},
        "hides tokens of the compressed prompt",
    ),
    (lambda b: {"attention_mask": torch.ones(3, 1, 1, 1).bool()}, "needs position_ids"),
    (lambda b: {"position_ids": torch.full((3, 1), 149)}, r"at positions \[89, 60, 149\]"),
    (lambda b: {"input_ids": torch.ones(4, 1, dtype=torch.int64)}, "holds 3 prompts"),
    (lambda b: {"attention_mask": torch.ones(3, 40)}, "up to position 39"),
]


@pytest.mark.parametrize(("kwargs", "message"), MISFITS)
def test_what_does_not_fit_the_batch_is_refused(model, batch, kwargs, message):
    ids = {"input_ids": torch.ones(3, 1, dtype=torch.int64)}
    with pytest.raises(CacheError, match=message), torch.no_grad():
        model(past_key_values=batch.new_cache(), **ids | kwargs(batch))


def test_rows_of_dynamic_rope_do_not_rotate_by_the_longest():
    model = tiny_model(rope="dynamic", positions=64, layers=2)
    prompts = prompts_of(1, [(20, 1, 15), (60, 2, 50)])
    batch = gracekv.compress(model, prompts, pipeline="fullkv", ratio=1)
    with pytest.raises(CacheError, match=r"dynamic RoPE.*each prompt alone"):
        batch.generate_ids(30)
    inputs = torch.zeros(2, 30, dtype=torch.int64)
    with pytest.raises(CacheError, match=r"row has 89 tokens.*dynamic RoPE"):
        model(inputs, past_key_values=batch.new_cache())
    for number, row in enumerate(batch.generate_ids(4)):
        alone = batch[number]
        assert_same_tokens(row, alone.generate_ids(4)[0], logits_over(alone))
    longer = gracekv.compress(model, prompts_of(1, [(70, 1, 65), (90, 2, 80)]), ratio=1)
    with pytest.raises(CacheError, match="dynamic RoPE"):
        longer.generate_ids(9)


def test_bad_lists_are_refused(model, prompts):
    with pytest.raises(PromptError, match="at least one; got an empty list"):
        gracekv.compress(model, [], ratio=2)
    with pytest.raises(PromptError, match="takes a list of Prompts or one Prompt"):
        gracekv.compress(model, ["text"], ratio=2)
    with pytest.raises(PromptError, match="must share one tokenizer"):
        gracekv.compress(model, [prompts[0], *prompts_of()], ratio=2)
