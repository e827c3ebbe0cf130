"""How many random inputs, and a count of their outcomes.

Few by default; `GRACEKV_FUZZ=full` for all (`make test-long`).
"""

import os
import time
from collections import Counter

FULL = os.environ.get("GRACEKV_FUZZ") == "full"


class Tally:
    """Counts outcomes by kind, and the CPU seconds of the slowest case."""

    def __init__(self, name):
        self.name, self.outcomes, self.slowest, self.start = name, Counter(), 0.0, 0.0

    def __enter__(self):
        self.start = time.process_time()
        return self

    def __exit__(self, *_):
        self.slowest = max(self.slowest, time.process_time() - self.start)

    def add(self, outcome):
        self.outcomes[outcome] += 1
