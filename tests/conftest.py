"""Settings for every test, the command line, the browser, and a library to compare with."""

import functools
import gc
import importlib
import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings

from support.covering import LONG
from support.long_page import LongPage, runs_whole
from support.skips import pytest_collection_modifyitems, pytest_terminal_summary

__all__ = ["pytest_collection_modifyitems", "pytest_terminal_summary"]

# Until the tests begin, nothing that is made is garbage.
gc.disable()

# torch's first call exceeds hypothesis's deadline, and our tests do not measure time.
settings.register_profile(
    "gracekv",
    deadline=None,
    max_examples=200 if LONG else 20,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("gracekv")


def pytest_configure(config):
    # xdist's worker processes report to the first one.
    if LONG and not hasattr(config, "workerinput") and runs_whole(config):
        config.pluginmanager.register(LongPage())


def pytest_collection_finish():
    """Freeze imported objects: otherwise every garbage collection scans them for half a second."""
    gc.collect()
    gc.freeze()
    gc.enable()
    # Full collections take 4 % of the time; tests that count objects ask for one.
    gc.set_threshold(700, 10, 50)


def pytest_sessionfinish():
    gc.unfreeze()


@pytest.fixture(scope="session")
def commands():
    """The command line, built once: building it takes longer than most commands."""
    import typer.main

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", functools.cache(typer.main.get_command))
        yield


@pytest.fixture
def cli(monkeypatch, capsys, commands):
    """Run the command line in this process: (exit status, stdout, stderr)."""
    from gracekv.cli.main import main

    monkeypatch.delenv("FORCE_COLOR", raising=False)

    def cli(*argv):
        monkeypatch.setattr(sys, "argv", ["gracekv", *map(str, argv)])
        with pytest.raises(SystemExit) as caught:
            main()
        shown = capsys.readouterr()
        return caught.value.code or 0, shown.out, shown.err

    return cli


@pytest.fixture
def refused(cli):
    """Run a command that must end with status 2: its stderr."""

    def refused(*argv):
        status, _, err = cli(*argv)
        assert status == 2
        return err

    return refused


@pytest.fixture
def threads():
    """Set the number of torch's threads until the test ends."""
    import torch

    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def precision():
    """Set the precision of float32 products until the test ends."""
    import torch

    before = torch.get_float32_matmul_precision()
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision(before)


@pytest.fixture(scope="session")
def browser():
    """The system's Chromium without a window, or playwright's own, driven by playwright."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    with sync_api.sync_playwright() as driver:
        if found is None and not Path(driver.chromium.executable_path).exists():
            pytest.skip("there is no Chromium on this machine; .ci/browser installs one")
        # Containers run as root, have little shared memory, and no GPU.
        arguments = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        started = driver.chromium.launch(executable_path=found, args=arguments)
        yield started
        started.close()


@pytest.fixture(scope="session")
def kvpress_module():
    """A function: one module of the installed kvpress, such as "presses.snapkv_press".

    Importing all of kvpress patches transformers' attention and requires an older transformers;
    single modules need neither, so its packages are replaced by empty ones.
    """
    found = importlib.util.find_spec("kvpress")
    if found is None:
        pytest.skip("kvpress is not installed: pip install --no-deps kvpress==0.5.5")
    before = {name for name in sys.modules if name.partition(".")[0] == "kvpress"}
    for name in ("kvpress", "kvpress.presses"):
        package = ModuleType(name)
        inside = name.split(".")[1:]
        package.__path__ = ["/".join([root, *inside]) for root in found.submodule_search_locations]
        sys.modules.setdefault(name, package)
    yield lambda name: importlib.import_module(f"kvpress.{name}")
    for name in [name for name in sys.modules if name.partition(".")[0] == "kvpress"]:
        if name not in before:
            del sys.modules[name]
