"""Compressing while reading keeps the same as compressing afterwards, by family and recipe."""

import gc
import itertools
import re
import sys
import threading
import weakref
from unittest.mock import Mock

import greenlet
import pytest
import torch

import gracekv
from gracekv import CaptureOptions, Pipeline, Prompt
from gracekv.cache import dequantised
from gracekv.cache.pool import EntryPool
from gracekv.errors import (
    BackendUnavailableError,
    ConfigError,
    LayerOrderError,
    MissingDependencyError,
    UnsupportedModelError,
    WholeCacheWarning,
)
from gracekv.pipeline.compression import Compression
from gracekv.testing.models import tiny_llama
from support.capture_state import state
from support.covering import covering, every
from support.families import FAMILIES
from support.fresh_python import fresh_python
from support.margins import assert_same_tokens, logits_over
from support.tried_families import TRIED, tried_model

IDS = torch.randint(97, (150,), generator=torch.Generator().manual_seed(1))
STREAMED = (
    "gracekv-agnostic gracekv-plus gracekv-plus-allocated gracekv-plus-equal snapkv snapkv-4bit"
    " ada-snapkv pyramidkv chunkkv streaming-llm h2o tova knorm keydiff lagkv compactor"
    " expected-attention scissorhands critical-snapkv rdkv"
)
CASES = [*itertools.product(STREAMED.split(), (None, 40))]


def prompt_of(length=150):
    return Prompt.from_ids(IDS[:length], context=(4, length - 12), question_end=length - 3)


def test_threads_of_greenlets_are_the_thread_that_runs_them(monkeypatch):
    """As under gevent: each greenlet has its own identifier."""
    number = itertools.count(1)
    monkeypatch.setattr(threading, "get_ident", lambda: next(number))
    options = CaptureOptions(stream=True)
    gracekv.compress(tiny_llama(), prompt_of(), ratio=4, pipeline="gracekv-plus", capture=options)


def both(model, recipe, chunk=None):
    """Results of reading everything first, and of compressing layer by layer."""
    ways = [CaptureOptions(stream=stream, chunk=chunk) for stream in (False, True)]
    return [
        gracekv.compress(model, prompt_of(), ratio=4, pipeline=recipe, capture=x, keep_run=True)
        for x in ways
    ]


def assert_same(whole, streamed):
    layers = (dequantised(x.packed).layers for x in (whole, streamed))
    for one, other in zip(*layers, strict=True):
        for name, tensor in one.tensors().items():
            close = torch.isclose(other.tensors()[name], tensor, rtol=1e-4, atol=1e-4)
            # A number halfway between two codes may get either, and so may a 16-bit scale.
            most = 0.05 if name in ("keys", "values") and whole.packed.layers[0].codings else 0
            assert (~close).sum() <= most * close.numel(), name
    for one, other in zip(whole.packed.other_layers, streamed.packed.other_layers, strict=True):
        torch.testing.assert_close(other.tensors, one.tensors, rtol=1e-4, atol=1e-4)
    one, other = whole.accounting, streamed.accounting
    assert (one.spent, one.bytes, one.widths) == (other.spent, other.bytes, other.widths)
    assert one.utility == pytest.approx(other.utility, rel=1e-5)


@pytest.mark.parametrize(("recipe", "chunk"), covering(CASES))
def test_every_recipe_keeps_the_same(recipe, chunk):
    assert_same(*both(tiny_llama(layers=3), recipe, chunk))


@pytest.mark.parametrize("family", every(3, sorted(FAMILIES)))
def test_every_family_keeps_the_same(family):
    whole, streamed = both(FAMILIES[family].model(), "gracekv-plus", chunk=40)
    assert_same(whole, streamed)
    assert_same_tokens(streamed.generate_ids(4), whole.generate_ids(4), logits_over(whole))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", every(3, sorted(TRIED)))
def test_families_without_tests_of_their_own_keep_the_same(family):
    try:
        whole, streamed = both(tried_model(family), "gracekv-agnostic", chunk=40)
    except UnsupportedModelError:
        pytest.skip("gracekv refuses it.")
    assert_same(whole, streamed)


