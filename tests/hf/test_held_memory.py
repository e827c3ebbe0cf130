"""A result keeps its cache and a report's data alive, and nothing else of the compression."""

import gc

import pytest
import torch

import gracekv
from gracekv import CaptureOptions, Limit, Prompt
from gracekv.errors import CaptureMemoryError
from gracekv.hf import capture
from gracekv.prefill.passes import _ModelContinuation
from gracekv.prefill.stock_cache import StockLayers
from gracekv.testing.models import tiny_llama, tiny_model, tiny_tokenizer
from support.stored_bytes import storages

KV = ("keys", "values")
PROMPT = Prompt.from_ids(torch.arange(400) % 90, (10, 400))


def setup_module():
    """What other tests left is no part of the collections here."""
    gc.collect()
    gc.freeze()


def live():
    """The memory of all live tensors."""
    gc.collect()
    # By type: isinstance queries the object itself, and a weak proxy of a dead object raises.
    # Fake tensors of torch.compile have their own class and no memory.
    plain = torch.Tensor, torch.nn.Parameter
    tensors = (x for x in gc.get_objects() if type(x) in plain)
    # Tensors left behind by torch.compile in other tests have no memory.
    functional = torch._is_functional_tensor
    return storages(x for x in tensors if x.device.type != "meta" and not functional(x))


@pytest.mark.parametrize(("recipe", "rows", "family"), [
    ("gracekv-plus", 1, "llama"), ("gracekv-plus", 2, "llama"), ("gracekv", 2, "llama"),
    ("snapkv", 1, "llama"), ("cam", 2, "llama"), ("fullkv", 1, "llama"),
    ("gracekv-plus", 1, "nemotron_h"), ("gracekv-plus", 2, "falcon_h1"),
])  # fmt: skip
def test_nothing_else_stays_alive(recipe, rows, family):
    model = tiny_model(family, layers=4 if family == "nemotron_h" else 3)
    prompts = [Prompt.from_ids(torch.arange(400 + 9 * row) % 90, (10, 380)) for row in range(rows)]
    given = prompts[0] if rows == 1 else prompts
    # The first call computes everything that is kept per process.
    gracekv.compress(model, given, ratio=8, pipeline=recipe, backend="eager")
    before = live()
    result = gracekv.compress(model, given, ratio=8, pipeline=recipe, backend="eager")
    new = {place: size for place, size in live().items() if place not in before}
    assert result.details is None
    held = result.accounting.held_bytes
    assert set(held) == {"cpu"}
    ids = sum(prompt.ids.untyped_storage().nbytes() for prompt in prompts)
    assert sum(new.values()) == held["cpu"] - ids
    counted = result.accounting
    # A byte per token and head, 240 points of a curve, slots, and merged entries.
    tokens = sum(prompt.spans.context_length for prompt in prompts)
    heads = len(result.accountings[0].entries.flatten())
    rest = held["cpu"] - ids - counted.bytes - counted.metadata_bytes - counted.backend_bytes
    rest -= sum(counted.other_bytes.values())
    assert rest <= tokens * heads + rows * (16 * 260 + 8 * heads) + 12 * counted.spent + 4 * tokens


@pytest.mark.parametrize("recipe", ["gracekv-plus", "gracekv", "snapkv", "chunkkv"])
def test_reports_are_the_same_with_and_without_details(recipe):
    prompt = Prompt.from_ids(torch.arange(300) % 90, context=(10, 280))
    model = tiny_llama(layers=3)
    slim, whole = (
        gracekv.report.ReportData.of(
            {"x": gracekv.compress(model, prompt, ratio=4, pipeline=recipe, keep_run=keep_run)}
        ).columns[0]
        for keep_run in (False, True)
    )
    for name in ("start", "end", "multiplicity", "depth", "floor", "offsets"):
        assert torch.equal(getattr(slim.entries, name), getattr(whole.entries, name))
    assert torch.equal(slim.relevance.codes, whole.relevance.codes)
    assert torch.equal(slim.curve.utility, whole.curve.utility)


