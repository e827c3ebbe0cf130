"""The modules of `docs/tools`, which mkdocs loads without installation."""

import importlib

import pytest
from page_blocks import ROOT


def tool(name):
    """Import one of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs" / "tools")
        return importlib.import_module(name)
