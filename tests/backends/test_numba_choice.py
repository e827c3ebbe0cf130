"""When the compiled kernel runs, when sdpa does, and what is cached for either."""

import importlib.util
import sys
from dataclasses import replace

import pytest
import torch

from gracekv.backends import AttentionSpec, AttentionStep, Auto, Eager, Numba, Sdpa
from gracekv.backends import numba as backend_module
from gracekv.errors import BackendUnavailableError, MissingDependencyError, required
from gracekv.kernels import compiled
from gracekv.testing.attention import TOLERANCES, relative_error
from support.decode_steps import drawn, ragged

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("short_splits")


def _count(monkeypatch):
    """Count calls of sdpa for a whole step, and of the kernel."""
    asked = {"sdpa": 0, "kernel": 0}

    def watch(kind, owner, name):
        own = getattr(owner, name)

        def counted(*args, **kwargs):
            asked[kind] += 1
            return own(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    watch("sdpa", Sdpa, "__call__")
    watch("kernel", backend_module, "_attend")
    return asked


@pytest.mark.parametrize("why", ["two tokens", "gradient", "many", "strided", "no tail", "nothing"])
def test_what_does_not_suit_goes_to_sdpa(monkeypatch, why):
    layer, query, keys, values = drawn(9, [40, 11], 2, 49 if why == "many" else 1, 12)
    if why == "two tokens":
        query = query.repeat(1, 1, 2, 1)
    elif why == "gradient":
        query.requires_grad_()
    elif why == "strided":
        doubled = [torch.stack([x, x], dim=-1)[..., 0] for x in (layer.keys, layer.values)]
        layer = replace(layer, keys=doubled[0], values=doubled[1])
    elif why == "no tail":
        keys, values = keys[:, :, :0], values[:, :, :0]
    asked = _count(monkeypatch)
    output = Numba()(AttentionStep(query, Numba().prepare(layer), keys, values, 0.125))

    assert asked == {"sdpa": int(why != "nothing"), "kernel": int(why == "nothing")}
    want = Eager()(AttentionStep(query, layer, keys, values, 0.125))
    assert relative_error(output.detach(), want.detach()) <= TOLERANCES[torch.float32]
    if why == "gradient":
        output.sum().backward()
        assert bool(query.grad.isfinite().all())


@pytest.mark.parametrize("change", [
    lambda query, keys, values: (query[..., :32], keys, values),
    lambda query, keys, values: (query[:, :3], keys, values),
    lambda query, keys, values: (query[:1], keys, values),
    lambda query, keys, values: (query, keys[:, :1], values[:, :1]),
    lambda query, keys, values: (query, keys[..., :32], values[..., :32]),
    lambda query, keys, values: (query, keys, values[:, :, :5]),
    lambda query, keys, values: (query, keys, values.half()),
    lambda query, keys, values: (query.half(), keys, values),
    lambda query, keys, values: (query, keys.to("meta"), values.to("meta")),
])  # fmt: skip
def test_addresses_are_only_read_where_everything_fits(monkeypatch, change):
    layer, *asked = drawn(16, [40, 11], 2, 2, 12)
    query, keys, values = change(*asked)
    monkeypatch.setattr(Sdpa, "__call__", lambda *args, **options: "sdpa")
    prepared = Numba().prepare(layer)

    assert Numba()(AttentionStep(query, prepared, keys, values, 0.125)) == "sdpa"
    assert torch.is_tensor(Numba()(AttentionStep(asked[0], prepared, *asked[1:], 0.125)))


def test_splits_serve_all_steps_of_a_batch_and_then_make_room():
    held = Numba().prepare(ragged(torch.Generator().manual_seed(10), [90, 60, 30, 20], sequences=2))

    assert held.splits(2, 6, None) is held.splits(2, 6, None)
    swapped = held.splits(2, 6, torch.tensor([1, 0]))
    assert swapped.tables["continuations"].tolist() == [1, 0]
    assert held.splits(2, 6, torch.tensor([1, 0])) is swapped
    assert held.held_bytes == swapped.held_bytes
    # A sequence without continuations is not read.
    splits = held.splits(1, 6, torch.tensor([1])).tables["splits"]
    assert int(splits[:, 0].min()) == 2
    assert int((splits[:, 2] - splits[:, 1]).sum()) == 50


def test_a_group_too_large_for_the_kernel_holds_nothing():
    prepared = Numba().prepare(ragged(torch.Generator().manual_seed(12), [90]))

    Numba().warm_up(prepared, 97)

    assert Numba().held_bytes(prepared) == 0


def _without_numba(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda x: None if x == "numba" else found(x))


def test_without_a_numba_that_works_torch_computes(monkeypatch, tmp_path):
    spec = AttentionSpec(CPU, torch.float32, 64)
    with monkeypatch.context() as change:
        change.setattr("numba.config.DISABLE_JIT", 1)
        assert Auto().resolve(spec) == Sdpa()
    (tmp_path / "numba.py").write_text("raise ImportError('Numba needs NumPy 2.5 or less')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "numba")
    with pytest.warns(UserWarning, match=r"cannot be imported .Numba needs NumPy"):
        assert Auto().resolve(spec) == Sdpa()
    with pytest.raises(MissingDependencyError, match=r"cannot be imported .Numba needs NumPy"):
        required("numba", "cpu")


def test_kernels_are_compiled_anew_where_their_folder_is_full():
    def compiler(cache):
        def made(function):
            if cache:
                raise OSError("No space left on device")
            return function

        return made

    compiled._warn.cache_clear()
    with pytest.warns(UserWarning, match="NUMBA_CACHE_DIR"):
        assert compiled.cached(compiler, len) is len


def test_auto_takes_it_on_the_cpu_and_says_why_where_not(monkeypatch):
    assert Auto().resolve(AttentionSpec(CPU, torch.float32, 64)) == Numba()
    assert Auto().resolve(AttentionSpec(CPU, torch.float64, 64)) == Sdpa()
    assert Auto().describe("cpu").startswith("auto -> numba on cpu: ")
    assert "Not" not in Auto().describe("cpu")

    _without_numba(monkeypatch)

    assert Auto().resolve(AttentionSpec(CPU, torch.float32, 64)) == Sdpa()
    line = Auto().describe("cpu")
    assert line.startswith("auto -> sdpa on cpu: ")
    assert "Not numba: numba is not installed. Run: pip install 'gracekv[cpu]'" in line


def test_it_is_refused_where_it_cannot_run(monkeypatch, threads):
    layer = ragged(torch.Generator().manual_seed(14), [9])
    doubled = replace(layer, keys=layer.keys.double(), values=layer.values.double())
    with pytest.raises(BackendUnavailableError, match=r"got torch.float64. Use backend 'sdpa'"):
        Numba().prepare(doubled)
    assert "the kernel is for CPUs" in Numba().obstacle(AttentionSpec(torch.device("meta")))
    threads(2)
    monkeypatch.setattr(compiled, "_parallel", lambda: None)
    with pytest.raises(BackendUnavailableError, match=r"Call torch.set_num_threads\(1\)"):
        Numba().prepare(layer)
    threads(1)
    Numba().prepare(layer)
    _without_numba(monkeypatch)
    with pytest.raises(BackendUnavailableError, match="numba is not installed"):
        Numba().prepare(layer)
