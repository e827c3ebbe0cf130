"""Elements of weights read by address, interpreted and in torch, against plain indexing."""

import hashlib

import pytest
import torch

from gracekv.prefill import fingerprint

DTYPES = (torch.bool, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("why_not", [None, "of no Triton"])
def test_the_sample_is_that_of_plain_indices(monkeypatch, why_not):
    monkeypatch.setattr(fingerprint, "obstacle", lambda *_: why_not)
    weights, expected = {}, hashlib.sha256()
    for number in range(60):
        shape = [(), (5,), (0, 4), (300, 200)][number % 4]
        weight = (torch.rand(shape) * 9).to(DTYPES[number % 5])
        if len(shape) == 2:
            weight = [weight, weight.mT, weight[1:, 3:]][number % 3]
        weights[f"w{number}"] = weight
        few = weight.flatten()[fingerprint.sample_places(f"w{number}", tuple(weight.shape))]
        expected.update(f"w{number} {list(weight.shape)} {weight.dtype} ".encode())
        expected.update(few.view(torch.uint8).numpy().tobytes())
    assert fingerprint.sampled_digest(weights.items()) == expected.hexdigest()[:16]