def test_passages_and_turns_are_compressed_as_they_are_read():
    model, books = tiny_llama(layers=3, vocabulary=300), []
    for stream in (False, True):
        options = CaptureOptions(stream=stream, chunk=25)
        prompt = Prompt.from_ids(IDS, context=(4, 150))
        book = gracekv.compress(model, prompt, ratio=3, capture=options)
        books.append(book.extend(IDS[:70], ratio=3, capture=options))
    assert_same(*books)


def test_freed_memory_is_returned_if_trim_says_so(monkeypatch):
    trims, counts = [], []
    monkeypatch.setattr("ctypes.CDLL.malloc_trim", lambda _, pad: trims.append(pad), raising=False)
    prompt = Prompt.from_ids(IDS, context=(4, 150))
    for options in (CaptureOptions(), CaptureOptions(trim=False)):
        book = gracekv.compress(tiny_llama(), prompt, ratio=3, capture=options)
        counts.append(len(trims))
        book.extend(IDS, ratio=3, capture=options)
        counts.append(len(trims))
    # While layers are read, and at the end.
    assert counts == [3, 6, 6, 6]


def test_only_one_layer_is_held(monkeypatch):
    model, held, own = tiny_llama(layers=4), [], Compression.layer

    def spy(self, capture):
        held.append((capture.number, list(capture.keys.shape), capture.keys.data_ptr()))
        own(self, capture)

    monkeypatch.setattr(Compression, "layer", spy)
    gracekv.compress(model, prompt_of(), ratio=4, capture=CaptureOptions(chunk=30))
    assert [x[:2] for x in held] == [(layer, held[0][1]) for layer in range(4)]
    # Each layer reuses the memory of the one before.
    assert len({x[2] for x in held}) == 1


