"""The page of `make test-long`: folders and tests marked `long`, each with its own line."""

from types import SimpleNamespace

from support.long_page import LongPage, part


def session(*args, keyword=""):
    option = SimpleNamespace(keyword=keyword)
    return SimpleNamespace(config=SimpleNamespace(option=option, args=args))


def ran(page, nodeid, outcome="passed", when="call", seconds=2.0, keywords=()):
    page.pytest_runtest_logreport(
        SimpleNamespace(
            nodeid=nodeid, outcome=outcome, when=when, duration=seconds, keywords=keywords
        )
    )


def test_folders_and_long_tests_have_lines_and_a_new_run_replaces_its_own(tmp_path):
    path = tmp_path / "long.md"
    page = LongPage(path)
    for when in ("setup", "call", "teardown"):
        ran(page, "tests/tree/test_a.py::test_one[3]", when=when, keywords=("long",))
    ran(page, "tests/tree/test_a.py::test_one[4]", "failed", keywords=("long",))
    ran(page, "tests/tree/test_a.py::test_two")
    ran(page, "tests/cache/test_b.py::test_three", "skipped", when="setup", seconds=0.1)
    page.pytest_sessionfinish(session("tests"))

    def cells():
        lines = [line for line in path.read_text().splitlines() if line.startswith("| tests/")]
        return [line.strip("| ").split(" | ")[:3] for line in lines]

    assert cells() == [
        [f"tests/cache{part()}", "1 skipped", "0"],
        [f"tests/tree{part()}", "1 failed, 2 passed", "10"],
        [f"tests/tree/test_a.py::test_one{part()}", "1 failed, 1 passed", "8"],
    ]
    page = LongPage(path)
    ran(page, "tests/cache/test_b.py::test_three")
    for narrowed in (session("tests/cache", keyword="three"), session("test_b.py::test_three")):
        page.pytest_sessionfinish(narrowed)
        assert cells()[0][1] == "1 skipped"
    page.pytest_sessionfinish(session("tests/cache"))
    assert cells()[0][1] == "1 passed"
    assert len(cells()) == 3
