"""Random quantised layers for tests of backends."""

from dataclasses import replace
from typing import Any

import torch

from gracekv.cache.base import RaggedCache, RaggedEntries
from gracekv.cache.entries import CompressedCache
from gracekv.cache.quantised import QuantisedEntries, dequantised
from gracekv.kernels.ragged import offsets
from gracekv.pipeline import Pipeline
from gracekv.precision import AllocatedPrecision, UniformPrecision
from gracekv.prefill import Region

CODED = {
    name: replace(Pipeline.named("gracekv-agnostic"), precision=precision)
    for name, precision in {
        "allocated": AllocatedPrecision(group=8),
        "8 bits": UniformPrecision(group=8),
        "4 bits": UniformPrecision(bits=4, group=4, sinks=0),
    }.items()
}


def layer_of(
    rng: torch.Generator,
    lengths: list[int],
    dim: int = 8,
    dtype: torch.dtype = torch.float32,
    sequences: int = 1,
    device: str = "cpu",
) -> RaggedEntries:
    """Rows of `lengths` entries, each from position 0 on."""
    counts = torch.tensor(lengths)
    total = int(counts.sum())
    return RaggedEntries(
        keys=torch.randn(total, dim, generator=rng).to(device, dtype),
        values=torch.randn(total, dim, generator=rng).to(device, dtype),
        positions=torch.cat([torch.arange(n, dtype=torch.int32) for n in lengths]).to(device),
        log_multiplicity=(torch.rand(total, generator=rng) * 2).to(device),
        offsets=offsets(counts),
        sequences=sequences,
    )


def quantised(
    rng: torch.Generator,
    lengths: list[int],
    dim: int,
    dtype: torch.dtype,
    sequences: int,
    device: str = "cpu",
    stop: int = 60,
    **fields: Any,
) -> QuantisedEntries:
    """`layer_of`, of whose rows the first two entries and those from `stop` on stay as they are."""
    layer = layer_of(rng, lengths, dim, dtype, sequences, device)
    cache = RaggedCache((layer,), 1000, (0,) * sequences)
    strategy = UniformPrecision(**{"sinks": 2, **fields})
    found = strategy(cache, [strategy.widths(layer.positions, Region(0, stop))]).layers[0]
    assert isinstance(found, QuantisedEntries)
    return found


def of_mixed_widths(rng: torch.Generator, layer: QuantisedEntries, **more: Any) -> QuantisedEntries:
    """The entries of `layer`, each at 4, 8 or 16 bits by chance."""
    choice = torch.randint(0, 3, (int(layer.lengths.sum()),), generator=rng)
    widths = torch.tensor([4, 8, 16], dtype=torch.uint8)[choice].to(layer.device)
    plain = dequantised(CompressedCache((layer,), 1000, (0,) * layer.sequences))
    found = AllocatedPrecision(**more)(plain, [widths]).layers[0]
    assert isinstance(found, QuantisedEntries)
    return found


def of_two_passages(one: QuantisedEntries, other: QuantisedEntries) -> QuantisedEntries:
    """The exact entries of `one` and the codes of both, as after a passage: widths come twice."""
    coded = sorted([*one.coded, *other.coded], key=lambda part: -part.coding.bits)
    return QuantisedEntries(one.exact, tuple(coded))