def those_of(kind):
    return [x for x in gc.get_objects() if type(x) is kind]


def test_a_sliding_layer_that_was_read_holds_its_window_alone():
    held, model = [], tiny_model("gemma3_text", layers=6, window=32)
    others = those_of(StockLayers)

    def look(done, total):
        own = [x for x in those_of(StockLayers) if not any(x is y for y in others)]
        caches = [x._cache for x in own if x._cache]
        states = [getattr(layer, n, None) for x in caches for layer in x.layers for n in KV]
        held.append(sum(storages(x for x in states if x is not None).values()))

    options = CaptureOptions(chunk=300, progress=look)
    result = gracekv.compress(model, PROMPT, ratio=8, pipeline="gracekv-agnostic", capture=options)
    assert max(held)
    assert held[-1] == sum(result.accounting.other_bytes.values())


def test_a_second_pass_holds_one_layer_once_more(monkeypatch):
    # In this model, values are views of a joint projection with queries and keys.
    model, held, own = tiny_model("phi3", layers=4), [], _ModelContinuation.run

    def run(self, ids, observe):
        def see(layer, seen):
            held.append(sum(len(x) for x in (*self._keys, *self._values)))
            observe(layer, seen)

        return own(self, ids, see)

    monkeypatch.setattr(_ModelContinuation, "run", run)
    gracekv.capture(model, PROMPT, gracekv.Pipeline.named("kvzip-two-pass").needs())
    assert held == [2 * 4] * 4


def test_what_was_kept_is_free_when_a_message_says_what_would_fit(monkeypatch):
    def out_of_memory(done, total):
        if done * 2 > total:
            raise MemoryError

    before, alive = live(), []
    monkeypatch.setattr(capture, "free_bytes", lambda device: alive.append(live()) or 0)
    options = CaptureOptions(progress=out_of_memory)
    model = tiny_llama(layers=3)
    known = live()
    with pytest.raises(CaptureMemoryError) as caught:
        gracekv.compress(model, PROMPT, ratio=1.5, pipeline="gracekv-agnostic", capture=options)
    full = 400 * 3 * 2 * 2 * 16 * 4
    for there in (alive[0], live()):
        assert sum(size for x, size in there.items() if x not in known | before) < full / 8
    assert caught


@pytest.mark.parametrize("family", ["llama", "falcon_h1"])
def test_a_closed_conversation_holds_nothing_of_its_own(family):
    model, tokenizer = tiny_model(family, layers=3, vocabulary=2000), tiny_tokenizer()
    prompt = Prompt.from_ids(torch.arange(600) % 90, (10, 600), tokenizer=tokenizer)
    book = gracekv.compress(model, prompt, ratio=8, pipeline="gracekv-agnostic-allocated")
    with book.chat() as chat:
        chat.ask("Who is she?", 2)
    for limit in (None, Limit(entries_per_head=300, every=64)):
        before = live()
        with book.chat(limit) as chat:
            chat.ask("Who is Dinah and whose cat is she? " * 4, 8)
            if limit is None:
                chat.compress(ratio=1)
            more = [sum(live().values()) - sum(before.values())]
        more.append(sum(live().values()) - sum(before.values()))
        assert more[1] < 10_000 < more[0]
        assert chat.accounting.bytes == book.accounting.bytes


@pytest.mark.parametrize("sizes", [{"entries_per_head": 60}, {"ratio": 4}])
def test_a_full_cache_counts_16_bits_if_a_passage_is_quantised_alone(sizes):
    model = tiny_model(layers=3)
    how = {"pipeline": "gracekv-agnostic-allocated", "backend": "eager"}
    result = gracekv.compress(model, PROMPT, **sizes, **how)
    other = {"ratio": 4} if "entries_per_head" in sizes else {"entries_per_head": 60}
    longer = result.extend(torch.arange(200) % 80, **other)
    assert longer.accounting.full_in_16_bits
    assert longer.accounting.full_bytes == longer.packed.length * 3 * 2 * 2 * 16 * 2
