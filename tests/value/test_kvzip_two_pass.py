"""KVzip's score: what it takes from the capture."""

import pytest
import torch

from gracekv.errors import MissingCaptureError
from gracekv.testing import synthetic_prefill
from gracekv.value import KVzipTwoPass
from gracekv.value.kvzip_two_pass import Reconstruction


def test_sinks_in_the_region_outrank_everything():
    prefill = synthetic_prefill(context=40, prefix=1)
    tokens = KVzipTwoPass()(prefill, prefill.spans.region(7)).scores
    assert bool((tokens[..., :3] > tokens[..., 3:].amax()).all())
    assert torch.equal(tokens[..., 3:], prefill.observation(Reconstruction())[..., 3:33])
    plain = KVzipTwoPass(sinks=0)(prefill, prefill.spans.region(7)).scores
    assert torch.equal(plain, prefill.observation(Reconstruction())[..., :33])


def test_needs_the_second_pass_and_says_so():
    assert KVzipTwoPass().needs().observers == {Reconstruction()}
    assert "second pass" in KVzipTwoPass.summary()
    prefill = synthetic_prefill().without(Reconstruction)
    with pytest.raises(MissingCaptureError, match="Reconstruction"):
        KVzipTwoPass()(prefill, prefill.spans.region(4))
