"""Print pip constraints: each dependency in the lowest version that pyproject.toml allows.

python tests/support/lowest_versions.py [EXTRA ...]
"""

import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def lowest(extras: Iterable[str]) -> dict[str, str]:
    """{package: its lowest version}; a requirement without one is an error."""
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    waiting = [*project["dependencies"], *(f"gracekv[{extra}]" for extra in extras)]
    found: dict[str, str] = {}
    while waiting:
        wanted = Requirement(waiting.pop())
        if wanted.name == project["name"]:
            for extra in wanted.extras:
                waiting += project["optional-dependencies"][extra]
            continue
        if wanted.marker is None or wanted.marker.evaluate():
            [found[wanted.name]] = [s.version for s in wanted.specifier if s.operator == ">="]
    return found


if __name__ == "__main__":
    for name, version in sorted(lowest(sys.argv[1:]).items()):
        print(f"{name}=={version}")
