"""Break each stage on purpose and see which tests notice: no test, but a tool for changing tests.

    python tests/mutations.py --out before.json
    python tests/mutations.py --out after.json --against before.json

Every mutation replaces one piece of a stage's code in a copy of the checkout, and runs the tests of
that stage. A mutation that no test notices, or that tests noticed before and do not now, ends the
run with status 1; so does one whose piece of code is gone, which then needs another.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
NOT_COPIED = (".git", ".venv*", "site", "results", "__pycache__", ".*_cache", ".hypothesis")


class Mutation(NamedTuple):
    """`old` becomes `new` wherever it stands, once, in `room` of gracekv; `tests` should fail."""

    room: str
    old: str
    new: str
    tests: str


MUTATIONS = [
    # Segments: variance of the steps; positions whose window does not fit.
    Mutation("segment", "inside - table / steps.clamp(min=1)", "inside", "segment"),
    Mutation("segment", "(position < length - window)", "(position <= length)", "segment"),
    # Values: one observer too many; half of a covariance; the query's own token.
    Mutation("value", "return spans.last(self.window)", "return spans.last(self.window + 1)",
             "value/test_window_attention.py"),
    Mutation("value", "0.5 * prefill.scale**2", "prefill.scale**2",
             "value/test_expected_attention.py"),
    Mutation("value", "rows[:count][-self.likely_layers :]", "rows[:count]",
             "value/test_replay.py"),
    Mutation("value", "torch.arange(run.start + 1, run.end + 1)",
             "torch.arange(run.start, run.end)",
             "value/test_column_sums.py"),
    # Trees: a probe's own token; operations that look dearer than they are.
    Mutation("tree", "[:, None] > probes[:masked]", "[:, None] >= probes[:masked]",
             "tree/test_prototype.py"),
    Mutation("tree", "count[is_split] - 1)", "count[is_split])", "tree/test_prune.py"),
    # Floor: relevance of a head alone, without the mean over heads.
    Mutation("allocate", "(1 - self.consensus) * relevance + self.consensus * mean",
             "relevance", "allocate/test_floors.py"),
    # Quotas: what is guaranteed beside the recent window; remainders to the smallest.
    Mutation("allocate", "guaranteed -= plan.recent", "guaranteed += 0",
             "allocate/test_adaptive_heads.py"),
    Mutation("allocate", "int(wanted[i]) - wanted[i]", "wanted[i] - int(wanted[i])",
             "allocate/test_shares.py"),
    # Auction: a quota that is not used up.
    Mutation("allocate", "self._per_head[self._head[i]] -= self._cost[i]", "pass",
             "allocate/test_allocators.py"),
    # Packing: multiplicities of merged entries; which dropped tokens merge.
    Mutation("cache", "packed.log_multiplicity[merged] = made.multiplicity.log()", "pass",
             "cache/test_packing.py"),
    Mutation("cache", "similarity.double() >= similarity.double().mean()",
             "similarity.double() <= similarity.double().mean()", "cache/test_d2o.py"),
    # Fit: the last token's mass.
    Mutation("fit", "entry_mass[last] = 1.0", "entry_mass[last] = 0.0", "fit"),
    # Precision: a scale below the largest number's; bytes that count as left.
    Mutation("precision", "/ levels, kind, up=True)", "/ levels, kind, up=False)",
             "precision/test_uniform_codes.py"),
    Mutation("precision", "left = budget - int(change[:bought].sum())", "left = budget",
             "precision/test_allocated_widths.py"),
    # Backends: multiplicities in the plain loop.
    Mutation("backends", "keys.float().T, step.softcap) + log_multiplicity",
             "keys.float().T, step.softcap)", "backends/test_against_dense.py"),
    # Rotations that are not pure.
    Mutation("kernels", "cos / norm, -sin / norm", "cos, -sin", "prefill/test_rope_variants.py"),
    # Serialization: a damaged header.
    Mutation("cache", "if hashlib.sha256(text", "if False and hashlib.sha256(text",
             "hf/test_saving.py"),
    # The model's attention: windows that do not cover the prompt.
    Mutation("hf", "window and seen > window and", "window and seen > 2 * window and",
             "hf/test_families.py hf/test_cache.py hf/test_decoding.py"),
    # Heads over processes: a mean of means.
    Mutation("allocate", "mean = shard.mean(relevance", "mean = shard.sum(relevance",
             "distributed/test_auction_over_processes.py"),
    # Fidelity: the divergence the other way round.
    Mutation("evaluate", "(theirs.exp() * (theirs - ours))", "(ours.exp() * (theirs - ours))",
             "evaluate/test_fidelity.py"),
    # Exported contexts: entries and header that do not belong together.
    Mutation("cache", "if digest not in (None, saved.digest):", "if False:",
             "vllm/test_context_store.py"),
]  # fmt: skip

# The same examples at every commit, and no search for smaller ones.
PLUGIN = """
from hypothesis import Phase, settings

def pytest_configure():
    phases = (Phase.explicit, Phase.generate)
    settings.register_profile("once", settings.get_profile("gracekv"), phases=phases,
                              derandomize=True, database=None)
    settings.load_profile("once")
"""


def failing(mutation: Mutation, checkout: Path) -> list[str] | None:
    """Test functions that fail with the mutation in `checkout`; None: its `old` is not there."""
    folder = checkout / "gracekv" / mutation.room
    places = [path for path in folder.rglob("*.py") if mutation.old in path.read_text()]
    if len(places) != 1:
        return None
    text = places[0].read_text()
    places[0].write_text(text.replace(mutation.old, mutation.new))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "once"]
    command += ["--maxfail=12", "-m", "not vllm and not long"]
    command += [f"tests/{name}" for name in mutation.tests.split()]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    run = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    places[0].write_text(text)
    if run.returncode not in (0, 1):
        raise SystemExit(f"{mutation}: pytest ended with {run.returncode}.\n{run.stdout[-2000:]}")
    return sorted(set(re.findall(r"^FAILED (?:tests/)?([^\s\[]+)", run.stdout, re.MULTILINE)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-k", default="", metavar="REGEX", help="mutations that it matches")
    parser.add_argument("--out", type=Path, default=Path("mutations.json"))
    parser.add_argument("--against", type=Path, metavar="FILE", help="what --out wrote before")
    args = parser.parse_args()
    before = json.loads(args.against.read_text()) if args.against else {}
    results, worse = {}, 0
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder) / "checkout"
        shutil.copytree(ROOT, checkout, ignore=shutil.ignore_patterns(*NOT_COPIED))
        (checkout / "once.py").write_text(PLUGIN)
        for mutation in (x for x in MUTATIONS if re.search(args.k, " ".join(x))):
            name = f"{mutation.room}: {mutation.new}"
            tests = failing(mutation, checkout)
            missed = set(before.get(name) or []) - set(tests or [])
            worse += not tests or bool(missed)
            results[name] = tests
            said = "GONE" if tests is None else ", ".join(tests) or "UNNOTICED"
            print(f"{name}\n    {said}", flush=True)
            if missed:
                print(f"    NO LONGER: {', '.join(sorted(missed))}", flush=True)
            args.out.write_text(json.dumps(results, indent=1) + "\n")
    sys.exit(worse > 0)


if __name__ == "__main__":
    main()
