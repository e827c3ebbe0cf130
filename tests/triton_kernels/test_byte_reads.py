"""Elements of many tensors are read by their addresses."""

import torch

from gracekv.kernels.byte_reads_triton import bytes_at
from gracekv.prefill.fingerprint import addresses


def test_bytes_are_those_of_the_elements():
    tensors = [torch.randn(3, 700), torch.randn(900).bfloat16(), torch.arange(5, dtype=torch.uint8)]
    places = [torch.randperm(x.numel()) for x in tensors]
    pairs = list(zip(tensors, places, strict=True))
    got = bytes_at(torch.cat([addresses(x, at) for x, at in pairs]))
    want = torch.cat([x.flatten()[at].view(torch.uint8) for x, at in pairs])
    assert torch.equal(got, want)
