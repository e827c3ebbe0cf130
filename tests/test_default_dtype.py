"""Nothing depends on `torch.set_default_dtype` and `torch.set_default_device`."""

import ast
import itertools
from pathlib import Path

import pytest
import torch

import gracekv
from gracekv import recipes
from support.covering import every
from support.prompts import PROMPT

PACKAGE = Path(gracekv.__file__).parent
MAKERS = {"empty", "eye", "linspace", "logspace", "ones", "rand", "randn", "zeros"}


def makes_default(node):
    """Whether a call of torch creates a tensor with the default dtype."""
    function = node.func if isinstance(node, ast.Call) else None
    if not isinstance(function, ast.Attribute) or ast.unparse(function.value) != "torch":
        return False
    # Integers become int64 whatever the default is.
    fill = ast.walk(node.args[1]) if function.attr == "full" and len(node.args) > 1 else ()
    is_float = any(
        isinstance(getattr(part, "value", None), float)
        or isinstance(part, ast.Div)
        or getattr(part, "attr", "") in ("inf", "nan")
        for part in fill
    )
    named = any(keyword.arg in ("dtype", None) for keyword in node.keywords)
    return (function.attr in MAKERS or is_float) and not named


def test_tensors_are_made_with_a_dtype():
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if makes_default(node)
    ]
    assert not found, "Name the dtype:\n" + "\n".join(found)


def compressed(recipe):
    from gracekv.testing.models import tiny_llama

    model = tiny_llama()
    return lambda: gracekv.compress(model, PROMPT, ratio=4, pipeline=recipe)


def parts(result):
    layers = [layer.exact for layer in result.packed.layers]
    each = ((x.keys, x.values, x.positions, x.log_multiplicity) for x in layers)
    return [*itertools.chain(*each), result.generate_ids(3)]


def test_pages_cuts_and_closed_positions_lie_on_the_cpu_whatever_the_default(tmp_path):
    run = compressed("snapkv")
    with torch.device("meta"):
        result = run()
        result.report(tmp_path / "page.html")
        assert gracekv.report.token_statuses(result, 9)
    cuts = {"every": 8, "window": 4, "positions": "closed", "history": True}
    limit = gracekv.Limit(entries_per_head=60, **cuts)
    with torch.device("meta"):
        held = result.new_cache(limit)
    result.model.generate(**result.inputs, past_key_values=held, max_new_tokens=40, eos_token_id=-1)
    with torch.device("meta"):
        assert held.history.ids.device.type == "cpu"
        result.report(tmp_path / "page.html", cache=held)


# 1 / 5 has no exact value in any 16-bit dtype.
FIFTHS = gracekv.Pipeline.from_dict({"pack": {"name": "cam", "merge": 5}}, "cam")
CASES = [*itertools.product((FIFTHS, *recipes.names()), (torch.bfloat16, torch.float64))]


@pytest.mark.parametrize(("recipe", "dtype"), every(3, CASES))
def test_recipes_keep_the_same_under_every_default_dtype_and_device(recipe, dtype):
    run = compressed(recipe)
    wanted = parts(run())
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            result = run()
        got = parts(result)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)
