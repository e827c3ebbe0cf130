"""Hooks that mkdocs runs when it builds the site: equations, strategy tables, the changelog."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import equations
import strategy_tables
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the changelog, which lives at the top of the repository."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "changelog.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Replace markers by the generated tables."""
    try:
        return strategy_tables.expand(markdown)
    except strategy_tables.TableError as error:
        raise PluginError(f"{page.file.src_path}: {error}") from error


def on_page_content(html: str, page: Page, **_: Any) -> str:
    """Convert equations to MathML."""
    try:
        return equations.render(html)
    except equations.EquationError as error:
        raise PluginError(f"{page.file.src_path}: {error}") from error
