"""The package's metadata are consistent, and its requirements can be found."""

import re
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest
import yaml

from gracekv.files import VERSION
from support import link_requirements, lowest_versions

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def numbers(version):
    return [int(part) for part in re.findall(r"\d+", version)]


def test_one_version_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert VERSION == PROJECT["version"] == citation["version"]
    assert citation["license"] == PROJECT["license"]
    title = citation["title"].removeprefix("gracekv: ")
    assert title.casefold() in PROJECT["description"].casefold()
    assert f"## [{VERSION}] - " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def pins():
    """{package: version} of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


@pytest.mark.parametrize("extra", sorted(PROJECT["optional-dependencies"]))
def test_lowest_versions_are_at_most_the_pinned_ones(extra):
    found = {n: v for n, v in lowest_versions.lowest([extra]).items() if n in pins()}
    assert {"torch", "numpy"} <= found.keys()
    assert not {n: v for n, v in found.items() if numbers(v) > numbers(pins()[n])}


def test_hashed_requirements_are_the_pinned_ones_and_everything_but_torch():
    """`make hashes` makes them."""
    named = link_requirements.canonicalize_name
    text = (ROOT / "requirements-hashed.txt").read_text(encoding="utf-8")
    form = r"^([\w.-]+)==(\S+)((?:.*\\\n)(?:    --hash=sha256:\w{64}.*\n)+)"
    entries = re.findall(form, text, re.M)
    assert len(entries) == len(re.findall(r"^[^#\s]", text, re.M)), "an entry without hashes"
    hashed = {named(name): version for name, version, _ in entries}
    pinned = {named(name): version for name, version in pins().items()}
    assert {name: pinned[name] for name in hashed.keys() & pinned.keys()}.items() <= hashed.items()
    others = {named(made.metadata["Name"]): made for made in distributions()}
    others["torch"] = Made(pinned["torch"])  # its requirements come with it
    assert link_requirements.needed("gracekv[cli,cpu]", others).keys() - {"torch"} <= hashed.keys()


class Made:
    """A distribution that requires `requires`."""

    def __init__(self, version, *requires):
        self.version, self.requires = version, requires
