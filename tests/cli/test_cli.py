"""Commands that need no saved cache: output and errors; `compress` itself is a stub."""

import os
import re
import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import gracekv
from gracekv import recipes
from gracekv.allocate import Budget
from gracekv.cache import Accounting, Timings
from gracekv.pipeline import Pipeline
from gracekv.pipeline.composition import REGISTRIES
from support.fresh_python import fresh_python


class FakeResult:
    """The part of a `compress` result that the command line reads."""

    def __init__(self, prompt, budget, pipeline):
        ratio = budget.amount if budget.kind == "ratio" else 2
        entries = torch.full((3, 2), 10, dtype=torch.int64)
        self.prompt, self.pipeline = prompt, pipeline or Pipeline.default()
        self.timings = Timings(prefill=2.0, tree=0.5, pack=0.25)
        self.accounting = Accounting(
            budget=int(120 / float(ratio)), spent=60, floor_spent=7, recent=4, entries=entries,
            bytes=6000, metadata_bytes=600, full_bytes=12000, utility=0.5, bound=None,
            budget_bytes=int(budget.amount) if budget.kind == "kv_bytes" else None, spent_bytes=9,
        )  # fmt: skip

    def generate(self, max_new_tokens=64, **kwargs):
        return f"{max_new_tokens} tokens"

    def save(self, path):
        path.write_text("entries")


@pytest.fixture
def calls(monkeypatch):
    seen = []

    def from_chat(tokenizer, **texts):
        return SimpleNamespace(texts=texts, spans=SimpleNamespace(context_length=20))

    def compress(model, prompt, **options):
        seen.append({"model": model, **prompt.texts, **options})
        return FakeResult(prompt, options["budget"], options["pipeline"])

    monkeypatch.setattr(gracekv, "Prompt", SimpleNamespace(from_chat=from_chat), raising=False)
    monkeypatch.setattr(gracekv, "compress", compress, raising=False)
    monkeypatch.setattr("gracekv.hf.smollm2.load_model", lambda x, dtype: (f"{x}:{dtype}", None))
    return seen


def test_version_and_help(cli):
    assert cli("--version") == (0, f"gracekv {gracekv.__version__}\n", "")
    for option in ("-h", "--help"):
        status, out, _ = cli(option)
        assert status == 0
        assert "Usage" in out


