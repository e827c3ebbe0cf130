"""Decoding by replaying a recorded step: the same answers, and the model is restored."""

import copy
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

import gracekv
from gracekv.hf import graph_replay
from gracekv.hf.generation import continue_ids
from gracekv.testing.models import tiny_model
from support.margins import assert_same_tokens
from support.static_tails import assert_same_answer, prompts

MODEL = {"layers": 2}


@pytest.fixture
def replay(monkeypatch):
    """Generate by replay wherever possible, as on a GPU; the forwards that were created."""
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


def test_a_model_of_remote_code_may_take_cache_positions(replay):
    model, taken = tiny_model("llama"), []

    class Remote(type(model)):
        _auto_class = "AutoModelForCausalLM"

        def forward(self, input_ids=None, cache_position=None, **kwargs):
            taken.append(cache_position)
            return super().forward(input_ids=input_ids, **kwargs)

    model.__class__ = Remote
    result = gracekv.compress(model, prompts(80)[0], ratio=4)
    taken.clear()
    answer = result.generate_ids(30, eos_token_id=None)
    assert replay[0]._options is not None
    # The first token is the prompt's last; the others follow one by one.
    assert [int(x[-1]) for x in taken] == [result.packed.length + step for step in range(30)]
    assert_same_answer(model, result, answer)


def test_replayed_generation_of_a_batch_with_sampling_and_penalties(replay, model, batch):
    options = {"do_sample": True, "top_k": 1, "repetition_penalty": 1.3, "eos_token_id": 3}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    answers, scores = [], []
    for suits in (True, False):
        graph_replay.suits = lambda *args, suits=suits: suits
        scores.clear()
        seen = [lambda ids, penalised: scores.append(penalised) or penalised]
        answers.append(batch.generate_ids(20, **options, logits_processor=seen))
    assert len(replay) == 1
    for row, (got, want) in enumerate(zip(*answers, strict=True)):
        assert_same_tokens(got, want, lambda before, row=row: scores[len(before)][row])


def test_a_second_thread_takes_the_growing_tail(replay, model):
    result = gracekv.compress(model, prompts(80)[0], ratio=4)
    with ThreadPoolExecutor(3) as pool:
        works = [pool.submit(result.generate_ids, 20, eos_token_id=None) for _ in range(3)]
    answers, before = [work.result() for work in works], len(replay)
    with graph_replay.replaying(model, result.new_cache(), 20):
        answers.append(result.generate_ids(20, eos_token_id=None))
    assert len(replay) == before + 1
    assert "forward" not in model.__dict__
    for answer in answers:
        assert_same_answer(model, result, answer)


class FakeCuda:
    """torch.cuda's streams and graphs on a CPU: a recording runs nothing, a replay one step."""

    def __init__(self, forward):
        self.forward, self.steps = forward, 0

    def graph(self, graph, pool, stream, capture_error_mode):
        fake = self
        assert stream.device == self.forward._ids.device, "a GPU that is not the current one"
        assert stream is graph_replay._side_stream(stream.device, id(self.forward._model))

        class Recording:
            def __enter__(self):
                self.lengths = [layer.length.clone() for layer in fake.forward.cache.layers]

            def __exit__(self, *_):
                for layer, length in zip(fake.forward.cache.layers, self.lengths, strict=True):
                    layer.length.copy_(length)

        return Recording()

    def replay(self):
        self.steps += 1
        self.forward._output.logits.copy_(self.forward._step().logits)

    def install(self, monkeypatch):
        def stream(device):
            return SimpleNamespace(wait_stream=id, device=device)

        for name in ("current_stream", "Stream"):
            monkeypatch.setattr(torch.cuda, name, stream)
        monkeypatch.setattr(torch.cuda, "stream", MagicMock())
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=self.replay))
        monkeypatch.setattr(torch.cuda, "graph", self.graph)


def record(monkeypatch):
    """From now on steps are recorded; the fake GPUs, one per forward."""
    fakes = []

    class Recording(graph_replay.ReplayedForward):
        def __init__(self, *args):
            super().__init__(*args)
            self.records = True
            fakes.append(FakeCuda(self))
            fakes[-1].install(monkeypatch)

    monkeypatch.setattr(graph_replay, "ReplayedForward", Recording)
    return fakes


def test_a_recorded_step_is_replayed_with_the_tail_where_it_was(replay, model, monkeypatch, batch):
    want, fakes = batch.generate_ids(30, eos_token_id=None), record(monkeypatch)
    assert torch.equal(batch.generate_ids(30, eos_token_id=None), want)
    assert fakes[0].steps == 30
    assert fakes[0].forward.recordings == 3  # 8, 16 and 30 places
    assert [layer.tail_length for layer in fakes[0].forward.cache.layers] == [30, 30]
    # After a question: one per doubling, and one when `generate` changes the experts.
    rows = [torch.cat([x.ids, torch.arange(30)]) for x in batch.prompts]

    def change(ids, scores):
        name = "batched_mm" if ids.shape[1] > 120 else None
        monkeypatch.setattr(model.config, "_experts_implementation_internal", name)
        return scores

    options = {"eos_token_id": None, "logits_processor": [change]}
    continue_ids(model, rows, batch.new_cache(), None, 40, options)
    assert fakes[-1].forward.recordings == 3
    # A first token by `grouped_mm` is not recorded.
    monkeypatch.setattr(model.config, "_experts_implementation_internal", "grouped_mm")

    def switch(ids, scores):
        monkeypatch.setattr(model.config, "_experts_implementation_internal", "batched_mm")
        return scores

    batch.generate_ids(8, eos_token_id=None, logits_processor=[switch])
    assert (fakes[-1].forward.recordings, fakes[-1].steps) == (1, 7)


