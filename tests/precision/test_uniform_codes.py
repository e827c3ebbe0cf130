"""Quantised entries: within half a step, exact where groups are constant, inside ragged heads."""

import pytest
import torch
from hypothesis import given, settings

from gracekv.cache.base import RaggedCache, RaggedEntries
from gracekv.cache.coded import Coding
from gracekv.cache.quantised import QuantisedEntries
from gracekv.errors import ConfigError, NonFiniteError, ShapeError
from gracekv.kernels.ragged import offsets
from gracekv.pipeline import Pipeline
from gracekv.precision import PRECISIONS, UniformPrecision, reference
from gracekv.precision.quantise import blocks_of, coded
from gracekv.prefill import PromptSpans, Region
from support.draws import SEEDS, ints, lists, some
from support.quantised_layers import layer_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Error of a float32 sum, relative to the numbers' size.
ROUNDING = 3e-7


def stored(x, lengths, coding):
    """Quantised entries whose keys and values are both `x`."""
    index = torch.cat([torch.arange(n, dtype=torch.int32) for n in lengths.tolist()])
    entries = RaggedEntries(x, x, index, torch.zeros(len(x)), offsets(lengths))
    return coded(entries, blocks_of(lengths, coding.group), coding)


def read(x, lengths, coding, side):
    """All numbers of `x`, row after row, as backends dequantise them."""
    made, starts = stored(x, lengths, coding), offsets(lengths).tolist()
    rows = [made.numbers(*starts[row : row + 2]) for row in range(len(lengths))]
    return torch.cat([both[side == "values"] for both in rows])


