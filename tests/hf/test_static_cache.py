"""Decoding over a preallocated tail: token by token the same as over the growing one."""

import contextlib
import threading
from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import CompileConfig  # noqa: E402

import gracekv  # noqa: E402
from gracekv.errors import CacheError  # noqa: E402
from gracekv.hf import graph_replay  # noqa: E402
from gracekv.testing.models import tiny_llama, tiny_model  # noqa: E402

BACKENDS = ["eager", "sdpa", "numba"]


def prompts(*lengths):
    rng = torch.Generator().manual_seed(0)
    return [
        gracekv.Prompt.from_ids(
            torch.randint(0, 97, (length,), generator=rng),
            (2, length - 9),
            question_end=length - 3,
        )
        for length in lengths
    ]


@pytest.fixture(scope="module")
def model():
    return tiny_llama(layers=2)


@pytest.fixture(params=BACKENDS)
def result(request, model):
    return gracekv.compress(model, prompts(80)[0], ratio=4, backend=request.param)


@pytest.fixture(scope="module")
def batch(model):
    return gracekv.compress(model, prompts(80, 55, 61), ratio=4)


def steps(model, cache, ids):
    """Logits of the ids [B, n], fed one by one; a cache may be replaced between steps."""
    logits = []
    with torch.no_grad():
        for column in ids.T:
            cache = yield_room(cache)
            logits.append(model(column[:, None], past_key_values=cache).logits[:, -1])
    return torch.stack(logits)


def yield_room(cache):
    """A tail twice as long where the static one is full."""
    layer = cache.layers[0]
    if layer.length is not None and layer.tail_length == layer.capacity:
        return cache.with_static_tail(2 * layer.capacity)
    return cache


def same(logits, want):
    """Equal up to the order of sums, which the number of hidden places may change."""
    torch.testing.assert_close(logits, want, rtol=0, atol=1e-4)


def test_each_step_equals_the_growing_tail_also_past_the_first_capacity(model, result):
    ids = torch.randint(0, 97, (1, 30), generator=torch.Generator().manual_seed(1))
    want = steps(model, result.new_cache(), ids)

    same(steps(model, result.new_cache().with_static_tail(8), ids), want)


def test_a_batch_of_prompts_with_padding(model, batch):
    ids = torch.randint(0, 97, (3, 12), generator=torch.Generator().manual_seed(2))
    want = steps(model, batch.new_cache(), ids)

    same(steps(model, batch.new_cache().with_static_tail(12), ids), want)


def test_several_tokens_in_one_step_then_crop(model, result):
    ids = torch.randint(0, 97, (1, 9), generator=torch.Generator().manual_seed(3))
    caches = result.new_cache(), result.new_cache().with_static_tail(16)
    with torch.no_grad():
        outputs = [model(ids, past_key_values=cache).logits for cache in caches]
        same(outputs[1], outputs[0])
        for cache in caches:
            cache.crop(-4)
        assert int(caches[1].get_seq_length()) == caches[0].get_seq_length()
        outputs = [model(ids[:, :3], past_key_values=cache).logits for cache in caches]
    same(outputs[1], outputs[0])


def test_generate_over_a_static_cache(model, result):
    ids = model.generate(
        **result.inputs, past_key_values=result.new_cache().with_static_tail(16),
        max_new_tokens=14, do_sample=False, pad_token_id=1,
    )  # fmt: skip
    assert_same_answer(model, result, ids[:, 80:])


def assert_same_answer(model, result, answer):
    """The answer's tokens are the growing tail's own choices, up to logits that tie."""
    cache, ids = result.new_cache(), result.inputs["input_ids"]
    fed = torch.cat([ids[:, -1:], answer[:, :-1]], dim=1)
    logits = steps(model, cache, fed)
    chosen = logits.gather(2, answer.T[..., None])[..., 0]
    assert bool((chosen >= logits.amax(-1) - 1e-3).all())


def test_generate_compiles_over_it(model):
    result = gracekv.compress(model, prompts(80)[0], ratio=4, backend="sdpa")
    cache = result.new_cache().with_static_tail(16)
    assert cache.is_compileable
    assert not result.new_cache().is_compileable
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    options = CompileConfig(backend=count, mode=None, fullgraph=False)
    options._compile_all_devices = True
    answer = model.generate(
        **result.inputs, past_key_values=cache, max_new_tokens=12, do_sample=False, pad_token_id=1,
        compile_config=options,
    )  # fmt: skip
    torch._dynamo.reset()
    model.__dict__.pop("_compiled_call", None)

    assert_same_answer(model, result, answer[:, 80:])
    assert graphs
    assert len(graphs) <= 2 * (1 + len(cache.layers)), "the step is compiled again and again"


@pytest.fixture
def replay(monkeypatch):
    """Generate by replay wherever it could, as on a GPU; the forwards that were made."""
    made = []

    class Recorded(graph_replay.ReplayedForward):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(graph_replay, "ReplayedForward", Recorded)
    monkeypatch.setattr(graph_replay, "_FIRST_CAPACITY", 8)
    monkeypatch.setattr(graph_replay, "suits", lambda *args: True)
    return made


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_replayed_generation_grows_and_gives_the_same_answer(replay, family):
    model = tiny_model(family)
    result = gracekv.compress(model, prompts(80)[0], ratio=4)
    answer = result.generate_ids(30, eos_token_id=None)
    assert len(replay) == 1
    assert replay[0].cache.layers[0].capacity == 30
    assert "forward" not in model.__dict__
    assert_same_answer(model, result, answer)