def test_help_is_whole_at_80_columns(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = cli("-h")
    commands = {line.split()[0] for line in out.split("Commands:")[1].splitlines() if line.strip()}
    assert {"compress", "ablate", "evaluate", "ask", "export", "table", "list"} <= commands
    assert "…" not in out
    assert "..." not in out.split("Commands:")[1]
    import typer

    from gracekv.cli.commands import app

    built = typer.main.get_command(app).commands
    for name in commands:
        _, out, _ = cli(name, "-h")
        assert "…" not in out
        assert max(map(len, out.splitlines())) <= 80
        for option in built[name].params:
            if option.param_type_name == "option":
                for spelt in (*option.opts, *option.secondary_opts):
                    assert re.search(rf"(?<![\w-]){spelt}(?![\w-])", out), (name, spelt)


def test_the_demo_refuses_its_folder_before_it_loads_the_model(refused, monkeypatch, story):
    import gracekv.cli.demo

    monkeypatch.setattr(gracekv.cli.demo, "load_smollm2", lambda: pytest.fail("was loaded"))
    assert refused("demo", "--out", story).startswith("OutputError: Cannot write to")


COMMAND = """
import sys; from gracekv.cli.main import main
try: main()
finally: print("\u20ac", {"torch", "transformers"} & set(sys.modules))
"""


@pytest.mark.parametrize(
    ("status", "argv"),
    [(0, ["-h"]), (2, ["compress", "--context", "missing.txt", "--question", "q"])],
)
def test_help_and_a_mistyped_context_import_no_model_and_any_answer_is_shown(status, argv):
    """Signs that the output's encoding lacks are escaped."""
    done = fresh_python("-c", COMMAND, *argv, status=status, PYTHONIOENCODING="latin-1")
    assert ("Cannot read missing.txt" in done.stderr) == (status == 2)
    assert done.stdout.splitlines()[-1] == r"\u20ac set()"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
def test_a_full_disk_beneath_the_output_is_one_message():
    argv = [sys.executable, "-c", "from gracekv.cli.main import main; main()", "-h"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(argv, check=False, text=True, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 2
    assert done.stderr == "The output cannot be written: No space left on device.\n"


def test_missing_extra_is_named(refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    assert "pip install 'gracekv[cli]'" in refused("list")


def test_list_shows_every_strategy_and_recipe(cli):
    status, out, _ = cli("list")
    assert status == 0
    for stage, registry in REGISTRIES.items():
        assert re.search(rf"^{stage}\s*$", out, re.MULTILINE)
        for name in registry:
            assert f"{name} " in out
    for name in recipes.names():
        assert f"{name} " in out


def test_list_says_what_each_recipe_is_and_where_it_comes_from(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    tagged = recipes.Recipe("Tokens after [/INST] of [heads]", "a plugin [1]")
    monkeypatch.setitem(recipes.RECIPES, "tagged", tagged)
    _, out, _ = cli("list", "--recipes")
    lines = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    for name, recipe in recipes.RECIPES.items():
        assert recipe.summary in lines[name]
        assert recipe.source in lines[name]


def test_compress_prints_answer_and_accounting(cli, calls, story, tmp_path):
    status, out, err = cli(
        "compress", "--model", "smollm2", "--context", story, "--question", "Why?",
        "--instruction", "Read.", "--max-new-tokens", 5, "--dtype", "bfloat16",
        "--pipeline", "snapkv", "--save", tmp_path / "saved", "--beyond-positions",
    )  # fmt: skip
    assert (status, out) == (0, "5 tokens\n")
    assert (tmp_path / "saved").read_text() == "entries"
    assert "snapkv kept 60 of 120 context entries (budget 15)" in err
    assert "compression 0.75 s" in err
    (call,) = calls
    assert call["model"] == "smollm2:bfloat16"
    assert call["context"] == "Once “upon” a time."
    assert (call["question"], call["instruction"]) == ("Why?", "Read.")
    assert call["budget"] == Budget.ratio(8)
    assert call["pipeline"] == Pipeline.named("snapkv")
    assert call["capture"].beyond_positions


def test_other_budgets_replace_the_ratio(cli, calls, story):
    base = ("compress", "--model", "m", "--context", story, "--question", "q")
    cli(*base, "--entries-per-head", 64)
    assert "entries (9 of 67,108,864 bytes); " in cli(*base, "--kv-bytes", "67108864")[2]
    cli(*base, "--compression-ratio", "0.5")
    given = ({"entries_per_head": 64}, {"kv_bytes": "64MiB"}, {"compression_ratio": "0.5"})
    assert [call["budget"] for call in calls] == [Budget.of(one) for one in given]


def test_without_a_question_the_cache_is_saved_for_later(cli, refused, calls, story, tmp_path):
    status, out, err = cli(
        "compress", "--context", story, "--save", tmp_path / "Tom's book", "--import", "json"
    )
    assert (status, out) == (0, "")
    assert "gracekv-plus kept 60" in err
    asked = shlex.join(["gracekv", "ask", f"{tmp_path}/Tom's book", "Your question?"])
    assert err.endswith(f"\nask about it with: {asked} --model smollm2 --import json\n")
    (call,) = calls
    told = [call[x] for x in ("model", "question", "budget", "pipeline")]
    # `gracekv.compress` decides which recipe that is.
    assert told == ["smollm2:float32", "", Budget.ratio(2), None]
    assert not call["capture"].beyond_positions
    assert "to do with the cache: add --question" in refused("compress", "--context", story)


def test_an_interrupt_leaves_no_trace(cli, calls, story, tmp_path, monkeypatch):
    def interrupted(*args, **options):
        options["capture"].progress(1024, 4096)
        raise KeyboardInterrupt

    monkeypatch.setattr(gracekv, "compress", interrupted, raising=False)
    status, out, err = cli("compress", "--context", story, "--save", tmp_path / "book")
    assert status != 0
    assert out == ""
    assert "Traceback" not in err
    assert not (tmp_path / "book").exists()


@pytest.mark.parametrize(("argv", "message"), [
    (["list", "--stage", "alocate"], "Did you mean 'allocate'?"),
    (["compress", "--context", "missing.txt"], "Cannot read missing.txt"),
    (["compress", "--ratio", "0.5"], "BudgetError: ratio says how many"),
    (["compress", "--pipeline", "gracekw"], "Did you mean 'gracekv'?"),
    (["compress", "--pipeline", "missing.toml"], "Cannot read missing.toml"),
    (["compress", "--save", "a", "--report", "./a"], "must be different files"),
    (["compress"], "Missing option"),
])  # fmt: skip
def test_errors_are_one_message_and_status_2(refused, calls, story, argv, message):
    if len(argv) > 1 and argv[0] == "compress":
        context = [] if "--context" in argv else ["--context", story]
        argv = [*argv, "--model", "m", "--question", "q", *context]
    err = refused(*argv)
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize("option", ["--save", "--report"])
def test_outputs_are_checked_before_the_model_is_loaded(refused, story, calls, tmp_path, option):
    (tmp_path / "file").touch()
    for place in (tmp_path, tmp_path / "file" / "out", "/dev/full", "/proc/nothing/out"):
        err = refused("compress", "--context", story, "--question", "Who?", option, place)
        assert err.startswith("OutputError: Cannot write to")
    inside = ["--save", tmp_path / "new", "--report", tmp_path / "new" / "page.html"]
    assert "lies inside the other" in refused("compress", "--context", story, *inside)
    assert not (tmp_path / "new").exists()
    assert not calls


def test_dtype_is_checked_before_a_model_is_loaded(refused, story):
    argv = ("--model", "m", "--context", story, "--question", "q", "--dtype", "int8")
    assert "float32, bfloat16, float16; got 'int8'" in refused("compress", *argv)
