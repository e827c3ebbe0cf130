"""The tables of splits against loops, tile sizes, and the errors where kernels cannot run."""

import importlib.util

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gracekv.backends import AttentionSpec, Auto, Triton
from gracekv.backends.triton_splits import split_table, split_tables, tail_splits, uploaded
from gracekv.backends.triton_tiles import tiles
from gracekv.cache.base import RaggedEntries
from gracekv.errors import BackendUnavailableError
from gracekv.kernels import device as host


def layer_of(sequences, lengths):
    """Entries of one number, rows of these lengths."""
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    rows = torch.zeros(int(offsets[-1]), 1)
    return RaggedEntries(rows, rows, rows[:, 0].int(), rows[:, 0], offsets, sequences)


def by_loops(offsets, sequences, size, block):
    """Items sequence by sequence, longest first, and the slots of each head."""
    heads = (len(offsets) - 1) // sequences
    items, slots = [], []
    for s in range(sequences):
        mine, first = [], [0]
        for g in range(heads):
            start, end = offsets[s * heads + g : s * heads + g + 2]
            if end > start:
                count = -(-(end - start) // size)
                step = -(-(end - start) // count)
                step = -(-step // block) * block
                for begin in range(start, end, step):
                    mine.append([g, begin, min(step, end - begin), len(mine)])
            first.append(len(mine))
        items.append(sorted(mine, key=lambda item: -item[2]))
        slots.append(first)
    return items, slots


ROWS = st.integers(1, 3).flatmap(
    lambda s: st.tuples(
        st.just(s),
        st.integers(1, 4).flatmap(
            lambda g: st.lists(st.integers(0, 400), min_size=s * g, max_size=s * g)
        ),
    )
)


@given(rows=ROWS, size=st.integers(1, 6).map(lambda n: 16 * n), block=st.sampled_from([1, 16]))
def test_a_table_equals_loops(rows, size, block):
    sequences, lengths = rows
    layer = layer_of(sequences, lengths)
    items, slots = by_loops(layer.offsets.tolist(), sequences, size, block)

    table = split_table(layer, size, block)

    assert table.parts[0].items.tolist() == [item for mine in items for item in mine]
    assert table.row_first.tolist() == slots
    assert table.parts[0].item_first.diff().tolist() == [len(mine) for mine in items]
    assert table.slots == max(len(mine) for mine in items)


@given(rows=ROWS, processors=st.integers(1, 40))
def test_each_table_reads_every_entry_once_in_nearly_equal_splits(rows, processors):
    sequences, lengths = rows
    layer = layer_of(sequences, lengths)
    made = split_tables(layer, 16, processors, 1)
    for table in made.tables:
        read = [
            entry
            for _, first, length, _ in table.parts[0].items.tolist()
            for entry in range(first, first + length)
        ]
        assert sorted(read) == list(range(layer.entries))
        assert len(table.parts[0].items) <= processors + len(lengths)
    assert len(made.tables[-1].parts[0].items) == sum(length > 0 for length in lengths)
    sizes = [len(table.parts[0].items) for table in made.tables]
    assert sizes == sorted(sizes, reverse=True)
    # No split is longer than its fair share, rounded to steps, unless all processors have one.
    longest = max((int(item[2]) for item in made.tables[0].parts[0].items), default=0)
    assert longest <= layer.entries / (0.9 * processors) + 2 * 16


def test_more_readers_take_larger_splits():
    made = split_tables(layer_of(1, [5000]), 16, 32, 2)
    picked = [made.tables.index(made.for_readers(n)) for n in (1, 3, 4, 15, 16, 63, 64)]
    assert picked == [0, 0, 1, 1, 2, 2, 3]


@given(
    size=st.integers(0, 5000),
    readers=st.integers(1, 300),
    programs=st.integers(1, 300),
    block=st.sampled_from([16, 32, 64]),
)
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
    largest = sizes[-1]
    assert sizes == sorted(sizes)
    for rows, size in enumerate(sizes, start=1):
        assert size >= min(rows, largest)
        assert size == 16 or size / 2 < rows


def test_no_float32_tile_takes_hoppers_own_matrix_instructions():
    # From 64 rows and four warps on; Triton 3.6 lets them read beyond shared memory.
    assert all(tiles(dim, torch.float32, (9, 0), 999).queries < 64 for dim in (8, 64, 128, 256))


def layer_on(device):
    return RaggedEntries(
        torch.zeros(4, 8, device=device),
        torch.zeros(4, 8, device=device),
        torch.zeros(4, dtype=torch.int32, device=device),
        torch.zeros(4, device=device),
        torch.tensor([0, 4]),
    )


def test_without_triton_the_way_to_install_it_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendUnavailableError, match=r"pip install 'gracekv\[triton\]'"):
        Triton().prepare(layer_on("cpu"))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_off_the_gpu_it_is_refused(monkeypatch, device):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(BackendUnavailableError, match="run on NVIDIA GPUs"):
        Triton().prepare(layer_on(device))


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


def test_tables_of_all_layers_are_uploaded_together():
    made = [
        split_tables(layer_of(2, [70, 3, 0, 900]), 16, 8, 2),
        split_tables(layer_of(1, [5]), 16, 8, 2),
    ]
    for table, there in zip(made, uploaded(made, torch.device("cpu")), strict=True):
        tensors: list[list[torch.Tensor]] = [[], []]
        for found, one in zip(tensors, (table, there), strict=True):
            one.map(lambda x, found=found: found.append(x) or x)
        for x, y in zip(*tensors, strict=True):
            assert torch.equal(x, y)
            assert y.data_ptr() % 16 == 0
        assert repr(table.map(lambda x: 0)) == repr(there.map(lambda x: 0))
