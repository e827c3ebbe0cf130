"""The compiled kernel over contexts and pages equals the loops in float64, token by token."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("numba")

from gracekv.errors import ShapeError
from gracekv.testing.attention import TOLERANCES, relative_error
from gracekv.vllm.attention import DIVISION, PageLayout, attend, find_layout
from gracekv.vllm.context_attention import LayerCall
from gracekv.vllm.context_batch import Division, plan_batch
from gracekv.vllm.stored_context import StoredContext
from support import paged_reference as reference
from support.paged_contexts import paged_step

HEADS, GROUP, DIM, BLOCK = 2, 3, 16, 32
# Rows of a step: context or None, tokens of the sequence, how many of them are new.
ROWS = [("a", 70, 1), (None, 40, 40), ("b", 33, 33), ("a", 1, 1), ("b", 200, 90), (None, 9, 1)]


class Engine:
    """Pages that are filled in arbitrary order, as in engines."""

    def __init__(self, dtype, blocks=1):
        rng = torch.Generator().manual_seed(3)
        self.order = torch.randperm(2 * BLOCK * DIM, generator=rng).view(2, BLOCK, DIM)
        self.pages = torch.full((blocks, HEADS, BLOCK, 2 * DIM), torch.nan, dtype=dtype)

    def write(self, keys, values, pages, blocks=(0,)):
        flat = pages.view(len(pages), HEADS, -1)
        for i in range(len(keys)):
            block, slot = int(blocks[i // BLOCK]), i % BLOCK
            for part, rows in enumerate((keys, values)):
                for head in range(HEADS):
                    flat[block, head, self.order[part, slot]] = rows[i, head]


class Step:
    """A planned step over two contexts and pages in the engine's order."""

    def __init__(self, dtype, division):
        sizes = {"group": GROUP, "dim": DIM, "block": BLOCK, "dtype": dtype}
        self.made = made = paged_step(2, {"a": [1500, 0], "b": [7, 300]}, ROWS, **sizes)
        self.engine = engine = Engine(dtype, len(made.pages))
        for tail, blocks in zip(made.tails, made.metadata.block_table, strict=False):
            engine.write(*tail, engine.pages, blocks)
        self.batch = plan_batch(made.asking, made.metadata, GROUP, engine.pages, division)

    def attend(self):
        """The output of the tokens with a context."""
        made, engine, output = self.made, self.engine, torch.full_like(self.made.query, 7)
        page = torch.zeros_like(engine.pages[:1])
        call = LayerCall(None, made.query, engine.pages, made.metadata, output)
        attend(self.batch, 1, call, find_layout(engine.write, page), DIM**-0.5)
        return output[self.batch.places.tolist()]


DIVISIONS = [
    # One-token requests share units.
    (torch.float32, DIVISION, 2),
    (torch.bfloat16, DIVISION, 2),
    # Units that begin within a token; many parts, also of pages.
    (torch.float32, Division(8, 10**6, 1), 2),
    (torch.float32, Division(8, 40, 10**6), 125),
]


@pytest.mark.parametrize(("dtype", "division", "merged"), DIVISIONS, ids=str)
def test_equals_the_reference(dtype, division, merged):
    step = Step(dtype, division)
    made, batch, starts = step.made, step.batch, step.made.metadata.query_start_loc.tolist()
    assert batch.merged == merged
    assert not batch.covers_all
    got = step.attend()
    places, scale, seen = batch.places.tolist(), DIM**-0.5, set()
    for row, (name, _, _) in enumerate(ROWS):
        if name is None:
            continue
        mine = [i for i, t in enumerate(places) if starts[row] <= t < starts[row + 1]]
        assert [places[i] for i in mine] == list(range(starts[row], starts[row + 1]))
        seen |= set(mine)
        rows = made.query[starts[row] : starts[row + 1]]
        want = reference.attend(rows, made.contexts[name].layers[1], *made.tails[row], scale)
        assert relative_error(got[mine], want) < TOLERANCES[dtype], f"row {row}"
    assert seen == set(range(len(places)))


CHANGES = [
    ("work", lambda x: {"units": x.units.int()}),
    ("rows", lambda x: {"rows": x.rows[:-1]}),
    ("positions", lambda x: {"positions": x.positions.float()}),
    ("first_slot", lambda x: {"first_slot": x.first_slot[1:]}),
    ("contexts", lambda x: {"addresses": x.addresses.mT.contiguous()}),
    ("context", lambda x: {"contexts": tuple(map(in_bfloat16, x.contexts))}),
]


@pytest.mark.parametrize(("name", "change"), CHANGES)
def test_what_does_not_fit_is_named_before_the_kernel_reads_it(name, change):
    step = Step(torch.float32, DIVISION)
    step.batch = replace(step.batch, **change(step.batch))
    with pytest.raises(ShapeError, match=f"takes '{name}' as a contiguous tensor"):
        step.attend()


def in_bfloat16(context):
    made = (replace(x, keys=x.keys.bfloat16(), values=x.values.bfloat16()) for x in context.layers)
    return StoredContext.of(context.header, tuple(made))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_layout_is_found_by_writing(dtype):
    engine = Engine(dtype)
    layout = find_layout(engine.write, torch.zeros_like(engine.pages))
    assert isinstance(layout, PageLayout)
    assert torch.equal(layout.keys.long(), engine.order[0])
    assert torch.equal(layout.values.long(), engine.order[1])


def test_pages_that_lose_numbers_are_refused():
    page = torch.zeros(1, HEADS, BLOCK, 2 * DIM)

    def halves(keys, values, page):
        page.view(1, HEADS, 2, BLOCK, DIM)[0, :, 0] = keys.transpose(0, 1)

    with pytest.raises(ShapeError, match="quantised"):
        find_layout(halves, page)


def test_offsets_stay_on_the_cpu_when_a_context_moves():
    for layer in Step(torch.float32, DIVISION).made.contexts["a"].to(torch.device("meta")).layers:
        assert (layer.keys.device.type, layer.offsets.device.type) == ("meta", "cpu")
