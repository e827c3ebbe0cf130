"""Every public name is documented: shapes, units, errors and, for a method, its source."""

import ast
import re

import pytest
from public_names import (
    PACKAGE,
    classes_and_functions,
    exported,
    undocumented,
    without_errors,
    without_shapes,
)

from gracekv.pipeline.composition import REGISTRIES

STAGES = ("segment", "value", "tree", "allocate", "cache", "backends", "prefill")
SOURCE = re.compile(r"Eqs?\.|[Pp]aper|Source|\b[Oo]urs\b|arXiv|departures")


@pytest.fixture(scope="module")
def public():
    return classes_and_functions()


def test_every_name_has_a_docstring(public):
    assert not list(undocumented(*public))


def test_tensors_have_shapes(public):
    assert not list(without_shapes(*public))


def test_errors_are_named(public):
    assert not list(without_errors(public[1]))


@pytest.mark.parametrize("stage", REGISTRIES)
def test_strategies_name_source_and_cost(stage, strategy_tables):
    for name in REGISTRIES[stage]:
        assert strategy_tables.describe(REGISTRIES[stage].get(name)).cost


@pytest.mark.parametrize("stage", STAGES)
def test_exported_functions_name_their_source(stage):
    exports = set(exported(PACKAGE / stage / "__init__.py"))
    for path in (PACKAGE / stage).glob("*.py"):
        module = ast.parse(path.read_text(encoding="utf-8"))
        for node in module.body:
            if isinstance(node, ast.FunctionDef) and node.name in exports:
                said = f"{ast.get_docstring(node)} {ast.get_docstring(module)}"
                assert SOURCE.search(said), f"{path.name}: {node.name} names no source"