@settings(max_examples=40)
@given(
    seed=SEEDS, lengths=lists(ints(0, 20), min_size=1, max_size=4), bits=some([2, 4, 8]),
    group=some([1, 2, 4, 7, 16]), side=some(["keys", "values"]), dtype=some(DTYPES),
    spread=some([0.0, 1e-3, 1.0, 300.0]), offset=some([0.0, 1.0, -37.3]),
)  # fmt: skip
def test_numbers_are_within_half_a_step(seed, lengths, bits, group, side, dtype, spread, offset):
    rng = torch.Generator().manual_seed(seed)
    lengths, dim = torch.tensor(lengths), 28 if group == 7 else 16
    x = (torch.randn(int(lengths.sum()), dim, generator=rng) * spread + offset).to(dtype)
    coding = Coding(bits, group)

    got = read(x, lengths, coding, side).double()

    want, steps = reference.rounded(x, lengths, coding, side)
    slack = ROUNDING * (x.double().abs() + 2**bits * steps)
    assert bool(((got - x.double()).abs() <= steps / 2 + slack + 6e-8).all())
    # Numbers halfway between two codes may take either.
    away = ((x.double() - want).abs() - steps / 2).abs() > 1e-3 * steps
    assert bool(((got - want).abs()[away] <= slack[away] + 6e-8).all())


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_byte_holds_channels_that_lie_its_bytes_apart_the_first_lowest(bits):
    rng, n = torch.Generator().manual_seed(bits), 2 * bits
    x = torch.randint(0, 2**bits, (3, 16), generator=rng).float()
    x[:, 0], x[:, 1] = 0, 2**bits - 1  # The codes are the numbers themselves.
    assert stored(x, torch.tensor([3]), Coding(bits, 16)).values.codes.tolist() == [
        [sum(int(row[j + n * part]) << bits * part for part in range(8 // bits)) for j in range(n)]
        for row in x
    ]


@settings(max_examples=30)
@given(
    seed=SEEDS,
    dtype=some(DTYPES),
    side=some(["keys", "values"]),
    bits=some([2, 4, 8]),
    size=some([1e-2, 1.0, 1e4]),
)
def test_constant_groups_are_exact(seed, dtype, side, bits, size):
    rng = torch.Generator().manual_seed(seed)
    lengths, coding = torch.tensor([7, 0, 4]), Coding(bits, 4)
    shape = (11, 1) if side == "values" else (1, 8)
    x = (torch.randn(shape, generator=rng) * size).to(dtype).expand(11, 8).contiguous()

    got = read(x, lengths, coding, side)

    if dtype == torch.float32:
        # Zero point and scale together hold 22 of a number's 24 bits.
        torch.testing.assert_close(got, x, rtol=3e-7, atol=6e-8)
    else:
        assert torch.equal(got.to(dtype), x)


def quantised(layer, **fields):
    cache = RaggedCache((layer,), 60, (0,) * layer.sequences)
    strategy = UniformPrecision(**{"group": 8, **fields})
    return strategy(cache, [strategy.widths(layer.positions, Region(3, 40))]).layers[0]


@settings(max_examples=15)
@given(
    seed=SEEDS,
    lengths=lists(ints(0, 50), min_size=4, max_size=4),
    bits=some([2, 4, 8]),
    dtype=some(DTYPES),
    sinks=ints(0, 6),
)
def test_only_the_region_changes_and_heads_do_not_meet(seed, lengths, bits, dtype, sinks):
    layer = layer_of(torch.Generator().manual_seed(seed), lengths, dtype=dtype, sequences=2)
    made = quantised(layer, bits=bits, sinks=sinks)
    for row in range(4):
        sequence, head = divmod(row, 2)
        want, got = layer.head(head, sequence), made.head(head, sequence)
        assert torch.equal(got[2], want[2])
        assert torch.equal(got[3], want[3])
        inside = (want[2] >= max(3, sinks)) & (want[2] < 40)
        assert torch.equal(got[0][~inside].to(dtype), want[0][~inside])
        assert torch.equal(got[1][~inside].to(dtype), want[1][~inside])
        # A head alone gives the same codes: its blocks hold no other head's entries.
        alone = quantised(layer.sequence(sequence), bits=bits, sinks=sinks)
        assert torch.equal(alone.head(head)[0], got[0])
        assert torch.equal(made.sequence(sequence).head(head)[1], got[1])
    rows, positions, _ = made.index()
    assert torch.equal(positions, layer.positions.long())
    assert torch.equal(torch.bincount(rows, minlength=4), layer.lengths)


def test_stacked_sequences_are_what_they_were():
    rng = torch.Generator().manual_seed(1)
    parts = [quantised(layer_of(rng, lengths)) for lengths in ([9, 30], [41, 0])]
    both = QuantisedEntries.stack(parts)
    for number, part in enumerate(parts):
        for head in range(2):
            torch.testing.assert_close(part.head(head), both.head(head, number), rtol=0, atol=0)
    assert both.kv_bytes == sum(part.kv_bytes for part in parts)
    other = quantised(layer_of(rng, [9, 30]), bits=4)
    with pytest.raises(ShapeError, match="equal codings"):
        QuantisedEntries.stack([parts[0], other])


def test_full_precision_is_the_cache_itself():
    layer = layer_of(torch.Generator().manual_seed(2), [9])
    cache = RaggedCache((layer,), 60)
    full = PRECISIONS.build("full")
    assert full(cache, [full.widths(layer.positions, Region(0, 9))]) is cache
    assert Pipeline.named("gracekv").precision == Pipeline.named("gracekv-plus").precision == full


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e6, -1e6])
def test_numbers_that_16_bits_cannot_hold_are_refused(bad):
    layer = layer_of(torch.Generator().manual_seed(3), [20])
    layer.keys[10, 3] = bad
    if bad == 1e6:  # Zero points are at the lower end.
        layer.keys[:, 3] = bad
    with pytest.raises(NonFiniteError, match="Use precision 'full'"):
        quantised(layer)


BAD_FIELDS = [
    ({"bits": 3}, 8, ConfigError, "bits takes one of 8, 4, 2; got 3"),
    ({"keys": "token"}, 8, ConfigError, "keys takes one of 'channel'; got 'token'"),
    ({"group": 6}, 16, ShapeError, r"Groups of 6 channels do not fit a head dimension of 16"),
    ({"bits": 4, "group": 5}, 5, ShapeError, "do not fill whole bytes"),
]


@pytest.mark.parametrize(("fields", "dim", "error", "message"), BAD_FIELDS)
def test_bad_fields_are_refused_before_anything_runs(fields, dim, error, message):
    with pytest.raises(error, match=message):
        PRECISIONS.build("uniform", **fields).entry_bytes(dim, 2, PromptSpans(4, 24, 30, 32))


def test_the_group_of_a_head_smaller_than_it_is_the_whole_entry():
    made = quantised(layer_of(torch.Generator().manual_seed(4), [20], dim=6), group=32)
    assert list(made.coded[0].values.scale.shape) == [16, 1]
