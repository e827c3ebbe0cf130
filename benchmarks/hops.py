"""Prints the files that one reads to follow a recipe from `compress` to the packed cache.

    python benchmarks/hops.py [RECIPE [whole]]       # whole: read the full prompt first

Counts files of `gracekv` in which at least four lines inside functions run during the second
`gracekv.compress(model, prompt, ratio=8)` of a tiny model, until all layers are packed: nobody
needs to open a file for a property or a single check. Errors and registries, which all strategies
share, do not count.
"""

from __future__ import annotations

import sys
import warnings
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import gracekv
from gracekv.cache import Packer
from gracekv.testing.models import tiny_llama

HOME = Path(gracekv.__file__).parent
LEAST = 4  # lines
SHARED = ("errors.py", "registry", "hyperparameter.py", "plugins.py", "testing/")


def lines_run(recipe: str, *, whole: bool) -> dict[str, int]:
    """The number of lines that run in each file, by its path inside the package."""
    lines: dict[str, set[int]] = defaultdict(set)

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        packs = isinstance(frame.f_locals.get("self"), Packer) and code.co_name == "__call__"
        # When reading layer by layer, the packed layers are put together at the end.
        packs = packs or code.co_qualname == "Compression._pack"
        if event == "line":
            lines[code.co_filename].add(frame.f_lineno)
        elif event == "return" and packs:
            sys.settrace(None)
        return trace if code.co_filename.startswith(f"{HOME}/") else None

    ids = torch.randint(1, 97, (200,), generator=torch.Generator().manual_seed(0))
    prompt, model = gracekv.Prompt.from_ids(ids, (4, 180), question_end=196), tiny_llama()
    options = gracekv.CaptureOptions(stream=False if whole else None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # The first call imports and compiles.
        gracekv.compress(model, prompt, ratio=8, pipeline=recipe, capture=options)
        sys.settrace(trace)
        gracekv.compress(model, prompt, ratio=8, pipeline=recipe, capture=options)
    return {Path(name).relative_to(HOME).as_posix(): len(ran) for name, ran in lines.items()}


if __name__ == "__main__":
    recipe, *rest = [*sys.argv[1:], "gracekv-plus"][: max(1, len(sys.argv) - 1)]
    counts = lines_run(recipe, whole=rest == ["whole"])
    files = [name for name in sorted(counts) if counts[name] >= LEAST]
    files = [name for name in files if not name.startswith(SHARED)]
    print("\n".join([*files, f"{len(files)} files"]))
