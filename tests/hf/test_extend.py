"""Extending a compressed context: what is read, what is packed, and what stays unchanged."""

from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

import gracekv
from gracekv import Budget, Prompt
from gracekv.cache.joining import past_of
from gracekv.errors import (
    BudgetError,
    CacheError,
    LengthWarning,
    MissingCaptureError,
    ObserverError,
    PromptError,
    UntestedModelWarning,
)
from gracekv.fit import FITTERS, Regression, attended
from gracekv.hf.capture import run_capture
from gracekv.kernels import linalg
from gracekv.pipeline import Pipeline
from gracekv.prefill import Needs, PromptSpans, partial_attention
from gracekv.prefill.options import CaptureOptions
from gracekv.testing.models import tiny_llama, tiny_model
from gracekv.value import LagRelative, block_replay
from support.asked_context import same_greedy
from support.chapter import CHAPTER
from support.greedy_decoding import greedy
from support.lean_prefills import without_queries
from support.margins import assert_same_choice
from support.prompts import BOOK, END, book_prompt
from support.quantised_layers import CODED
from support.same_results import assert_same_accounting, assert_same_entries
from support.tried_families import tried_model

MODEL = {"layers": 3, "vocabulary": 97}
PASSAGE = BOOK[END : END + 80]


def compressed(model, ratio, pipeline="gracekv-agnostic", tail=5):
    return gracekv.compress(model, book_prompt(tail=tail), ratio=ratio, pipeline=pipeline)


def kept(result, context):
    """bool [L, G, N]: which tokens of `context` have their own entry."""
    packed = result.packed
    mask = torch.zeros(len(packed.layers), packed.layers[0].heads, context[1] - context[0])
    for layer, entries in enumerate(packed.layers):
        for g in range(entries.heads):
            at = entries.head(g)[2].long() - context[0]
            mask[layer, g, at[(at >= 0) & (at < mask.shape[2])]] = 1
    return mask.bool()


def test_a_context_of_which_nothing_was_kept_goes_on(model, monkeypatch):
    ids = Prompt.from_ids(BOOK[:60], context=(0, 60))
    book = gracekv.compress(model, ids, entries_per_head=1, pipeline="streaming-llm")
    assert book.packed.kv_bytes == 0
    assert book.extend(PASSAGE, ratio=2).packed.entries().unique().tolist() == [40]
    # Length limits count all tokens, including those without an entry.
    monkeypatch.setattr("gracekv.hf.extend.longest_sequence", lambda *_: (100, "it ends"))
    with pytest.raises(CacheError, match="cannot use this cache beyond 100 tokens"):
        book.extend(PASSAGE, ratio=2)


# Partitions of the passage match those of the whole text.
LAG = replace(gracekv.Pipeline.named("lagkv"), value=LagRelative(sinks=10, lag=10))
# Avoids limits that are just met.
SMOOTH = Regression(penalty=0.1, value_cap=10.0, key_cap=10.0, guard=0.0)
FIT = replace(gracekv.Pipeline.named("snapkv"), fit=SMOOTH)


@pytest.mark.parametrize("options", [{}, {"chunk": 23}, {"memory_limit": 0}])
@pytest.mark.parametrize(
    "recipe", ["gracekv-agnostic", "snapkv", "h2o", "scissorhands", LAG, FIT, "defensivekv"]
)
def test_after_a_whole_past_it_keeps_what_the_full_cache_would(model, recipe, options, monkeypatch):
    """Nothing is missing, so the passage's scores equal those of one prefill of everything.

    Only passages have queries moved beyond their end, so this is switched off.
    """
    monkeypatch.setattr(block_replay, "_BEYOND", 0)
    context = (END, END + len(PASSAGE))
    got = compressed(model, 1, recipe).extend(PASSAGE, ratio=2, capture=CaptureOptions(**options))
    want = gracekv.compress(model, book_prompt(context), ratio=2, pipeline=recipe, keep_run=True)
    relevance, recent = want.details.relevance, want.accounting.recent
    scores = relevance.scores * relevance.sensitivity[..., None]
    new, other = (kept(x, context)[..., : len(PASSAGE) - recent] for x in (got, want))
    if recipe == "gracekv-agnostic":
        new, other, scores = (x.flatten()[None] for x in (new, other, scores))
    assert 0 < int(new.sum()) < new.numel()
    assert_same_choice(new, other, scores)
    for one, whole in zip(got.packed.layers, want.packed.layers, strict=True):
        if recipe == FIT and one.positions.equal(whole.positions):
            torch.testing.assert_close(one.keys, whole.keys, rtol=1e-3, atol=1e-3)
    before = compressed(model, 1, recipe).accounting.budget
    assert got.accounting.budget - before == want.accounting.budget


