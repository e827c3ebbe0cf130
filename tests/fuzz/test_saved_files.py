"""Broken saved caches raise named errors, fast and with little memory."""

import os
import threading
from pathlib import Path
from random import Random

import pytest
import safetensors
import torch

import gracekv
from gracekv.errors import GracekvError
from gracekv.testing.models import tiny_llama
from support.covering import LONG, cases
from support.mutations import mutated_bytes, mutated_content, mutated_layout
from support.prompts import random_prompt

FILES = cases(120, 2000)
SECONDS, MIB = 1.0, 200
SELF = Path("/proc/self")


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "good.gracekv"
    gracekv.compress(model, random_prompt(80), ratio=2, backend="eager").save(path)
    return path


def test_broken_caches_are_refused(model, saved, tmp_path, tally):
    good = saved.read_bytes()
    want = gracekv.load(saved, model).generate_ids(3)
    # Not timed: a file may name a backend whose kernel is compiled at first use.
    other_result(model, "auto")
    path = tmp_path / "broken.gracekv"
    if LONG:
        (SELF / "clear_refs").write_text("5")  # Reset the peak.
        before = peak()
    for seed in range(FILES):
        mutate = (mutated_bytes, mutated_layout, mutated_content)[seed % 3]
        kind, data = mutate(good, Random(seed))
        path.write_bytes(data)
        try:
            with tally:
                result = gracekv.load(path, model)
            ids = result.generate_ids(3)
        except GracekvError as error:
            tally.add("refused" if str(path) in str(error) else f"without its path: {error}")
            continue
        # A file that is still a valid cache of this model answers; unless its checksums were
        # forged, it is the file that was saved.
        assert ids.shape == want.shape, f"{seed} {kind}"
        if mutate is not mutated_content:
            assert torch.equal(ids, want), f"{seed} {kind}: loaded, and answers something else"
        tally.add("a whole cache" if data != good else "unchanged")
    assert set(tally.outcomes) <= {"refused", "a whole cache", "unchanged"}
    if LONG:
        assert tally.slowest < SECONDS
        assert peak() - before < MIB


def peak():
    """Peak MiB of resident memory since "5" was written to clear_refs."""
    return int((SELF / "status").read_text().partition("VmHWM:")[2].split()[0]) / 1024


def other_result(model, backend="eager"):
    return gracekv.compress(model, random_prompt(80, seed=1), ratio=2, backend=backend)


@pytest.mark.parametrize("damage", ["another file", "truncated", "noise"])
def test_what_becomes_of_a_file_does_not_change_what_was_loaded(model, saved, tmp_path, damage):
    path = tmp_path / "live.gracekv"
    path.write_bytes(saved.read_bytes())
    loaded = gracekv.load(path, model)
    before = [x.clone() for layer in loaded.packed.layers for x in layer.tensors().values()]
    want = loaded.generate_ids(3)
    # In place, as with `cp`: a memory-mapped file would change with it.
    if damage == "another file":
        other_result(model).save(tmp_path / "other.gracekv")
        path.write_bytes((tmp_path / "other.gracekv").read_bytes())
    elif damage == "noise":
        path.write_bytes(Random(0).randbytes(path.stat().st_size))
    else:
        os.truncate(path, 0)
    after = [x for layer in loaded.packed.layers for x in layer.tensors().values()]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    assert torch.equal(loaded.generate_ids(3), want)


def test_a_file_that_is_replaced_while_opened_is_opened_again(model, saved, tmp_path, monkeypatch):
    path, other = tmp_path / "shared.gracekv", other_result(model)
    gracekv.load(saved, model).save(path)
    opened, new = safetensors.safe_open, [other]

    def replaced(*args):
        found = opened(*args)
        if new:
            new.pop().save(path)
        return found

    monkeypatch.setattr(safetensors, "safe_open", replaced)
    assert torch.equal(gracekv.load(path, model).prompt.ids, other.prompt.ids)


def test_a_file_that_others_save_to_is_one_of_theirs(model, saved, tmp_path):
    path = tmp_path / "shared.gracekv"
    results = [gracekv.load(saved, model), other_result(model)]
    ids = [result.prompt.ids for result in results]
    results[0].save(path)
    done, failed = threading.Event(), []

    def keep_saving(result):
        while not done.is_set():
            try:
                result.save(path)
            except Exception as error:
                failed.append(error)
                raise

    savers = [threading.Thread(target=keep_saving, args=(result,)) for result in results]
    for saver in savers:
        saver.start()
    try:
        for _ in range(200 if LONG else 30):
            loaded = gracekv.load(path, model)
            assert any(torch.equal(loaded.prompt.ids, own) for own in ids)
    finally:
        done.set()
        for saver in savers:
            saver.join()
    assert not failed
    assert [x.name for x in tmp_path.iterdir()] == [path.name]
