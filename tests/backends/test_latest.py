"""Threads that share one prepared layer never meet a half-built or missing result."""

import threading
import time

import pytest
import torch

from gracekv.backends import AttentionStep, Eager, Numba, Sdpa
from gracekv.backends.split_kv import Latest
from gracekv.testing.attention import attention_problem


def in_threads(*works):
    """Run the functions at once; the errors that they raise."""
    errors = []

    def guarded(work):
        try:
            work()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


class Key:
    """A key whose every comparison lets another thread run."""

    def __init__(self, number):
        self.number = number

    def __eq__(self, other):
        time.sleep(0)
        return self.number == other.number

    def __hash__(self):
        time.sleep(0)
        return hash(self.number)


def test_two_threads_with_other_keys_get_their_own_values():
    latest = Latest()

    def ask(number):
        for _ in range(1000):
            assert latest.get(Key(number), lambda: [number] * 3) == [number] * 3

    assert not in_threads(lambda: ask(1), lambda: ask(2))


def test_a_value_is_built_once_and_not_seen_before_it_is_complete():
    latest, built = Latest(), []

    def build():
        built.append(1)
        parts = []
        for part in range(5):
            parts.append(part)
            time.sleep(0.005)
        return parts

    def ask():
        assert latest.get(1, build) == [0, 1, 2, 3, 4]

    assert not in_threads(*[ask] * 4)
    assert len(built) == 1


@pytest.mark.parametrize("backend", [Numba(), Sdpa()], ids=repr)
def test_two_threads_decode_batches_of_two_sizes_over_one_layer(backend):
    layer = attention_problem(0, [60, 33], dim=8).packed
    prepared = backend.prepare(layer)
    problems = [attention_problem(batch, [60, 33], dim=8, batch=batch, tail=3) for batch in (1, 2)]

    def ask(p):
        want = Eager()(AttentionStep(p.query, layer, p.keys, p.values, p.scale))
        for _ in range(60):
            output = backend(AttentionStep(p.query, prepared, p.keys, p.values, p.scale))
            torch.testing.assert_close(output, want, rtol=1e-5, atol=1e-5)

    assert not in_threads(*(lambda p=p: ask(p) for p in problems))