MERGES = gracekv.Pipeline.from_dict({"window": {"size": 4, "minimum": 4}})


READERS = [
    ("llama", {}, MERGES),
    ("llama", {"attention": "eager"}, "gracekv-agnostic"),
    ("llama", {"rope": "yarn", "positions": 512}, "gracekv-agnostic"),
    ("phi3", {"partial": 0.5}, MERGES),
    ("qwen3", {}, "gracekv-agnostic"),
    ("gemma", {}, "d2o"),
    *(("llama", {}, x) for x in CODED.values()),
]


@pytest.mark.parametrize("chunk", [None, 11])
@pytest.mark.parametrize(("family", "options", "recipe"), READERS)
def test_the_passage_is_read_over_the_packed_entries(family, options, recipe, chunk):
    """Uneven heads, merged entries and codes are read as in decoding."""
    model = tiny_model(family, **options)
    book = compressed(model, 3, recipe)
    told = []
    options = CaptureOptions(chunk=chunk, progress=lambda *x: told.append(x))
    longer = book.extend(PASSAGE, kv_bytes="1MB", capture=options)
    assert told[-1] == (longer.packed.length + 1,) * 2
    cache = book.new_cache()
    with torch.no_grad():
        model(PASSAGE[None], past_key_values=cache)
    assert len(set(book.packed.entries().flatten().tolist())) > 1 or recipe == "d2o"
    assert recipe != MERGES or any(bool(x.log_multiplicity.any()) for x in book.packed.layers)
    for old, new, tail in zip(book.packed.layers, longer.packed.layers, cache.layers, strict=True):
        keys, values = tail._tail(len(PASSAGE))
        for g in range(old.heads):
            count = int(old.lengths[g])
            for one, other in zip(old.head(g), new.head(g), strict=True):
                assert torch.equal(one, other[:count])
            added = [part[count:] for part in new.head(g)]
            torch.testing.assert_close(added[0], keys[0, g], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(added[1], values[0, g], atol=1e-4, rtol=1e-4)
            assert added[2].tolist() == list(range(END, END + len(PASSAGE)))
            assert not bool(added[3].any())


@pytest.mark.parametrize("recipe", ["gracekv", "gracekv-agnostic", "cam", "fit"])
@pytest.mark.parametrize("tail", [0, 5])
def test_what_is_packed_stays_bit_for_bit(model, recipe, tail):
    pipeline = gracekv.Pipeline.named("gracekv-agnostic" if recipe == "fit" else recipe)
    if recipe == "fit":
        pipeline = replace(pipeline, fit=FITTERS.build("values_and_mass"))
    book = compressed(model, 3, pipeline, tail)
    longer = book
    for number in range(3):
        before, added = longer, BOOK[100 + 60 * number : 160 + 60 * number]
        longer = before.extend(added, ratio=3)
        heads = zip(before.packed.layers, longer.packed.layers, strict=True)
        for one, other in ((a.head(g), b.head(g)) for a, b in heads for g in range(a.heads)):
            for old, new in zip(one, other, strict=True):
                assert torch.equal(old, new[: len(old)])
            assert bool((other[2].diff() > 0).all())
        units = longer.accounting.entries.numel()
        assert longer.accounting.budget - before.accounting.budget == units * 60 // 3
        assert longer.accounting.spent - before.accounting.spent <= units * 60 // 3
    assert longer.prompt.spans.context_length == book.prompt.spans.context_length + 180
    assert longer.packed.length == len(longer.prompt.ids) - (1 if tail == 0 else tail)
    beside = longer.packed.length - longer.prompt.spans.context_length
    assert torch.equal(longer.packed.entries() - beside, longer.accounting.entries)
    assert longer.accounting.bytes == longer.packed.kv_bytes < longer.accounting.full_bytes
    whole = gracekv.compress(model, longer.prompt, ratio=1)
    assert longer.accounting.full_bytes == whole.accounting.full_bytes
    assert longer.pipeline == pipeline
    assert longer.details is None


@pytest.mark.parametrize("tail", [0, 5])
def test_where_nothing_is_removed_it_is_the_stock_models_answer(model, tail):
    longer = compressed(model, 1, tail=tail)
    for first in range(END, 150, 20):
        longer = longer.extend(BOOK[first : first + 20], ratio=1)
    same_greedy(longer.generate_ids(6)[0], *greedy(model, longer.prompt.ids, tokens=6))


@pytest.mark.parametrize("recipe", [None, CODED["allocated"]])
def test_a_text_is_asked_saved_chatted_about_and_extended_again(tokenizer, tmp_path, recipe):
    reader = tiny_llama(layers=3, vocabulary=2000, positions=4096)
    prompt = Prompt.from_chat(tokenizer, context=CHAPTER[:600])
    book = gracekv.compress(reader, prompt, ratio=3, pipeline=recipe)
    answer = book.ask("Who fell?", max_new_tokens=6)
    longer = book.extend(CHAPTER[600:1200], ratio=3).extend(CHAPTER[1200:1500], ratio=4)
    longer = longer.extend("\n\nThe end.", kv_bytes="1MB")
    read = tokenizer.decode(longer.prompt.ids[: longer.prompt.spans.context_end])
    assert read.endswith(CHAPTER[:1500] + "\n\nThe end.")
    assert book.ask("Who fell?", max_new_tokens=6) == answer
    bits = [coding.bits for coding in longer.packed.layers[0].codings]
    assert bits == sorted(bits, reverse=True)
    assert len(set(bits)) < len(bits) or recipe is None
    longer.save(tmp_path / "book.gracekv")
    with safe_open(tmp_path / "book.gracekv", "pt") as file:
        assert file.metadata()["gracekv_format"] == "4"
    again = gracekv.load(tmp_path / "book.gracekv", reader, tokenizer=tokenizer)
    assert_same_entries(again.packed, longer.packed)
    assert_same_accounting(again.accounting, longer.accounting)
    assert again.timings == longer.timings
    questions = ["Who fell?", "Where is Alice sitting, and why?"]
    assert again.ask(questions, max_new_tokens=6) == longer.ask(questions, max_new_tokens=6)
    with pytest.raises(PromptError, match="need a tokenizer"):
        gracekv.load(tmp_path / "book.gracekv", reader).ask("Who?")
    with again.chat() as chat:
        assert chat.ask(questions[0], 6) == longer.ask(questions[0], 6)
        chat.compress(kv_bytes="1MB")
        assert chat.ask(questions[1], 3)
    further = [x.extend(CHAPTER[1500:1800], ratio=4) for x in (again, longer)]
    assert_same_entries(*(x.packed for x in further))
    further[0].report(tmp_path / "page.html")


def test_budgets_are_for_the_passage_alone(model):
    book = compressed(model, 4)
    units = book.accounting.entries.numel()
    entry = 2 * book.packed.layers[0].keys[0].nbytes
    for amount, entries in [
        ({"ratio": 2}, units * 40),
        ({"compression_ratio": 0.75}, units * 20),
        ({"entries_per_head": 10}, units * 10),
        ({"kv_bytes": units * 15 * entry}, units * 15),
        ({"budget": Budget.ratio(8)}, units * 10),
    ]:
        longer = book.extend(PASSAGE, **amount)
        assert longer.accounting.budget - book.accounting.budget == entries
        assert longer.accounting.spent - book.accounting.spent == entries


def test_a_score_within_two_others_is_of_the_passage_alone(model):
    weighted = {"name": "value_norm", "scorer": "mean_attention"}
    pipeline = Pipeline.from_dict({"value": {"name": "value_norm", "scorer": weighted}}, "snapkv")
    book = compressed(model, 4, pipeline)
    assert book.extend(PASSAGE, ratio=2).packed.length == book.packed.length + len(PASSAGE)


def test_short_passages_are_read_as_far_back_as_they_go(model):
    book = compressed(model, 4)
    for passage in ([7], BOOK[:5], BOOK[:12][None]):
        longer = book.extend(passage, ratio=1)
        assert longer.packed.length == book.packed.length + torch.as_tensor(passage).numel()
    assert len(book.extend(BOOK[:12], ratio=2).generate_ids(3)[0]) == 3


def test_without_the_padding_of_heads_a_passage_is_read_alike(model, monkeypatch):
    """CPUs read only each head's entries; GPUs, simulated by the padding, read all places."""
    book = compressed(model, 4)
    lengths = torch.stack([layer.lengths for layer in book.packed.layers])
    assert lengths.min() < lengths.max() - 3
    plain, sizes = linalg.linear, set()
    monkeypatch.setattr(linalg, "linear", lambda x, rows: sizes.add(rows.shape) or plain(x, rows))
    own = book.extend(BOOK[:40], ratio=2)
    # oneDNN compiles for each size, so head lengths must not add sizes.
    assert len(sizes) == 4
    for reader in (partial_attention, block_replay, attended):
        monkeypatch.setattr(reader, "first_entries", lambda keys, past: [0] * len(keys))
    padded = book.extend(BOOK[:40], ratio=2)
    for one, other in zip(own.packed.layers, padded.packed.layers, strict=True):
        assert torch.equal(one.positions, other.positions)
        torch.testing.assert_close(one.values, other.values, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(one.keys, other.keys, atol=1e-4, rtol=1e-3)
    scores = [x.run.entry_scores() for x in (own, padded)]
    torch.testing.assert_close(*scores, atol=1e-5, rtol=1e-3)


def test_queries_of_what_was_read_before_are_gone(model):
    past = past_of(compressed(model, 4).packed)
    end = past.places + 9
    spans = PromptSpans(past.places, end, end, end + 1, past.places)
    ids = torch.cat([BOOK.new_zeros(past.places), BOOK[:10]])
    needs = Needs(later_queries=True)
    prefill = run_capture(model, Prompt(ids, spans), past, needs, CaptureOptions())
    again = run_capture(model, Prompt(ids, spans), past, Needs(), CaptureOptions(memory_limit=0))
    again = without_queries(again).with_queries(prefill.query_positions)
    torch.testing.assert_close(prefill.queries, again.queries, atol=1e-4, rtol=1e-4)
    assert prefill.query_positions.tolist() == list(range(past.places, past.places + 10))
    with pytest.raises(MissingCaptureError, match=r"2 of the requested .* Extend with a longer"):
        prefill.with_queries([3, past.places - 1, past.places])


BAD_PASSAGES = [
    ([], {"ratio": 2}, PromptError, "empty"),
    ("text", {"ratio": 2}, PromptError, "needs a tokenizer"),
    ([0.5], {"ratio": 2}, PromptError, "whole numbers"),
    ([97], {"ratio": 1}, PromptError, "token id 97"),
    ([[1, 2], [3, 4]], {"ratio": 2}, PromptError, "one sequence"),
    ([1, 2, 3, 4, 5, 6], {"ratio": 8}, BudgetError, "ratio of at most 1.5"),
    ([1, 2], {}, BudgetError, "exactly one budget"),
    ([1, 2], {"ratio": 2, "kv_bytes": 100}, BudgetError, "exactly one budget"),
]


@pytest.mark.parametrize(("passage", "options", "error", "message"), BAD_PASSAGES)
def test_bad_passages_are_refused(model, passage, options, error, message):
    with pytest.raises(error, match=message):
        compressed(model, 4).extend(passage, **options)


def test_results_that_cannot_go_on_are_refused(model):
    asked = gracekv.compress(model, Prompt.from_ids(BOOK[:120], context=(4, 90)), ratio=2)
    with pytest.raises(PromptError, match="a question of its own"):
        asked.extend([1], ratio=1)
    twice = compressed(model, 2, "kvzip-two-pass")
    with pytest.raises(ObserverError, match=r"Reconstruction.* reads passes"):
        twice.extend(PASSAGE, ratio=2)
    small = tiny_llama(vocabulary=97, positions=128)
    with pytest.raises(PromptError, match="was trained for 128"):
        compressed(small, 2).extend(PASSAGE, ratio=2)
    options = gracekv.CaptureOptions(beyond_positions=True)
    with pytest.warns(LengthWarning, match="was trained for 128"):
        compressed(small, 2).extend(PASSAGE, ratio=2, capture=options)
    bounded = tiny_model("phi3", positions=100)
    with pytest.raises(CacheError, match="Extend by 9 tokens at most"):
        compressed(bounded, 2).extend(PASSAGE, ratio=2)
    scaled = tried_model("ministral3")
    with pytest.warns(UntestedModelWarning), pytest.raises(CacheError, match="scales its queries"):
        compressed(scaled, 2).extend(PASSAGE, ratio=2)
