"""The generators of pages refuse what they cannot show."""

from dataclasses import dataclass

import pytest
from docs_tools import tool

from gracekv.pipeline.stages import REGISTRIES
from gracekv.recipes import RECIPES
from gracekv.registry import Strategy

equations = tool("equations")
tables = tool("strategy_tables")


def mathml(latex, block=True):
    return equations.to_mathml(latex, block=block)


def test_equations_replace_what_the_extension_marks():
    page = (
        '<p>a <span class="arithmatex">\\(x_i &lt; 1\\)</span></p>'
        '<div class="arithmatex">\\[\\sum_{i} x\\]</div><code>\\(y\\)</code>'
    )
    shown = equations.render(page)
    assert shown.count("<math") == 2
    assert '<div class="equation"><math' in shown
    assert "<code>\\(y\\)</code>" in shown
    assert 'alttext="x_i &lt; 1"' in shown


@pytest.mark.parametrize(
    "latex", [r"\nonsense x", r"\begin{matrix} a", r"\mathcal S", "a & b", r"\frac{a}"]
)
def test_an_equation_that_was_not_understood_is_refused(latex):
    with pytest.raises(equations.EquationError, match="Cannot render"):
        mathml(latex)


def test_every_strategy_is_in_its_table_and_described_below_it():
    for stage, registry in REGISTRIES.items():
        shown = tables.expand(f"# A page\n\n<!-- strategies: {stage} -->\n")
        for name in registry:
            assert f"[`{name}`](#" in shown
            assert f"heading: '{name}'" in shown
        # The paper's choice, and the default recipe's.
        assert shown.count(">paper</span>") == shown.count(">default</span>") == 1


def test_other_tables():
    shown = tables.expand("<!-- stages -->\n\n<!-- recipes: gracekv -->")
    assert all(f"[`{stage}`]" in shown for stage in REGISTRIES)
    ours = {name for name in RECIPES if name.startswith("gracekv")}
    assert ours == {name for name in RECIPES if f"| `{name}` |" in shown}


@pytest.mark.parametrize("marker", ["strategies: nothing", "strategies", "recipes: nothing"])
def test_a_marker_of_nothing_is_refused(marker):
    with pytest.raises(tables.TableError, match=r"nothing|''"):
        tables.expand(f"<!-- {marker} -->")


@pytest.mark.parametrize("missing", ["Source", "Cost"])
def test_a_strategy_without_source_or_cost_is_refused(missing):
    parts = {"Source": "Source: ours.", "Cost": "Cost: none."}
    del parts[missing]

    @dataclass(frozen=True)
    class Silent(Strategy):
        __doc__ = "Does it.\n\n" + parts.popitem()[1]

    with pytest.raises(tables.TableError, match=f"'{missing}:'"):
        tables.describe(Silent)
