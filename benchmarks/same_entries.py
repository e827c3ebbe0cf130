"""Do all recipes keep the same entries as at another commit?

    python benchmarks/same_entries.py --out before.json                # at one commit
    python benchmarks/same_entries.py --out after.json --against before.json   # at another

Compresses a page of the demo's chapter on the embedded model, with a question at 4x and without one
at 16x, and random ids on three small random-weight models (grouped heads; logit softcapping; sinks)
at both ratios, with every recipe. Each result is saved: the file's integer tensors say which tokens
every head kept, its other tensors are the entries. Compare runs on one machine with the same number
of threads, where both should be identical; elsewhere sums round differently, and ties may break
differently. Exits with status 1 if any recipe keeps other entries.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import resource
import subprocess
import sys
import tempfile
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import machine
import torch
from safetensors.torch import load_file

import gracekv
from gracekv import Prompt, recipes
from gracekv.errors import GracekvError, MissingCaptureError
from gracekv.hf.smollm2 import load_smollm2
from gracekv.testing.models import tiny_model

QUESTION = "What does Alice find on the little table?"
TOKENS = 800
# For the prompts with and without a question: one ratio each, since the model is slow.
RATIOS = {"asked": (4,), "unasked": (16,)}
# Evenly spaced elements of a tensor that are saved to find the largest difference.
SAMPLES = 256


def cases() -> dict[str, tuple[Any, Prompt]]:
    """Model and prompt of each case; a recipe that needs a question refuses the second."""
    model, tokenizer = load_smollm2()
    chapter = files("gracekv.data").joinpath("alice_chapter_1.txt").read_text(encoding="utf-8")
    context = tokenizer.decode(tokenizer(chapter)["input_ids"][:TOKENS])
    made = {
        "asked": (model, Prompt.from_chat(tokenizer, context=context, question=QUESTION)),
        "unasked": (model, Prompt.from_chat(tokenizer, context=context)),
    }
    ids = torch.randint(97, (400,), generator=torch.Generator().manual_seed(0))
    for family in ("qwen3", "gemma2", "gpt_oss"):
        small = tiny_model(family, layers=4, heads=6, kv_heads=2, attention="eager")
        made[family] = (small, Prompt.from_ids(ids, context=(4, 370), question_end=395))
    return made


def kept(result: Any) -> dict[str, dict[str, Any]]:
    """For every tensor of the saved result: shape, digest, and samples of floats."""
    with tempfile.TemporaryDirectory() as folder:
        result.save(Path(folder) / "result")
        tensors = load_file(Path(folder) / "result")
    facts = {}
    for name, tensor in sorted(tensors.items()):
        fact: dict[str, Any] = {"shape": list(tensor.shape)}
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        fact["sha"] = hashlib.sha256(data).hexdigest()[:12]
        if tensor.is_floating_point():
            flat = tensor.view(-1).double()
            fact["samples"] = flat[:: max(1, len(flat) // SAMPLES)].tolist()
        facts[name] = fact
    return facts


def compressed(model: Any, prompt: Prompt, ratio: float, name: str, shared: Any) -> Any:
    """The result, from the `shared` prefill if that holds what the recipe needs."""
    try:
        return gracekv.compress(model, prompt, ratio=ratio, pipeline=name, prefill=shared)
    except MissingCaptureError:
        return gracekv.compress(model, prompt, ratio=ratio, pipeline=name)


def measured(names: list[str], *, fresh: bool) -> dict[str, dict[str, Any]]:
    """By "recipe case ratio": tensors and seconds, or the error's type.

    Rows have their own prefill on small models, and if `fresh`.
    """
    rows = {}
    for case, (model, prompt) in cases().items():
        shared = None if fresh or case not in RATIOS else gracekv.capture(model, prompt)
        for name in names:
            for ratio in RATIOS.get(case, (4, 16)):
                start = time.perf_counter()
                try:
                    result = compressed(model, prompt, ratio, name, shared)
                except GracekvError as error:
                    row: dict[str, Any] = {"error": type(error).__name__}
                else:
                    row = {"seconds": time.perf_counter() - start, "tensors": kept(result)}
                rows[f"{name} {case} {ratio}x"] = row
    return rows


def difference(before: dict[str, Any], after: dict[str, Any]) -> str:
    """What changed between two rows; "" if they are bitwise equal."""
    if "error" in before or "error" in after:
        errors = [row.get("error", "none") for row in (before, after)]
        return "" if errors[0] == errors[1] else f"error {errors[0]} -> {errors[1]}"
    old, new = before["tensors"], after["tensors"]
    changed = [name for name in old if old[name]["sha"] != new.get(name, {}).get("sha")]
    chosen = [name for name in changed if "samples" not in old[name] or name not in new]
    chosen += [x for x in changed if x in new and old[x]["shape"] != new[x]["shape"]]
    if chosen or len(new) != len(old):
        return f"OTHER ENTRIES: {len(chosen)} tensors, such as {[*chosen, *new][0]}"
    pairs = [(old[name]["samples"], new[name]["samples"]) for name in changed]
    largest = max((abs(a - b) for x, y in pairs for a, b in zip(x, y, strict=True)), default=0.0)
    return f"values of {len(changed)} tensors, by at most {largest:.1e}" if changed else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-k", default="", metavar="REGEX", help="recipes whose name it matches")
    parser.add_argument("--out", type=Path, default=Path("same_entries.json"))
    parser.add_argument("--against", type=Path, metavar="FILE", help="what --out wrote elsewhere")
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="one process per recipe, with its own prefill, for seconds and peaks; minutes",
    )
    args = parser.parse_args()
    names = [name for name in recipes.names() if re.search(args.k, name)]
    if not names:
        raise SystemExit(f"No recipe's name matches {args.k!r}.")
    old = json.loads(args.against.read_text())["rows"] if args.against else {}
    page: dict[str, Any] = {"commit": machine.commit(), "machine": machine.threads(), "rows": {}}
    if args.fresh and len(names) > 1:
        for name in names:
            command = [sys.executable, __file__, "-k", f"^{name}$", "--out", str(args.out)]
            command += ["--fresh"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            page["rows"] |= json.loads(args.out.read_text())["rows"]
    else:
        page["rows"] = measured(names, fresh=args.fresh)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        page["rows"] = {key: {**row, "mib": peak} for key, row in page["rows"].items()}
    args.out.write_text(json.dumps(page) + "\n")
    changed = 0
    for key, row in page["rows"].items():
        said = difference(old[key], row) or "same" if key in old else "not compared"
        before = old.get(key, {"seconds": 0, "mib": 0})
        times = f"{before.get('seconds', 0):5.2f} -> {row.get('seconds', 0):5.2f} s"
        print(f"{key:42} {times}, {before['mib']:5,.0f} -> {row['mib']:5,.0f} MiB: {said}")
        changed += said.startswith(("OTHER", "error"))
    sys.exit(changed > 0)


if __name__ == "__main__":
    main()
