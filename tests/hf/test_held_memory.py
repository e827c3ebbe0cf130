"""A result keeps its cache alive, what a report shows, and nothing else of the compression."""

import gc

import pytest
import torch

import gracekv
from gracekv import Prompt
from gracekv.testing.models import tiny_llama
from support.stored_bytes import storages


def live():
    """The memory of every tensor that is alive."""
    gc.collect()
    # By type: isinstance asks the object itself, and a weak proxy of a dead object raises. Fake
    # tensors of torch.compile are a class of their own and have no memory.
    plain = torch.Tensor, torch.nn.Parameter
    tensors = (x for x in gc.get_objects() if type(x) in plain)
    # What torch.compile of other tests has left behind has no memory.
    functional = torch._is_functional_tensor
    return storages(x for x in tensors if x.device.type != "meta" and not functional(x))


@pytest.mark.parametrize(
    ("recipe", "rows"),
    [
        ("gracekv-plus", 1), ("gracekv-plus", 2), ("gracekv", 2), ("snapkv", 1), ("cam", 2),
        ("fullkv", 1),
    ],
)  # fmt: skip
def test_nothing_else_stays_alive(recipe, rows):
    model = tiny_llama(layers=3)
    prompts = [Prompt.from_ids(torch.arange(400 + 9 * row) % 90, (10, 380)) for row in range(rows)]
    given = prompts[0] if rows == 1 else prompts
    # What is computed once per process is there after the first call.
    gracekv.compress(model, given, ratio=8, pipeline=recipe, backend="eager")
    before = live()
    result = gracekv.compress(model, given, ratio=8, pipeline=recipe, backend="eager")
    new = {place: size for place, size in live().items() if place not in before}
    assert result.details is None
    held = result.accounting.held_bytes
    assert set(held) == {"cpu"}
    ids = sum(prompt.ids.untyped_storage().nbytes() for prompt in prompts)
    assert sum(new.values()) == held["cpu"] - ids
    counted = result.accounting
    # A byte for each token and head, 240 points of a curve, and slots and merged entries.
    tokens = sum(prompt.spans.context_length for prompt in prompts)
    heads = len(result.accountings[0].entries.flatten())
    rest = held["cpu"] - ids - counted.bytes - counted.metadata_bytes - counted.backend_bytes
    assert rest <= tokens * heads + rows * (16 * 260 + 8 * heads) + 12 * counted.spent + 4 * tokens


@pytest.mark.parametrize("recipe", ["gracekv-plus", "gracekv", "snapkv", "chunkkv"])
def test_reports_are_the_same_with_and_without_details(recipe):
    prompt = Prompt.from_ids(torch.arange(300) % 90, context=(10, 280))
    model = tiny_llama(layers=3)
    slim, whole = (
        gracekv.report.ReportData.of(
            {"x": gracekv.compress(model, prompt, ratio=4, pipeline=recipe, keep_run=keep_run)}
        ).columns[0]
        for keep_run in (False, True)
    )
    for name in ("start", "end", "multiplicity", "depth", "floor", "offsets"):
        assert torch.equal(getattr(slim.entries, name), getattr(whole.entries, name))
    assert torch.equal(slim.relevance.codes, whole.relevance.codes)
    assert torch.equal(slim.curve.utility, whole.curve.utility)
