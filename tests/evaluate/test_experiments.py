"""Experiments as plain data, methods as text, shards, and the three commands."""

import pytest
import yaml

from gracekv.errors import ConfigError, TaskError, UnknownStrategyError
from gracekv.evaluate import Experiment, read_rows
from gracekv.evaluate.experiment import parse_method, split_methods, sweep
from gracekv.evaluate.runner import Shard, parse_shard
from gracekv.pipeline import Pipeline
from support.evaluation_rows import row, written

FLAT = {"model": "tiny", "tasks": ["retrieval"], "ratios": [1.5, 8], "entries": [64]}


def test_round_trip_and_panels(tmp_path):
    flat = Experiment.from_dict(FLAT)
    assert Experiment.from_dict(flat.to_dict()) == flat
    path = tmp_path / "flat.yaml"
    path.write_text(yaml.safe_dump(flat.to_dict()))
    assert Experiment.load(str(path)) == Experiment.load(path) == flat
    path.write_text("[" * 10_000)
    with pytest.raises(ConfigError, match="is not valid yaml"):
        Experiment.load(path)
    nested = {"model": "tiny", "panels": [{k: v for k, v in FLAT.items() if k != "model"}] * 2}
    assert Experiment.from_dict(nested).panels[0] == flat.panels[0]


def test_cells_are_methods_times_budgets_and_fullkv_once():
    cells = Experiment.from_dict(FLAT).panels[0].cells()
    found, columns = [(c.method, c.column) for c in cells], ["1.5x", "8x", "64 entries"]
    methods = ["gracekv-plus", "gracekv"]
    assert found == [("fullkv", "full"), *((m, column) for m in methods for column in columns)]
    assert [c.budget.kind for c in cells[1:]] == 2 * ["ratio", "ratio", "entries_per_head"]


NONSENSE = [
    ({"tasks": []}, ConfigError, "at least one of tasks"),
    ({"tasks": ["ruler:nope"]}, TaskError, "Unknown task"),
    ({"methods": ["snapvk"]}, UnknownStrategyError, "Unknown recipe"),
    ({"methods": ["gracekv", "gracekv"]}, ConfigError, "named twice"),
    ({"methods": ["gracekv"], "ratios": [], "entries": []}, ConfigError, "need a budget"),
    ({"ratios": [0.5]}, ValueError, "at least 1"),
    ({"samples": 0}, ConfigError, "samples takes a whole number >= 1"),
    ({"lengths": []}, ConfigError, "lengths takes at least one item"),
    ({"generate": False, "fidelity": False}, ConfigError, "nothing to measure"),
    ({"protocol": "query-blind"}, ConfigError, "takes one of"),
    ({"recent_share": 0}, ConfigError, "share"),
    ({"model": None}, ConfigError, "takes a string"),
    ({"colour": 1}, ConfigError, "has no field 'colour'"),
]


@pytest.mark.parametrize(("changes", "error", "message"), NONSENSE)
def test_what_makes_no_sense_is_refused(changes, error, message):
    with pytest.raises(error, match=message):
        Experiment.from_dict({**FLAT, **changes})


def test_methods_are_recipes_with_changes():
    plain = parse_method("gracekv[floor.alpha=0.2;quota=per_head]")
    floor = {"name": "singleton", "alpha": 0.2}
    assert plain == Pipeline.from_dict({"floor": floor, "quota": "per_head"})
    assert parse_method("gracekv-no-floor", 0.5).window.share == 0.5
    assert parse_method("gracekv[window.share=0.1]", 0.5).window.share == 0.1
    assert parse_method("gracekv[window={size: 8, share: 0.1}]", 0.5).window.share == 0.1
    assert parse_method("gracekv[window={size: 8};floor.alpha=0]", 0.5).window.share == 0.5
    assert parse_method("gracekv").window.share == 1.0
    # Only all changes together are valid.
    assert parse_method("snapkv[window.size=2;window.minimum=2;value=multi_hop;value.hops=0]")
    depths = parse_method("gracekv[segment.curvature={depths: [0.3, 0.5]}]").segment.curvature
    assert depths.depths == (0.3, 0.5)
    methods = ["fullkv", "gracekv[a.b=[1,2],c=[3]]", "h"]
    assert split_methods(", ".join(methods[:2]) + ",h") == methods


