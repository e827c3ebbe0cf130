"""Reading ahead: how attention spreads."""

import torch

from gracekv.value.read_ahead import spread_ahead


def test_a_spike_spreads_forward_only():
    spike = torch.tensor([0.0, 0, 4, 0, 0, 0, 0])
    assert spread_ahead(spike, 2).tolist() == [0, 0, 2, 1, 0.5, 0.25, 0.125]
    assert spread_ahead(spike, 1) is spike