@pytest.mark.parametrize("where", ["warm-up", "recording"])
def test_without_memory_for_a_recording_the_step_runs_as_it_is(replay, batch, monkeypatch, where):
    want, unrecordable = batch.generate_ids(20, eos_token_id=None), set()
    monkeypatch.setattr(graph_replay, "_unrecordable", unrecordable)
    monkeypatch.setattr(graph_replay, "_end_failed", lambda *_: None)

    record(monkeypatch)
    step = graph_replay.ReplayedForward._step

    refuse = MagicMock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))

    def ahead(forward):
        output = step(forward)
        if forward.records:
            forward.cache.layers[0].length.add_(1)  # a layer that is ahead
            refuse()
        return output

    if where == "recording":
        monkeypatch.setattr(FakeCuda, "graph", refuse)
    else:
        monkeypatch.setattr(graph_replay.ReplayedForward, "_step", ahead)
    with pytest.warns(UserWarning, match="this answer is generated without one"):
        assert torch.equal(batch.generate_ids(20, eos_token_id=None), want)
    assert not unrecordable


def test_a_step_that_cannot_be_recorded_runs_as_it_is(replay, model, monkeypatch, batch):
    want, generator = batch.generate_ids(20, eos_token_id=None), MagicMock()
    monkeypatch.setattr(graph_replay, "_unrecordable", set())
    monkeypatch.setattr(torch.cuda, "default_generators", {None: generator})
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)("2.12.1+cu130"))
    ended = []
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, lambda *x, name=name: ended.append((name, *x)), False)

    def refuse(*_, **__):
        # torch leaves the stream current; leaving a block around it restores the other one.
        block = torch.cuda.stream.return_value
        assert block.__enter__.call_count > block.__exit__.call_count
        raise RuntimeError("operation not permitted when stream is capturing")

    record(monkeypatch)
    monkeypatch.setattr(FakeCuda, "graph", refuse)
    with pytest.warns(UserWarning, match="could not be recorded as a CUDA graph"):
        answer = batch.generate_ids(20, eos_token_id=None)
    assert torch.equal(answer, want)
    generator.graphsafe_set_state.assert_called_once_with(generator.clone_state())
    assert model in graph_replay._unrecordable
    assert [call[0] for call in ended] == ["_cuda_endAllocateToPool", "_cuda_releasePool"]


class Collected(list):
    """A hook without a hash."""

    def __call__(self, *_):
        self.append(1)


def test_all_recordings_of_a_model_use_one_stream(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
    one, again, other = (graph_replay._side_stream("gpu", number) for number in (-1, -1, -2))
    assert one is again
    assert one is not other


def test_what_is_replayed(model, monkeypatch):
    entries, backend = SimpleNamespace(device=torch.device("cuda")), SimpleNamespace(name="triton")
    monkeypatch.setitem(vars(model), "parameters", lambda: [entries])
    layer = SimpleNamespace(packed=SimpleNamespace(entries=entries, backend=backend))
    cache = SimpleNamespace(grace_layers=[layer], packed=SimpleNamespace(other_layers=()))
    assert graph_replay.suits(model, cache, 64, {"do_sample": True, "top_k": 5})
    assert not graph_replay.suits(model, cache, 8, {})
    monkeypatch.setattr(graph_replay, "_unrecordable", {model})
    assert not graph_replay.suits(model, cache, 64, {})
    graph_replay._unrecordable.clear()
    with monkeypatch.context() as patch:
        patch.setattr(model, "is_loaded_in_8bit", True, raising=False)
        assert not graph_replay.suits(model, cache, 64, {})
    for options in (
        {"num_beams": 2}, {"num_return_sequences": 3}, {"prompt_lookup_num_tokens": 2},
        {"assistant_model": model}, {"use_cache": False}, {"output_hidden_states": True},
        {"generation_config": model.generation_config}, {"assistant_early_exit": 1},
        {"use_mtp": True},
    ):  # fmt: skip
        assert not graph_replay.suits(model, cache, 64, options), options
    rope, offloaded = model.config.rope_parameters, [torch.empty(0, device="meta")]
    for there, name, value in (
        (rope, "rope_type", "dynamic"),
        (rope, "rope_type", "longrope"),
        (vars(model), "parameters", lambda: offloaded),
    ):
        with monkeypatch.context() as patch:
            patch.setitem(there, name, value)
            assert not graph_replay.suits(model, cache, 64, {}), value
    hook = Collected()
    for register in (model.model.layers[1].register_forward_hook, register_module_forward_hook):
        handle = register(hook)
        assert not graph_replay.suits(model, cache, 64, {})
        handle.remove()
    # transformers leaves hooks of its own behind.
    model(torch.arange(4)[None], output_hidden_states=True)
    assert graph_replay.suits(model, cache, 64, {})
    # Their `generate` runs a forward that is not their own.
    compiled, wrapped = copy.deepcopy(model), torch.compile(model, backend="eager")
    compiled.compile(backend="eager")
    inside, forward, part = (copy.deepcopy(model) for _ in range(3))
    inside.model.compile(backend="eager")
    forward.forward = torch.compile(forward.forward, backend="eager")
    part.model.layers[1] = torch.compile(part.model.layers[1], backend="eager")
    each = (compiled, wrapped, inside, forward, part)
    assert not any(graph_replay.suits(x, cache, 64, {}) for x in each)
    layer.packed.backend.name = "sdpa"
    assert not graph_replay.suits(model, cache, 64, {})
    layer.packed.backend.name, entries.device = "triton", torch.device("cpu")
    assert not graph_replay.suits(model, cache, 64, {})
