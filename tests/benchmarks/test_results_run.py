"""Published files are made by parts of `make results`, at the commit that they name."""

import dataclasses
import importlib
import importlib.util
import re
from importlib.machinery import ModuleSpec
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
    return found


def test_every_published_file_is_an_output_of_a_part(modules):
    assert not modules["results"].strays(BENCHMARKS / "results")


def test_after_a_run_all_files_are_of_its_commit(modules):
    state = modules["results_run"].State.read(BENCHMARKS / "results" / "run.json")
    if state is None:
        pytest.skip("make results has not been run")
    for part in modules["results_plan"].PARTS:
        for name in part.outputs if part.name in state.parts else ():
            page = (BENCHMARKS / "results" / f"{name}.md").read_text(encoding="utf-8")
            assert re.findall(r"^- commit: (.+)$", page, re.MULTILINE) == [state.commit], name


@pytest.mark.parametrize("field", ["machine", "commit", "versions"])
def test_another_machine_begins_anew(modules, tmp_path, field):
    made = modules["results_run"]
    run, here = made.Run([], tmp_path, tmp_path / "rows", tmp_path), made.State.here()
    here.parts["decode"] = made.Outcome("done", 1.0, 0.0)
    here.write(run.state_file)
    assert run.begin().parts
    dataclasses.replace(here, **{field: "another"}).write(run.state_file)
    assert not run.begin().parts


def test_only_code_of_this_checkout_has_a_commit(modules, monkeypatch):
    machine = modules["results"].machine
    monkeypatch.setattr(machine, "_git", lambda *_: " M Makefile\n?? nohup.out\n?? tests/new.py\n")
    assert machine.changed() == ["Makefile", "tests/new.py"]
    monkeypatch.setattr("importlib.util.find_spec", lambda x: ModuleSpec(x, None, origin="/a/b/c"))
    with pytest.raises(SystemExit, match="imports gracekv from /a"):
        machine.commit()


def test_a_page_that_takes_too_long_is_a_failure(modules, tmp_path, monkeypatch):
    made = modules["results_run"]
    monkeypatch.setattr(made, "PAGE_MINUTES", 0.01)
    write = f"python -c \"open('{tmp_path}/p.md', 'w')\""
    slow = 'python -c "import time; time.sleep(9)"'
    part = modules["results_plan"].Part("p", "?", 1, (write,), ("p",), (slow,))
    outcome = made.Run([part], tmp_path, tmp_path / "rows", tmp_path).one(part)
    assert (outcome.state, outcome.why) == ("failed", "its page took more than 0.01 minutes")
