"""How `make results` runs its parts: one state file, and all figures from one commit.

The state, `benchmarks/results/run.json`, says for each part whether it is done or has failed. A
part that is done is not run again. A failed one is, and an interrupted one resumes from its rows if
it has any. At another commit than the state's, on another machine or with other versions,
everything starts over, and the files of the earlier run are deleted first.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import machine
from results_plan import Part

ROOT = Path(__file__).parents[1]
PAGE_MINUTES = 5
# Lets vLLM run on a CPU, without usage reports and without the hub.
_VLLM = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """The outcome of a part.

    Attributes:
        state: "done" or "failed".
        minutes: how long it took, over all its runs.
        load: the machine's load average at its start, including other work.
        why: the reason why it failed, or what is missing; "" if nothing is.
    """

    state: str
    minutes: float
    load: float
    why: str = ""


@dataclass
class State:
    """The state of a run.

    Attributes:
        commit: the commit that is measured.
        machine: where it runs.
        versions: versions of Python, torch and transformers.
        parts: outcomes of the parts that have ended, by name.
    """

    commit: str
    machine: str
    versions: str
    parts: dict[str, Outcome] = field(default_factory=dict)

    @classmethod
    def here(cls) -> State:
        """The state of a run that begins now."""
        return cls(machine.commit(), f"{machine.cpu()}, {machine.cores()}", machine.versions())

    @classmethod
    def read(cls, path: Path) -> State | None:
        """Read the file; None if there is no file."""
        if not path.is_file():
            return None
        found = json.loads(path.read_text(encoding="utf-8"))
        parts = {name: Outcome(**outcome) for name, outcome in found.pop("parts").items()}
        return cls(**found, parts=parts)

    def write(self, path: Path) -> None:
        """Write the file atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        made = path.with_suffix(".part")
        made.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        made.replace(path)