@pytest.mark.parametrize("spec", [
    "gracekv[alpha]", "gracekv[a.b.c=1]", "gracekv[keep_all.x=1]", "gracekv[", "[x=1]",
    "gracekv[floor.alpha=2024-13-45]",
])  # fmt: skip
def test_methods_that_cannot_be_read(spec):
    with pytest.raises(ConfigError):
        parse_method(spec)


def test_methods_come_from_files(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("floor: none\n")
    assert parse_method(str(path)) == Pipeline.from_dict({"floor": "none"})


def test_sweeps_change_one_thing_at_a_time():
    changes = ["floor.alpha=0.2", "floor.alpha=0.4", "segment.target_length=32"]
    swept = sweep("gracekv", ["floor.alpha=0.2,0.4", "segment.target_length=32"])
    assert swept == [f"gracekv[{change}]" for change in changes]
    assert sweep("gracekv[quota=global]", ["floor=none"]) == ["gracekv[quota=global;floor=none]"]
    for bad in ("floor.alpha", "floor.alpha="):
        with pytest.raises(ConfigError):
            sweep("gracekv", [bad])


def test_shards():
    assert parse_shard(None, {}) == Shard(0, 1)
    assert parse_shard("1/4", {"RANK": "3", "WORLD_SIZE": "8"}) == Shard(1, 4)
    assert parse_shard(None, {"RANK": "3", "WORLD_SIZE": "8"}) == Shard(3, 8)
    owners = [[n for n in range(10) if Shard(i, 3).owns(n)] for i in range(3)]
    assert sorted(n for owned in owners for n in owned) == list(range(10))
    for bad in ("4/4", "1", "a/b", "-1/2"):
        with pytest.raises(ConfigError, match="A shard is i/n"):
            parse_shard(bad, {})


def test_a_table_of_a_metric_or_method_that_no_row_holds_says_so(cli, refused, tmp_path):
    written(tmp_path, [row("ours", "2x", 0, 1.0)])
    shown = "table", tmp_path, "--metric", "construction"
    assert "No row holds construction. Use --metric with one of: score, kl" in refused(*shown)
    code, _, told = cli(*shown[:-1], "score,construction")
    assert code == 0
    assert "No row holds construction." in told
    assert "No rows of the method 'our'. Methods: ours." in refused(*shown, "--against", "our")
    written(tmp_path, [row("ours", "2x", 0, 1.0), {**row("base", "2x", 0, 1.0), "score": None}])
    assert "No row of 'base' holds score" in cli(*shown[:-1], "score", "--against", "base")[2]


def test_the_commands_from_model_to_table(cli, refused, model_folder, small_data, tmp_path):
    out = tmp_path / "runs"
    run = (
        f"evaluate --model {model_folder} --data {small_data} --out {out} --samples 2 --length 512"
        " --tasks ruler:niah_single_2,longbench:qasper --ratios 2,8 --max-new-tokens 3"
        " --methods fullkv,gracekv,gracekv-no-global"
    )
    code, _, told = cli(*run.split())
    assert code == 0
    assert "20 cells run" in told
    code, _, told = cli(*run.split())
    assert "0 cells run, 20 kept" in told
    code, text, _ = cli("table", out, "--metric", "score,kl", "--against", "gracekv")
    assert code == 0
    assert "single_doc_qa (qa_f1)" in text
    assert "KL to FullKV" in text
    assert "Difference from gracekv" in text
    file = tmp_path / "table.csv"
    shown = ["--metric", "score,kl", "--against", "gracekv", "--format", "csv"]
    code, _, told = cli("table", out, *shown, "--out", file)
    assert (code, "samples in all" in told) == (0, True)
    # Two metrics of two groups: five cells, and two differences.
    assert len(file.read_text().splitlines()) == 1 + 2 * 2 * (5 + 2)
    assert "'latex' is not one of 'markdown', 'csv'" in refused("table", out, "--format", "latex")


def test_the_exit_code_tells_of_failures_and_rows_of_their_settings(
    cli, model_folder, tmp_path, monkeypatch
):
    argv = (
        f"evaluate --model {model_folder} --out {tmp_path} --tasks ruler:fwe --length 512 --seed 7"
        " --samples 1 --ratios 2,1000 --max-new-tokens 2 --no-fidelity --truncate start"
        " --max-prompt 2000"
    )
    code, _, told = cli(*argv.split())
    row = read_rows(tmp_path)[0]
    set_to = [row["settings"][name] for name in ("fidelity", "truncate", "max_prompt")]
    assert (row["seed"], set_to) == (7, [False, "start", 2000])
    assert code == 1
    # FullKV once, gracekv-plus and gracekv at both ratios.
    assert "5 cells run, 0 kept from before, 2 failed" in told
    # torchrun would end the other processes.
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    code, _, told = cli(*argv.split())
    assert (code, "0 cells run, 5 kept from before, 2 failed" in told) == (0, True)


def test_ablate_shows_differences(cli, model_folder, tmp_path, monkeypatch):
    shown = f"ablate --out {tmp_path} --set floor.alpha=0.2,0.4 --metric kl".split()
    run = "--tasks ruler:fwe --length 512 --samples 2 --ratios 4 --no-generate --model"
    code, text, _ = cli(*shown, *run.split(), model_folder)
    assert code == 0
    # A failure that later succeeded does not count.
    written(tmp_path, [{**read_rows(tmp_path)[0], "error": {"type": "X", "message": ""}}], "early")
    assert cli(*shown)[0] == 0
    told = cli(*shown, "--set", "floor.alpha=0.9")[2]
    assert "No rows of gracekv[floor.alpha=0.9]. Give --model and --tasks." in told
    # Other processes of torchrun may not be done.
    with monkeypatch.context() as patch:
        patch.setenv("TORCHELASTIC_RUN_ID", "1")
        assert cli(*shown)[:2] == (0, "")
    assert "Difference from gracekv" in text
    assert "| gracekv[floor.alpha=0.2] | 4x |" in text
    other = ["--out", tmp_path, "--base", "snapkv", "--set", "window.size=4"]
    assert "There are no rows of snapkv, snapkv[window.size=4] under" in cli("ablate", *other)[2]


def test_a_yaml_file_says_the_same(cli, model_folder, tmp_path):
    config = tmp_path / "run.yaml"
    panel = "tasks: [ruler:fwe]\nlengths: [512]\nsamples: 1\nratios: [4]\ngenerate: false\n"
    config.write_text(f"model: {model_folder}\n{panel}")
    code, _, told = cli("evaluate", "--config", config, "--out", tmp_path / "runs")
    assert code == 0
    assert "3 cells run" in told


BAD_COMMANDS = [
    (["evaluate"], "Give --model and --tasks"),
    (["ablate", "--ratios", "4"], "Give --model and --tasks"),
    (["ablate", "--retry-failed"], "Give --model and --tasks"),
    (["evaluate", "--model", "m", "--tasks", "x"], "Unknown task"),
    (["evaluate", "--config", "a", "--samples", "50"], "--config or --samples, not both"),
    (["evaluate", "--model", "m", "--tasks", "ruler:fwe", "--ratios", "a"], "numbers"),
    (["ablate", "--base", "fullkv"], "no ablation recipes"),
    (["ablate", "--model", "m", "--tasks", "ruler:fwe", "--metric", "x"], "metric takes one"),
]


@pytest.mark.parametrize(("argv", "message"), BAD_COMMANDS)
def test_bad_commands_exit_with_2_and_a_message(refused, tmp_path, argv, message):
    assert message in refused(*argv, "--out", tmp_path)


def test_outputs_of_a_table_are_looked_at_first(refused, tmp_path):
    (tmp_path / "folder.png").mkdir()
    # The folder of rows does not exist either, but the error is not about it.
    told = refused("table", tmp_path / "none", "--out", tmp_path / "folder.png")
    assert "OutputError: Cannot write to" in told
    (tmp_path / "file").write_text("")
    run = ["evaluate", "--model", "m", "--tasks", "ruler:fwe", "--ratios", "2"]
    assert "OutputError: Rows cannot be written" in refused(*run, "--out", tmp_path / "file")


def test_a_table_of_nothing(cli, tmp_path):
    assert "There are no rows" in cli("table", tmp_path)[2]
    assert "There is no folder" in cli("table", tmp_path / "none")[2]
