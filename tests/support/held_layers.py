"""Random layers as they are at a cut."""

import torch

from gracekv.decode import HeldLayer


def held_layer(
    seed, *, group=2, queries=5, packed=(9, 4), tail=6, number=0, softcap=None, sinks=False
):
    """A `HeldLayer` whose heads hold `packed` entries and `tail` tokens, the last one hidden."""
    rng, heads, dim = torch.Generator().manual_seed(seed), len(packed), 8

    def draw(*shape):
        return torch.randn(*shape, generator=rng)

    most = max(packed)
    mass = 0.3 * draw(heads, most + tail).abs()
    positions = torch.arange(most + tail).repeat(heads, 1)
    for g, count in enumerate(packed):
        mass[g, count:most] = -torch.inf
    mass[:, -1] = -torch.inf
    keys, values = (draw(heads, most + tail, dim) for _ in range(2))
    asked, moved = (draw(heads, group, queries, dim) for _ in range(2))
    states = keys, values, mass, positions, asked, moved, torch.zeros(heads, most + tail)
    sink_logits = draw(heads * group) if sinks else None
    return HeldLayer(number, *states, 5, most + tail - 1, softcap, sink_logits)
