"""Random inputs: a count of their outcomes, and its page.

Each test of `make test-long` that passes replaces its own line of the page.
"""

import time
from collections import Counter

from support.results_page import RESULTS, commit, replace_lines

HEAD = """# Fuzz: broken files, headers and rows, random pipelines, interrupts

- machine: {machine}
- commit: {commit}
- `make test-long`; these alone: `make test-long LONG=tests/fuzz`. Each test replaces its own \
line, which says of which commit.

| what | cases | outcomes | slowest, CPU seconds | minutes | commit |
|---|---:|---|---:|---:|---|
"""


class Tally:
    """Counts outcomes by kind, and the CPU seconds of the slowest case."""

    def __init__(self, name):
        self.name, self.outcomes, self.slowest, self.start = name, Counter(), 0.0, 0.0
        self.began = time.monotonic()

    def __enter__(self):
        self.start = time.process_time()
        return self

    def __exit__(self, *_):
        self.slowest = max(self.slowest, time.process_time() - self.start)

    def add(self, outcome):
        self.outcomes[outcome] += 1

    def counts(self):
        return ", ".join(f"{count:,} {name}" for name, count in sorted(self.outcomes.items()))

    def line(self, commit):
        """The test's line of the page."""
        what = self.name.removeprefix("test_").replace("_", " ")
        return (
            f"| {what} | {self.outcomes.total():,} | {self.counts()} | {self.slowest:.2f} | "
            f"{(time.monotonic() - self.began) / 60:.1f} | {commit} |"
        )


def write_line(tally):
    """Put the test's line on the page, replacing its earlier one."""
    replace_lines(RESULTS / "fuzz.md", HEAD, [tally.line(commit())])
