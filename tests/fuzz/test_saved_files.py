"""Broken saved caches are refused by name, fast, and in little memory."""

import resource
from random import Random

import pytest
import torch

import gracekv
from gracekv.errors import GracekvError
from gracekv.testing.models import tiny_llama
from support.fuzzing import FULL
from support.mutations import mutated_bytes, mutated_content, mutated_layout

FILES = 2000 if FULL else 120
SECONDS, MIB = 1.0, 200


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "good.gracekv"
    ids = torch.randint(97, (80,), generator=torch.Generator().manual_seed(0))
    prompt = gracekv.Prompt.from_ids(ids, (4, 70))
    gracekv.compress(model, prompt, ratio=2, backend="eager").save(path)
    return path


def test_broken_caches_are_refused(model, saved, tmp_path, tally):
    good = saved.read_bytes()
    want = gracekv.load(saved, model).generate_ids(3)
    path = tmp_path / "broken.gracekv"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in range(FILES):
        rng = Random(seed)
        mutate = (mutated_bytes, mutated_layout, mutated_content)[seed % 3]
        kind, data = mutate(good, rng)
        path.write_bytes(data)
        try:
            with tally:
                result = gracekv.load(path, model)
                ids = result.generate_ids(3)
        except GracekvError as error:
            tally.add("refused" if str(path) in str(error) else f"without its path: {error}")
            continue
        # What is still a whole cache of this model answers; unless its checksums were made
        # to fit, it is the file that was saved.
        assert ids.shape == want.shape, f"{seed} {kind}"
        if mutate is not mutated_content:
            assert torch.equal(ids, want), f"{seed} {kind}: loaded, and answers something else"
        tally.add("a whole cache" if data != good else "unchanged")
    assert set(tally.outcomes) <= {"refused", "a whole cache", "unchanged"}
    if FULL:
        # ru_maxrss is in KiB.
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        assert tally.slowest < SECONDS
        assert grown < MIB
