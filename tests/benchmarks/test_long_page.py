"""The page of `make test-long`: folders and tests marked `long`, each with its own line."""

from types import SimpleNamespace

import pytest

from support.long_page import LongPage, part, runs_whole

ONE = ["tests/tree/test_a.py::test_one[3]", "tests/tree/test_a.py::test_one[4]"]
TWO, THREE = "tests/tree/test_a.py::test_two", "tests/cache/test_b.py::test_three"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "long.md"


def started(path, *ids):
    """A page of a run whose processes collected these."""
    page = LongPage(path)
    page.pytest_collection_finish(SimpleNamespace(items=[]))
    for _ in range(2):
        page.pytest_xdist_node_collection_finished(ids)
    return page


def ran(page, nodeid, outcome="passed", call=True):
    """A test that took 6 seconds, or 4 where it was not called."""
    for when in ("setup", "call", "teardown") if call else ("setup", "teardown"):
        page.pytest_runtest_logreport(
            SimpleNamespace(
                nodeid=nodeid,
                outcome=outcome if when == ("call" if call else "setup") else "passed",
                when=when,
                duration=2.0,
                keywords=("long",) if "test_one" in nodeid else (),
            )
        )


def cells(path):
    lines = path.read_text().splitlines() if path.exists() else []
    return [x.strip("| ").split(" | ")[:3] for x in lines if x.startswith("| tests/")]


def test_folders_and_long_tests_have_lines_and_a_new_run_replaces_its_own(path):
    page = started(path, *ONE, TWO, THREE)
    ran(page, ONE[0])
    ran(page, THREE, "skipped", call=False)
    ran(page, ONE[1], "failed")
    ran(page, TWO)
    page.pytest_sessionfinish(pytest.ExitCode.TESTS_FAILED)
    assert cells(path) == [
        [f"tests/cache{part()}", "1 skipped", "4"],
        [f"tests/tree{part()}", "1 failed, 2 passed", "18"],
        [f"tests/tree/test_a.py::test_one{part()}", "1 failed, 1 passed", "12"],
    ]
    ran(started(path, THREE), THREE)
    assert cells(path)[0][1] == "1 passed"
    assert len(cells(path)) == 3


def test_a_run_that_is_stopped_leaves_the_lines_of_whole_folders(path):
    page = started(path, *ONE, THREE)
    ran(page, ONE[0])
    ran(page, THREE)
    assert [line[0] for line in cells(path)] == [f"tests/cache{part()}"]
    page.pytest_sessionfinish(pytest.ExitCode.INTERRUPTED)
    assert len(cells(path)) == 1
    # A process that died reports no more, which ends no run.
    page.pytest_sessionfinish(pytest.ExitCode.TESTS_FAILED)
    assert cells(path)[1][1] == "1 passed"


def test_tests_of_one_process_are_counted_as_they_are_collected(path):
    page = LongPage(path)
    items = [SimpleNamespace(nodeid=x) for x in ONE]
    page.pytest_collection_finish(SimpleNamespace(items=items))
    ran(page, ONE[0])
    assert not cells(path)
    ran(page, ONE[1])
    assert len(cells(path)) == 2


@pytest.mark.parametrize(
    ("given", "args", "whole"),
    [
        ({}, ["tests/cache"], True),
        ({"keyword": "three"}, ["tests"], False),
        ({"collectonly": True}, ["tests"], False),
        ({}, [THREE], False),
    ],
)
def test_parts_of_files_have_no_lines(given, args, whole):
    option = SimpleNamespace(**{"keyword": "", "collectonly": False, **given})
    assert runs_whole(SimpleNamespace(option=option, args=args)) is whole