@dataclass(frozen=True)
class Run:
    """Parts and the folders that they use.

    Attributes:
        parts: in order of execution.
        results: folder of the pages and the state.
        rows: folder of rows and logs, which is not committed.
        data: folder of essays, questions and data sets.
        vllm: the Python of vLLM's environment.
    """

    parts: Sequence[Part]
    results: Path
    rows: Path
    data: Path
    vllm: Path = Path(".venv-vllm/bin/python")

    @property
    def state_file(self) -> Path:
        """Path of the state file."""
        return self.results / "run.json"

    def begin(self) -> State:
        """The state to resume from; a new one at another commit, machine or version of torch."""
        known, now = State.read(self.state_file), State.here()
        if known and replace(now, parts=known.parts) == known:
            return known
        shutil.rmtree(self.rows, ignore_errors=True)
        for part in self.parts:
            self._clear(part)
        now.write(self.state_file)
        return now

    def all(self) -> State:
        """Run the parts that are not done; a failed part does not end the run."""
        state = self.begin()
        for part in self.parts:
            before = state.parts.get(part.name)
            if before is not None and before.state == "done":
                continue
            print(f"{part.name}: {part.question} At most {part.minutes} minutes.", flush=True)
            outcome = self.one(part)
            spent = outcome.minutes + (before.minutes if before else 0)
            state.parts[part.name] = Outcome(
                outcome.state, round(spent, 1), outcome.load, outcome.why
            )
            state.write(self.state_file)
            print(f"{part.name}: {outcome.state}, {spent:.1f} minutes. {outcome.why}", flush=True)
        return state

    def one(self, part: Part) -> Outcome:
        """Measure a part and write its pages; if it fails, pages that say so."""
        self._clear(part)
        if not part.resumes:
            shutil.rmtree(self.rows / part.name, ignore_errors=True)
        (self.rows / part.name).mkdir(parents=True, exist_ok=True)
        start, load = time.monotonic(), round(os.getloadavg()[0], 2)
        why, short = self._measure(part)
        if not why:
            pages = (self._together(part, [page], PAGE_MINUTES) for page in part.pages)
            late = f"its page took more than {PAGE_MINUTES} minutes"
            why = next((found or late for found, over in pages if found or over), "")
        missing = [name for name in part.outputs if not (self.results / f"{name}.md").is_file()]
        if missing and not why:
            why = f"it wrote no {' and no '.join(f'{name}.md' for name in missing)}"
        minutes = (time.monotonic() - start) / 60
        if why:
            self._show_failure(part, why)
            return Outcome("failed", minutes, load, why)
        return Outcome("done", minutes, load, short)

    def _measure(self, part: Part) -> tuple[str, str]:
        """Why the part failed, and what it lacks; "" each if neither."""
        why, late = self._together(part, part.commands, part.minutes)
        if not late:
            return why, ""
        told = f"stopped after {part.minutes} minutes"
        return ("", f"{told}: fewer samples") if part.balanced else (told, "")

    def _together(self, part: Part, commands: Sequence[str], minutes: float) -> tuple[str, bool]:
        """Run commands in parallel: the first failure, and whether the time was over."""
        deadline = time.monotonic() + 60 * minutes
        # Cells that failed are in an evaluation's tables: status 1.
        fine = (0, 1) if commands[0].startswith("gracekv evaluate ") else (0,)
        running = []
        try:
            for number, command in enumerate(commands):
                log = self.rows / part.name / f"{number}-{Path(shlex.split(command)[1]).stem}.log"
                with log.open("wb") as file:
                    process = subprocess.Popen(
                        self._words(part, command), stdout=file, stderr=subprocess.STDOUT,
                        env=self._environment(part, len(commands)), cwd=ROOT,
                        start_new_session=True,
                    )  # fmt: skip
                running.append((process, log))
            for process, _ in running:
                process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            ends = [(process.poll(), log) for process, log in running]
            bad = (self._told(code, log) for code, log in ends if code not in (None, *fine))
            return (why := next(bad, "")), not why
        except OSError as error:
            return f"{type(error).__name__}: {error.strerror}", False
        finally:
            for process, _ in running:
                _end(process)
        ends = ((process.returncode, log) for process, log in running)
        return next((self._told(code, log) for code, log in ends if code not in fine), ""), False

    def _told(self, status: int, log: Path) -> str:
        """The status and the last printed line, without this machine's folders."""
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "nothing printed")
        for folder, name in ((self.rows, "ROWS"), (self.data, "FOLDER"), (ROOT, ".")):
            last = last.replace(str(folder), name)
        return f"status {status}: {last[:300]}"

    def _words(self, part: Part, command: str) -> list[str]:
        places = {"data": str(self.data), "rows": str(self.rows / part.name)}
        first, *rest = [word.format(**places) for word in shlex.split(command)]
        python = Path(sys.executable)
        programs = {"python": python, "gracekv": python.with_name("gracekv"),
                    "vllm-python": self.vllm}  # fmt: skip
        return [str(programs[first]), *rest]

    def _environment(self, part: Part, count: int) -> dict[str, str]:
        threads = 1 if count > 1 else part.threads
        own = {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
        return {**os.environ, **own, **(_VLLM if part.is_vllm else {})}

    def _clear(self, part: Part) -> None:
        """Delete what the part wrote before."""
        for name in part.outputs:
            for path in (self.results / f"{name}.md", self.results / f"{name}.png"):
                path.unlink(missing_ok=True)

    def _show_failure(self, part: Part, why: str) -> None:
        self._clear(part)
        here = State.here()
        for name in part.outputs:
            text = (
                f"# {part.question}\n\n- machine: {here.machine}\n- commit: {here.commit}\n\n"
                f"**Failed**, so there are no figures: {why}\n"
            )
            (self.results / f"{name}.md").write_text(text, encoding="utf-8")


def _end(process: subprocess.Popen[Any]) -> None:
    """Stop a process and all its children, if any of them still run."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            continue
    process.wait()
