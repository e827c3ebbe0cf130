"""`make results` on made-up parts: dirty trees, interrupts, failures, another commit, the plan."""

import importlib
import importlib.util
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    found = {name: importlib.import_module(name) for name in ("results_plan", "results_run")}
    # docs/tools has a module of the same name.
    spec = importlib.util.spec_from_file_location("measure_all", BENCHMARKS / "results.py")
    found["results"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found["results"])
    monkeypatch.setattr(found["results_run"].machine, "commit", lambda: "abc1234")
    monkeypatch.setattr(found["results_run"].machine, "changed", list)
    return found


@pytest.fixture
def made(modules, tmp_path):
    """A function that makes a run of parts: name and lines of Python, which know their folders."""
    results, rows = tmp_path / "results", tmp_path / "rows"
    results.mkdir()

    def run(*parts):
        found = []
        for name, code, *settings in parts:
            script = tmp_path / f"{name}.py"
            script.write_text(
                "import os, pathlib, sys, time\n"
                f"rows = pathlib.Path({str(rows)!r}) / {name!r}\n"
                f"page = pathlib.Path({str(results)!r}) / {name + '.md'!r}\n"
                f"{code}\n"
            )
            command = f"python {script}"
            part = modules["results_plan"].Part(name, f"About {name}?", 1, (command,), (name,))
            found.append(replace(part, **(settings[0] if settings else {})))
        return modules["results_run"].Run(found, results, rows, tmp_path)

    return run


WRITE = "page.write_text('# Page\\n\\n- machine: m\\n- commit: abc1234\\n')"
COUNT = "(rows.parent / 'runs.txt').open('a').write(rows.name + '\\n')"


def runs(run):
    path = run.rows / "runs.txt"
    return path.read_text().split() if path.exists() else []


def test_a_part_that_is_done_is_not_run_again(made):
    run = made(("a", f"{COUNT}\n{WRITE}"), ("b", f"{COUNT}\n{WRITE}"))
    run.all()
    state = run.all()
    assert runs(run) == ["a", "b"]
    assert {name: outcome.state for name, outcome in state.parts.items()} == dict.fromkeys(
        "ab", "done"
    )
    assert json.loads(run.state_file.read_text())["commit"] == "abc1234"


def test_one_that_fails_is_shown_and_the_others_go_on(made):
    run = made(
        ("a", f"{WRITE}\nprint('no room in', rows)\nsys.exit(3)"),
        ("b", "pass"),
        ("c", WRITE),
    )
    state = run.all()
    assert [outcome.state for outcome in state.parts.values()] == ["failed", "failed", "done"]
    page = (run.results / "a.md").read_text()
    assert page.startswith("# About a?\n\n- machine: ")
    assert "- commit: abc1234\n" in page
    assert "**Failed**, so there are no figures: status 3: no room in ROWS/a" in page
    assert "it wrote no b.md" in (run.results / "b.md").read_text()


def test_another_commit_begins_anew(made, modules, monkeypatch):
    run = made(("a", f"{COUNT}\n{WRITE}"), ("b", f"{COUNT}\nsys.exit(1)"))
    run.all()
    (run.rows / "a" / "row").write_text("old")
    (run.results / "b.png").write_text("old")
    monkeypatch.setattr(modules["results_run"].machine, "commit", lambda: "def5678")
    state = run.begin()
    assert state.commit == "def5678"
    assert not state.parts
    assert not run.rows.exists()
    # Nothing of the other commit is left to be shown.
    assert [path.name for path in run.results.iterdir()] == ["run.json"]
    run.all()
    assert runs(run) == ["a", "b"]


def test_a_dirty_tree_is_refused_by_name(modules, monkeypatch, tmp_path):
    check = modules["results"].check
    (tmp_path / "longbench").mkdir()
    known = tmp_path / "results"
    known.mkdir()
    assert check(str(tmp_path), known) == tmp_path
    monkeypatch.setattr(modules["results"].machine, "changed", lambda: ["gracekv/fit/base.py"])
    with pytest.raises(SystemExit, match=r"not as they were committed: gracekv/fit/base.py"):
        check(str(tmp_path), known)


def test_the_plan_takes_two_and_a_half_hours_and_its_commands_exist(modules):
    plan = modules["results_plan"]
    assert sum(part.minutes for part in plan.PARTS) <= plan.MOST_MINUTES == 150
    outputs = [name for part in plan.PARTS for name in part.outputs]
    assert len({*outputs, *plan.OUTSIDE}) == len(outputs) + len(plan.OUTSIDE)
    for part in plan.PARTS:
        commands = (*part.commands, *part.pages)
        # Two processes on two cores have one thread each.
        assert len(part.commands) <= 2
        for command in commands:
            for path in re.findall(r"benchmarks/\S+\.(?:py|yaml)", command):
                assert (ROOT / path).is_file(), path
        scripts = [
            path
            for command in commands
            for path in re.findall(r"benchmarks/\S+\.py", command)
            if "suite.py" not in path and "compare_runs.py" not in path
        ]
        for name in part.outputs:
            written = any(f"{name}.md" in (ROOT / path).read_text() for path in scripts)
            told = any(f"--name {name}" in c or f"--out {name}" in c or f"/{name}.md" in c
                       for c in commands)  # fmt: skip
            assert written or told, name


def test_every_published_file_is_an_output_of_a_part(modules):
    assert not modules["results"].strays(BENCHMARKS / "results")


def test_after_a_run_all_files_are_of_its_commit(modules):
    state = modules["results_run"].State.read(BENCHMARKS / "results" / "run.json")
    if state is None:
        pytest.skip("make results has not been run")
    plan = modules["results_plan"]
    for part in plan.PARTS:
        for name in part.outputs if part.name in state.parts else ():
            page = (BENCHMARKS / "results" / f"{name}.md").read_text(encoding="utf-8")
            assert re.findall(r"^- commit: (\S+)", page, re.MULTILINE) == [state.commit], name