def test_replayed_generation_of_a_batch_with_sampling_and_penalties(replay, model, batch):
    options = {
        "do_sample": True, "top_k": 5, "repetition_penalty": 1.3, "eos_token_id": 3,
        "return_dict_in_generate": True, "output_logits": True,
    }  # fmt: skip
    answers = []
    for suits in (True, False):
        graph_replay.suits = lambda *args, suits=suits: suits
        torch.manual_seed(0)
        answers.append(batch.generate_ids(20, **options))
    assert len(replay) == 1
    assert torch.equal(*answers)


def test_a_second_thread_takes_the_growing_tail(replay, model):
    result = gracekv.compress(model, prompts(80)[0], ratio=4)
    want = result.generate_ids(20, eos_token_id=None)
    answers = []

    def work():
        answers.append(result.generate_ids(20, eos_token_id=None))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "forward" not in model.__dict__
    for answer in answers:
        assert_same_answer(model, result, answer)
    assert len(answers) == 3
    assert want.shape == answers[0].shape


def test_the_model_is_given_back_after_an_error(replay, model):
    result = gracekv.compress(model, prompts(80)[0], ratio=4)
    with pytest.raises(ValueError, match="temperature"):
        result.generate_ids(20, do_sample=True, temperature=-1.0)
    assert "forward" not in model.__dict__


class FakeCuda:
    """torch.cuda's streams and graphs on a CPU: a recording runs nothing, a replay one step."""

    def __init__(self, forward):
        self.forward, self.steps = forward, 0

    def graph(self, graph, capture_error_mode):
        fake = self

        class Recording:
            def __enter__(self):
                self.lengths = [layer.length.clone() for layer in fake.forward.cache.layers]

            def __exit__(self, *_):
                for layer, length in zip(fake.forward.cache.layers, self.lengths, strict=True):
                    layer.length.copy_(length)

        return Recording()

    def replay(self):
        self.steps += 1
        static = self.forward._output.logits
        static.copy_(self.forward._step().logits)

    def install(self, monkeypatch):
        stream = SimpleNamespace(wait_stream=lambda other: None)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
        monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
        monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=self.replay))
        monkeypatch.setattr(torch.cuda, "graph", self.graph)


def test_a_recorded_step_is_replayed_with_the_tail_where_it_was(replay, model, monkeypatch, batch):
    want = batch.generate_ids(30, eos_token_id=None)
    fakes = []

    class Recording(graph_replay.ReplayedForward):
        def __init__(self, *args):
            super().__init__(*args)
            self.records = True
            fakes.append(FakeCuda(self))
            fakes[-1].install(monkeypatch)

    monkeypatch.setattr(graph_replay, "ReplayedForward", Recording)
    answer = batch.generate_ids(30, eos_token_id=None)

    assert torch.equal(answer, want)
    assert fakes[0].steps == 30
    assert fakes[0].forward.recordings == 3  # 8, 16 and 30 places
    assert [layer.tail_length for layer in fakes[0].forward.cache.layers] == [30, 30]


def test_a_step_that_cannot_be_recorded_runs_as_it_is(replay, model, monkeypatch, batch):
    want = batch.generate_ids(20, eos_token_id=None)

    class Failing(graph_replay.ReplayedForward):
        def __init__(self, *args):
            super().__init__(*args)
            self.records = True
            fake = FakeCuda(self)
            fake.install(monkeypatch)
            monkeypatch.setattr(torch.cuda, "graph", self.refuse)

        def refuse(self, *args, **kwargs):
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graph_replay, "ReplayedForward", Failing)
    with pytest.warns(UserWarning, match="could not be recorded as a CUDA graph"):
        answer = batch.generate_ids(20, eos_token_id=None)
    assert torch.equal(answer, want)


def test_what_is_replayed(model):
    layer = SimpleNamespace(
        packed=SimpleNamespace(
            ragged=SimpleNamespace(device=torch.device("cuda")),
            backend=SimpleNamespace(name="triton"),
        )
    )
    cache = SimpleNamespace(layers=[layer])
    assert graph_replay.suits(model, cache, 64, {"do_sample": True, "top_k": 5})
    assert not graph_replay.suits(model, cache, 8, {})
    for options in (
        {"num_beams": 2}, {"num_return_sequences": 3}, {"prompt_lookup_num_tokens": 2},
        {"assistant_model": model}, {"use_cache": False}, {"output_hidden_states": True},
        {"generation_config": model.generation_config},
    ):  # fmt: skip
        assert not graph_replay.suits(model, cache, 64, options), options
    layer.packed.backend.name = "sdpa"
    assert not graph_replay.suits(model, cache, 64, {})


def test_beams_over_a_static_tail(model, result):
    cache = result.new_cache().with_static_tail(16, rows=3)
    options = {"num_beams": 3, "max_new_tokens": 10, "do_sample": False, "pad_token_id": 1}
    answers = [
        model.generate(**result.inputs, past_key_values=each, **options)
        for each in (result.new_cache(), cache)
    ]
    assert torch.equal(*answers)


def test_plain_generation_on_a_cpu_does_not_replay(model):
    result = gracekv.compress(model, prompts(80)[0], ratio=4)
    assert not graph_replay.suits(model, result.new_cache(), 100, {})


def test_a_full_tail_and_other_rows_are_refused(model, result):
    cache = result.new_cache().with_static_tail(3)
    ids = torch.zeros(1, 1, dtype=torch.int64)
    with torch.no_grad():
        for _ in range(3):
            model(ids, past_key_values=cache)
        with pytest.raises(CacheError, match=r"holds 3 tokens.*with_static_tail\(capacity=6\)"):
            model(ids, past_key_values=cache)
        other = result.new_cache().with_static_tail(3)
        with pytest.raises(CacheError, match=r"made for 1 rows, the model was given 2"):
            model(ids.expand(2, 1), past_key_values=other)
    with pytest.raises(CacheError, match="capacity=2"):
        cache.with_static_tail(2)
