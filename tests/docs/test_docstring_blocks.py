"""Code in docstrings, which the site also shows, is executed after `preambles/docstrings.py`."""

import ast
import inspect
import re
import textwrap
from pathlib import Path

import pytest
from public_names import PACKAGE

PREAMBLE = Path(__file__).parent / "preambles" / "docstrings.py"
# Modules whose docstrings indent formulas like code.
FORMULAS = {
    "cache/cam.py", "cache/d2o.py", "fit/values.py", "prefill/spans.py", "kernels/rope.py",
    "segment/curvature.py", "tree/merge.py", "tree/prototype.py", "value/expected_attention.py",
}  # fmt: skip


def docstrings(path):
    """Every docstring of a file, with its first line number."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text is not None:
                yield node.body[0].lineno, inspect.cleandoc(text)


def indented(text):
    """The blocks of a docstring that are set off by a blank line and four spaces."""
    return [
        textwrap.dedent(found[1]).strip("\n")
        for found in re.finditer(r"\n\n((?: {4}.*\n*)+)", text + "\n")
        if not found[1].startswith(" " * 8)
    ]


def parses(code):
    try:
        ast.parse(code)
    except SyntaxError:
        return False
    return True


@pytest.fixture(scope="module")
def blocks():
    return [
        (f"{path.relative_to(PACKAGE).as_posix()}:{line}", block)
        for path in sorted(PACKAGE.rglob("*.py"))
        for line, text in docstrings(path)
        for block in indented(text)
    ]


def test_blocks_run(reader, blocks):
    import yaml

    names = {"__name__": "__main__"}
    exec(compile(PREAMBLE.read_text(), str(PREAMBLE), "exec"), names)
    (reader / "suite.yaml").write_text(yaml.safe_dump(names["suite"].to_dict()))
    for place, block in blocks:
        if place.partition(":")[0] not in FORMULAS:
            exec(compile(block, place, "exec"), dict(names))


def test_formulas_are_no_code(blocks):
    found = [(place.partition(":")[0], code) for place, code in blocks]
    assert not [place for place, code in found if place in FORMULAS and parses(code)]
    assert {place for place, _ in found} > FORMULAS
