"""Link a package's dependencies into a new environment from another one on this machine.

    NEW/bin/python link_requirements.py gracekv[cli,cpu] OTHER/lib/python3.11/site-packages

Links the dependencies in the package's metadata, recursively, and nothing else. So a dependency
that the metadata lacks is missing here, as it would be after an installation from a registry, but a
gigabyte need not be installed again. Fails if the other environment does not meet a requirement.
"""

import sys
import sysconfig
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name


def needed(package: str, others: dict[str, Distribution]) -> dict[str, Distribution]:
    """{name: distribution} of all dependencies of `package`, given as "name[extra,...]"."""
    first = Requirement(package)
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [first]
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        own = name == canonicalize_name(first.name)
        if not own and name not in others:
            sys.exit(f"{wanted} is not in the other environment.")
        made = distribution(name) if own else others[name]
        if not wanted.specifier.contains(made.version, prereleases=True):
            sys.exit(f"{wanted} is asked for; the other environment has {made.version}.")
        if not own:
            found[name] = made
        for extra in {"", *wanted.extras} - {extra for known, extra in seen if known == name}:
            seen.add((name, extra))
            for line in made.requires or []:
                further = Requirement(line)
                if further.marker is None or further.marker.evaluate({"extra": extra}):
                    waiting.append(further)
    return found


def link(made: Distribution, target: Path) -> None:
    """Link the distribution's files in its site-packages."""
    for name in {file.parts[0] for file in made.files or []} - {"..", "__pycache__"}:
        place = target / name
        if not place.exists():
            place.symlink_to(Path(str(made.locate_file(name))).resolve())


def main() -> None:
    """Link, and print the number of packages."""
    package, other = sys.argv[1:]
    found = needed(package, {canonicalize_name(d.name): d for d in distributions(path=[other])})
    for made in found.values():
        link(made, Path(sysconfig.get_path("purelib")))
    print(f"{package} asks for {len(found)} packages: {', '.join(sorted(found))}")


if __name__ == "__main__":
    main()
