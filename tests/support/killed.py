"""Processes that are killed (-9) in the middle of something."""

import itertools
import os
import signal
import sys

import torch

from support.covering import LONG


def killed_at_each_line(functions, work):
    """Run `work(n)` in forks that are killed at line n of some functions; yields n.

    n = 0, 1, ... in `make test-long`; daily every fifth, which is even and odd in turn.

    Ends after the first fork that finishes, which is yielded, too.

    Args:
        functions: their names; lines of all their calls are counted together.
        work: called with n, in the fork.
    """
    for at in itertools.count(0, 1 if LONG else 5):
        child = os.fork()
        if not child:
            _work_until(at, functions, work)
        status = os.waitpid(child, 0)[1]
        yield at
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            return


def _work_until(at, functions, work):
    seen = itertools.count()

    def line(frame, event, _):
        if event == "line" and next(seen) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return line

    try:
        # Threads of the parent are not in the fork.
        torch.set_num_threads(1)
        sys.settrace(lambda frame, *_: line if frame.f_code.co_name in functions else None)
        work(at)
        sys.settrace(None)
        os._exit(0)
    finally:
        os._exit(1)