def test_layers_and_chunks_are_told():
    told = []
    options = CaptureOptions(chunk=50, progress=lambda *x: told.append(x))
    gracekv.compress(tiny_llama(layers=3), prompt_of(), ratio=4, capture=options)
    # Three chunks for each of three layers.
    assert told == [(150 * done // 9, 150) for done in range(1, 10)]


@pytest.mark.parametrize(("error", "layer"), [(KeyboardInterrupt, 0), (RuntimeError, 2)])
def test_what_stops_it_leaves_the_model_as_it_was(error, layer):
    model = tiny_llama(layers=3)
    before, stop = state(model), Mock(side_effect=[None, None, error("stop")])
    hook = model.get_decoder().layers[layer].self_attn.register_forward_hook(stop)
    with pytest.raises(error, match="stop"):
        gracekv.compress(model, prompt_of(), ratio=4, capture=CaptureOptions(chunk=30))
    hook.remove()
    assert state(model) == before
    gc.collect()
    assert not [x for x in gc.get_objects() if type(x) is greenlet.greenlet and x and x.parent]
    assert_same(*both(model, "gracekv-plus"))


REFUSED = [
    ("gracekv", "does more than choose among single tokens"),
    ("kvzip-two-pass", "the model runs once more"),
    ("fullkv", "keeps everything"),
]


@pytest.mark.parametrize(("recipe", "reason"), REFUSED)
def test_what_cannot_be_is_refused_before_the_model_runs(recipe, reason):
    model = tiny_llama()
    model.register_forward_pre_hook(lambda *_: pytest.fail("The model runs."))
    options = {"pipeline": recipe, "capture": CaptureOptions(stream=True)}
    with pytest.raises(ConfigError, match=rf"stream=True\).*{reason}.*Leave stream out"):
        gracekv.compress(model, prompt_of(), ratio=4, **options)


def test_a_prefill_holds_what_a_streamed_one_would_not():
    options = {"prefill": gracekv.capture(tiny_llama(), prompt_of()), "ratio": 4}
    with pytest.raises(ConfigError, match="leave out prefill, or stream=True"):
        gracekv.compress(tiny_llama(), prompt_of(), **options, capture=CaptureOptions(stream=True))


def test_a_second_pass_holds_nothing_once_entries_are_chosen(monkeypatch):
    held, alive, fit = [], [], Pipeline.named("gracekv-agnostic-two-pass").fit
    layers, add = type(fit).layers, EntryPool.add

    def noted(self, capture, gains):
        held.append(weakref.ref(capture.keys))
        add(self, capture, gains)

    def fitted(self, *args):
        alive.extend(keys() is not None for keys in held)
        return layers(self, *args)

    monkeypatch.setattr(EntryPool, "add", noted)
    monkeypatch.setattr(type(fit), "layers", fitted)
    gracekv.compress(tiny_llama(), prompt_of(), ratio=4, pipeline="gracekv-agnostic-two-pass")
    assert alive
    assert not any(alive)


@pytest.mark.parametrize("recipe", ["kvzip-two-pass", "gracekv-agnostic-two-pass"])
def test_a_second_pass_beyond_the_model_s_positions_is_refused_and_leaves_it_alone(recipe):
    model, prompt = tiny_llama(positions=80), prompt_of(70)
    before = state(model)
    with pytest.raises(UnsupportedModelError, match=r"takes .* positions or more"):
        gracekv.compress(model, prompt, ratio=4, pipeline=recipe)
    with pytest.raises(BackendUnavailableError):
        gracekv.compress(model, prompt, ratio=4, pipeline="snapkv", backend="triton")
    assert state(model) == before


def test_a_missing_greenlet_is_named_and_leaves_the_model_alone(monkeypatch):
    model = tiny_llama()
    before = state(model)
    monkeypatch.setitem(sys.modules, "greenlet", None)
    with pytest.raises(MissingDependencyError, match=r"'greenlet'.*gracekv\[hf\]"):
        gracekv.compress(model, prompt_of(), ratio=4)
    assert state(model) == before


def test_a_model_that_mixes_its_layers_is_read_as_a_whole_and_named():
    model = tiny_llama(layers=3)
    decoder = model.get_decoder()
    # The second layer runs inside the first.
    own, inner = decoder.layers[0].forward, decoder.layers[1]
    decoder.layers[0].forward = lambda x, **rest: inner(own(x, **rest), **rest)
    with pytest.raises(LayerOrderError, match=r"one after the other.*stream=False"):
        gracekv.compress(model, prompt_of(), ratio=4, capture=CaptureOptions(stream=True))
    with pytest.warns(WholeCacheWarning, match="LlamaForCausalLM does not call its decoder layers"):
        result = gracekv.compress(model, prompt_of(), ratio=4)
    assert len(result.generate_ids(3)[0]) == 3


@pytest.mark.parametrize("block", [torch.autocast("cpu", torch.bfloat16), torch.inference_mode()])
def test_settings_that_a_forward_changes_are_given_back(block):
    model = tiny_llama(layers=3)
    model.forward = block(model.forward)
    with pytest.warns(WholeCacheWarning, match="changes torch's settings"):
        gracekv.compress(model, prompt_of(), ratio=4, capture=CaptureOptions(chunk=50))
    assert not any([torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled()])
    assert torch.is_grad_enabled()


def test_a_model_that_goes_on_after_its_last_layer_cannot_be_read_by_layers():
    model = tiny_llama(layers=3)
    last = model.get_decoder().layers[-1]

    def twice(x, **rest):
        last.forward = own
        return last(own(x, **rest), **rest)

    own, last.forward = last.forward, twice
    with pytest.raises(LayerOrderError, match="one after the other"):
        gracekv.compress(model, prompt_of(), ratio=4, capture=CaptureOptions(stream=True))


LIMITED = """
import resource, sys, torch, gracekv
from gracekv.testing.models import tiny_model
torch.set_num_threads(1)
model = tiny_model("llama", layers=32, heads=8, kv_heads=8, dim=64)
ids = torch.randint(90, (2200,), generator=torch.Generator().manual_seed(0))
def compress(length, stream):
    prompt = gracekv.Prompt.from_ids(ids[:length], (4, length - 10), question_end=length - 3)
    options = gracekv.CaptureOptions(stream=stream)
    return gracekv.compress(model, prompt, ratio=8, pipeline=PIPELINE, capture=options)
PIPELINE = "gracekv-agnostic"
for stream in (False, None):
    compress(600, stream)
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + int(sys.argv[1]) * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    compress(2200, False)
except gracekv.errors.CaptureMemoryError as error:
    print("whole:", error)
result = compress(2200, None)
print("layer by layer:", len(result.generate_ids(4)[0]), result.accounting.full_bytes // 2**20)
"""


@pytest.mark.long
def test_a_context_whose_cache_does_not_fit_is_compressed_and_answers():
    whole, streamed = fresh_python("-c", LIMITED, 180).stdout.splitlines()
    assert re.match(r"whole: Capturing 2200 tokens ran out of memory.*enough for a prompt", whole)
    assert streamed == "layer by layer: 4 274"
