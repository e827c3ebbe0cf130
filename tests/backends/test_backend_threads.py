"""Threads that share one prepared layer never meet a half-built or missing result."""

import threading

import pytest
import torch

from gracekv.backends import AttentionStep, Eager, Numba, Sdpa
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
