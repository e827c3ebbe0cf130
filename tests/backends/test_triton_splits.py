"""The tables of splits against loops, tile sizes, and the errors if kernels cannot run."""

import importlib.util
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gracekv.backends import AttentionSpec, Auto, Triton
from gracekv.backends.triton_splits import split_tables, tables_of_sizes, tail_splits
from gracekv.backends.triton_tiles import tiles
from gracekv.cache.base import RaggedEntries
from gracekv.errors import BackendUnavailableError
from gracekv.kernels import device as host
from support.draws import ints, some
from support.quantised_layers import of_two_passages, quantised


def layer_of(sequences, lengths, device="cpu"):
    """A layer with rows of these lengths, one number per entry."""
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    rows = torch.zeros(int(offsets[-1]), 1, device=device)
    return RaggedEntries(rows, rows, rows[:, 0].int(), rows[:, 0], offsets, sequences)


def by_loops(parts, sequences, size, block):
    """Items of each part, sequence by sequence, longest first, and each head's slots."""
    heads = (len(parts[0].offsets) - 1) // sequences
    items = [[[] for _ in range(sequences)] for _ in parts]
    slots = [[0] for _ in range(sequences)]
    for row in range(sequences * heads):
        s, g = divmod(row, heads)
        slots[s].append(slots[s][-1])
        for every, part in zip(items, parts, strict=True):
            start, end = part.offsets[row : row + 2].tolist()
            step = -(-(end - start) // max(1, -(-(end - start) // size)))
            step = -(-step // block) * block
            for begin in range(start, end, step or 1):
                item = [g, begin, min(step, end - begin), slots[s][-1]]
                if part is not parts[0]:
                    item += [int(part.block_offsets[row]) * part.coding.group + begin - start]
                every[s].append(item)
                slots[s][-1] += 1
    return [[sorted(x, key=lambda item: -item[2]) for x in every] for every in items], slots


ROWS = ints(1, 3).flatmap(
    lambda s: st.tuples(
        st.just(s),
        ints(1, 4).flatmap(lambda g: st.lists(ints(0, 400), min_size=s * g, max_size=s * g)),
    )
)


@given(rows=ROWS, size=ints(1, 6).map(lambda n: 16 * n), block=some([1, 16]))
def test_tables_of_layers_with_and_without_codes_equal_loops(rows, size, block):
    sequences, lengths = rows
    rng = torch.Generator().manual_seed(size)
    coded, more = (quantised(rng, x, 8, torch.float32, sequences) for x in (lengths, lengths[::-1]))
    layers = [layer_of(sequences, lengths), of_two_passages(coded, more), coded]
    sizes, blocks = [[size, 400], [size + 16, 32], [16, size]], [block, 2 * block, block]
    made = tables_of_sizes(layers, sizes, blocks)
    for layer, own, step, tables in zip(layers, sizes, blocks, made, strict=True):
        for one, table in zip(own, tables.tables, strict=True):
            items, slots = by_loops((layer.exact, *layer.coded), sequences, one, step)
            assert table.row_first.tolist() == slots
            assert table.slots == max(first[-1] for first in slots)
            for found, part in zip(table.parts, items, strict=True):
                assert found.items.tolist() == [item for mine in part for item in mine]
                assert found.item_first.diff().tolist() == [len(mine) for mine in part]
                assert found.most == max(len(mine) for mine in part)
                assert found.items.data_ptr() % 16 == found.item_first.data_ptr() % 16 == 0


@given(rows=ROWS, processors=ints(1, 40))
def test_each_table_reads_every_entry_once_in_nearly_equal_splits(rows, processors):
    sequences, lengths = rows
    layer = layer_of(sequences, lengths)
    (made,) = split_tables([layer], [16], processors, 1)
    for table in made.tables:
        items = table.parts[0].items.tolist()
        read = [entry for _, first, n, _ in items for entry in range(first, first + n)]
        assert sorted(read) == list(range(layer.entries))
        assert len(items) <= processors + len(lengths)
    assert len(made.tables[-1].parts[0].items) == sum(length > 0 for length in lengths)
    sizes = [len(table.parts[0].items) for table in made.tables]
    assert sizes == sorted(sizes, reverse=True)
    # No split exceeds its fair share, rounded to steps, unless all processors have one.
    longest = max((int(item[2]) for item in made.tables[0].parts[0].items), default=0)
    assert longest <= layer.entries / (0.9 * processors) + 2 * 16


def test_more_readers_take_larger_splits():
    (made,) = split_tables([layer_of(1, [5000])], [16], 32, 2)
    picked = [made.tables.index(made.for_readers(n)) for n in (1, 3, 4, 15, 16, 63, 64)]
    assert picked == [0, 0, 1, 1, 2, 2, 3]


@given(size=ints(0, 5000), readers=ints(1, 300), programs=ints(1, 300), block=some([16, 32, 64]))
def test_tail_splits_cover_the_tail_and_are_not_tiny(size, readers, programs, block):
    splits, chunk = tail_splits(size, readers, programs, block)
    if size == 0:
        assert splits == 0
    else:
        assert (splits - 1) * chunk < size <= splits * chunk
        assert splits == 1 or (chunk >= 2 * block and splits * readers <= programs)


@pytest.mark.parametrize("dim", [8, 20, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_query_tile_is_the_smallest_that_holds_all_rows(dim, dtype):
    sizes = [tiles(dim, dtype, (9, 0), rows).queries for rows in range(1, 200)]
    assert sizes == sorted(sizes)
    for rows, size in enumerate(sizes, start=1):
        assert size >= min(rows, sizes[-1])
        assert size == 16 or size / 2 < rows


def test_no_float32_tile_takes_hoppers_own_matrix_instructions():
    # From 64 rows and four warps on; Triton 3.6 lets them read beyond shared memory.
    assert all(tiles(dim, torch.float32, (9, 0), 999).queries < 64 for dim in (8, 64, 128, 256))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("said", ["Failed to find C compiler.", "0 active drivers"])
def test_without_a_compiler_kernels_of_torch_run(monkeypatch, said):
    class Driver:
        @property
        def active(self):
            raise RuntimeError(said)

    monkeypatch.setattr("triton.runtime.driver", Driver())
    host._build_failure.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(host, "capability", lambda device: (9, 0))
    with warnings.catch_warnings(record=True) as warned:
        reason = host.obstacle(torch.device("cuda"), "backend 'sdpa'")
    host._build_failure.cache_clear()
    assert len(warned) == (0 if reason is None else 1)
    assert (reason or "").endswith("Python's headers. Or use backend 'sdpa'.") == ("C" in said)


def test_without_triton_the_way_to_install_it_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendUnavailableError, match=r"pip install 'gracekv\[triton\]'"):
        Triton().prepare(layer_of(1, [4]))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_off_the_gpu_it_is_refused(monkeypatch, device):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(BackendUnavailableError, match="run on NVIDIA GPUs"):
        Triton().prepare(layer_of(1, [4], device))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_an_old_gpu_and_a_missing_one_are_told_apart(monkeypatch):
    gpu = AttentionSpec(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch sees no CUDA GPU" in Triton().obstacle(gpu)
    assert "Not triton: torch sees no CUDA GPU" in Auto().describe("cuda")
    assert Auto().describe("cuda").startswith("auto -> sdpa on cuda: ")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(host, "capability", lambda device: (7, 5))
    assert "compute capability 7.5; the kernels need 8.0" in Triton().obstacle(gpu)
    assert Auto().resolve(gpu).name == "sdpa"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_auto_takes_it_where_it_can_read_the_cache(monkeypatch):
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(host, "capability", lambda device: (9, 0))
    assert Auto().describe(gpu).startswith("auto -> triton on cuda: ")
    assert Auto().resolve(AttentionSpec(gpu, torch.bfloat16, 128)).name == "triton"
    assert Auto().resolve(AttentionSpec(gpu, torch.float64, 128)).name == "sdpa"
    assert Auto().resolve(AttentionSpec(gpu, torch.bfloat16, 512)).name == "sdpa"
