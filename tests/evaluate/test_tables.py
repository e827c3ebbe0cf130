"""Statistics and tables: coverage of intervals, pairing, and formats that agree."""

import csv
import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gracekv.errors import ConfigError
from gracekv.evaluate.experiment import variants
from gracekv.evaluate.formats import as_csv, footer, markdown
from gracekv.evaluate.measures import MEASURES, measure
from gracekv.evaluate.tables import interval, make_tables
from support.evaluation_rows import grid, row

SCORE = MEASURES["score"]


ROWS = grid({
    ("fullkv", "full"): [1, 1, 0.5, 1],
    ("ours", "2x"): [1, 1, 0.5, 0.5], ("ours", "16x"): [0.5, 0.5, 0, 0],
    ("theirs", "2x"): [1, 0.5, 0, 0.5], ("theirs", "16x"): [0.5, 1, 0, 0.5],
    ("third", "2x"): [0, 0, 0, 0], ("third", "16x"): [0, 0, 0, 0.5],
})  # fmt: skip


def test_a_group_is_the_unweighted_mean_of_its_tasks():
    found = interval([np.array([0.0, 1.0]), np.array([1.0, 1.0, 1.0, 1.0])])
    assert found.mean == 0.75
    assert found.samples == 6
    # Only the first task varies: its mean is 0, 1/2 or 1, widened by the square root of 2.
    assert (found.low, found.high) == pytest.approx((0.75 - 2**-1.5, 0.75 + 2**-1.5))


def test_intervals_of_two_samples_a_task_hold_the_mean():
    """Nine times in ten or more; a bootstrap that is not widened covers it eight times."""
    found = [interval(list(x)) for x in np.random.default_rng(0).normal(0, 1, (300, 10, 2))]
    assert sum(x.low <= 0 <= x.high for x in found) >= 265


@settings(max_examples=15)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_interval_of_a_large_sample_is_the_normal_one(seed):
    values = np.random.default_rng(seed).normal(3, 2, 400)
    found = interval([values])
    half = 1.96 * values.std() / 20
    assert found.low == pytest.approx(values.mean() - half, abs=0.04)
    assert found.high == pytest.approx(values.mean() + half, abs=0.04)


def test_pairs_are_compared_and_not_means():
    rng = np.random.default_rng(0)
    hard = rng.normal(0, 10, 50)
    rows = {("hard", "2x"): hard, ("better", "2x"): hard + 0.1 + rng.normal(0, 0.05, 50)}
    (table,) = make_tables(grid(rows), SCORE, "hard")
    found = table.against["better", "2x"]
    assert 5 < found.low < found.mean < found.high < 15
    assert table.cells["hard", "2x"].high - table.cells["hard", "2x"].low > 100


def test_blocks_hold_methods_by_budgets():
    (table,) = make_tables(ROWS, SCORE, "ours")
    assert table.columns == ("2x", "16x")
    assert table.methods == ("fullkv", "ours", "theirs", "third")
    assert table.cells["ours", "2x"].mean == 75
    assert table.cells["fullkv", "full"].mean == 87.5
    assert table.ranks("2x", True) == {"ours": 1, "theirs": 2}
    assert table.ranks("16x", True) == {"theirs": 1, "ours": 2}
    assert table.against["theirs", "16x"].mean == 25
    equal = grid({("a", "2x"): [1, 1 / 3, 2 / 3], ("b", "2x"): [1, 2 / 3, 1 / 3]})
    assert make_tables(equal, SCORE)[0].ranks("2x", True) == {}
    assert make_tables(ROWS, SCORE, "fullkv")[0].against["theirs", "2x"].mean == -37.5


def test_only_samples_that_all_methods_have_are_averaged():
    rows = [r for r in ROWS if (r["method"], r["column"], r["index"]) != ("third", "2x", 0)]
    (table,) = make_tables(rows, SCORE)
    assert table.cells["ours", "2x"].samples == 3
    assert table.cells["ours", "2x"].mean == pytest.approx(200 / 3)
    assert table.cells["ours", "16x"].samples == 4
    assert table.unpaired == 2
    assert "2 values left out" in markdown([table], SCORE)
    (table,) = make_tables(grid({("fullkv", "full"): [0, 1], ("other", "full"): [1]}), SCORE)
    assert (table.cells["fullkv", "full"].mean, table.unpaired) == (0, 1)
    rows = grid({("ours", "2x"): [1, 0], ("ours", "8x"): [1]})
    told = markdown(make_tables([*rows, row("ours", "2x", 0, 0, "ruler:vt")], SCORE), SCORE)
    assert "mean of ruler:cwe, ruler:vt; samples: 3 at 2x, 1 at 8x. 8x is without ruler:vt." in told
    apart = make_tables([row("ours", "2x", 0, 1.0), row("theirs", "2x", 1, 1.0)], SCORE)
    assert "0 samples in all. 2 values left out" in markdown(apart, SCORE)


def test_a_failed_method_leaves_the_others_in_the_table():
    failed = {"error": {"type": "BudgetError", "message": "small"}}
    rows = [{**r, **failed} if r["method"] == "third" else r for r in ROWS]
    (table,) = make_tables(rows, SCORE)
    assert ("third", "2x") not in table.cells
    assert table.cells["ours", "2x"].samples == 4
    cut = [{**row, "removed_tokens": 3 * (row["index"] == 1)} for row in rows]
    assert "Prompts cut to the model's or the panel's length: 1." in footer(cut)
    assert "cut to" not in footer(rows)
    assert "Failed: ruler:cwe, third at 2x: 4 x BudgetError." in footer(rows)


def test_rows_of_two_settings_prompts_or_models_of_one_name_are_not_mixed():
    settings = {"protocol": "query_aware", "max_new_tokens": 8}
    other = row("fourth", "2x", 0, 1.0, marks={"weights": "second"})
    for extra, message in (
        (row("ours", "2x", 0, 1.0, settings=settings), r"different settings \(max_new_tokens\)"),
        (row("ours", "2x", 9, 1.0, pipeline={"floor": "none"}), r"different settings \(pipeline"),
        (row("ours", "8x", 0, 1.0, pipeline={"floor": "none"}), r"different settings \(pipeline"),
        (row("fourth", "8x", 0, 1.0, settings=settings), r"different settings \(max_new_tokens\)"),
        (row("fourth", "2x", 0, 1.0, prompt_hash="other", sample="cut"), "different prompts"),
        (other, r"another model .* 'tiny' \(other weights\)"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_tables([*ROWS, extra], SCORE)
    # Without answers, their maximum length does not matter.
    silent = {"protocol": "query_aware", "generate": False}
    make_tables([*ROWS, row("ours", "8x", 0, 1.0, settings=silent | {"max_new_tokens": 8})], SCORE)
    # Rows of a model with another name, and failed rows without marks, do no harm.
    make_tables([*ROWS, {**other, "model": "large"}], SCORE)
    failed = {"error": {"type": "TaskError", "message": "no data"}}
    make_tables([*ROWS, {n: v for n, v in {**other, **failed}.items() if n != "marks"}], SCORE)


def test_given_texts_count_once_whatever_the_seed():
    given = {"task": "longbench:trec", "length": None}
    (table,) = make_tables([row("ours", "2x", 0, 1.0, seed=x, **given) for x in (1, 2)], SCORE)
    assert table.cells["ours", "2x"].samples == 1


def test_values_that_are_no_numbers_are_left_out():
    for value in (None, True, "nan", [1], 10**400, {"nll": 1}):
        broken = [{**r, "score": value, "bytes": {"kv": value, "full_kv": 0}} for r in ROWS]
        assert not make_tables(broken, SCORE)
        assert not make_tables([{**r, "fidelity": value} for r in ROWS], MEASURES["log_kl"])
        assert not make_tables(broken, MEASURES["kv_share"])


def test_protocols_metrics_and_lengths_have_blocks_of_their_own():
    more = [
        row("ours", "2x", 0, 1.0, settings={"protocol": "query_agnostic", "max_new_tokens": 4}),
        row("fullkv", "full", 0, 1.0, dtype="bfloat16", key="bits"),
        row("ours", "2x", 0, 1.0, task="ruler:fwe", length=2048),
        row("ours", "2x", 0, 1.0, task="longbench:trec", metric="classification", length=None),
    ]
    assert len(make_tables([*ROWS, *more], SCORE)) == 5


def test_formats_mark_best_and_second():
    found = make_tables(ROWS, SCORE, "ours")
    text = markdown(found, SCORE)
    assert "| ours | **75.0** [" in text
    assert "| theirs | <u>50.0</u> [" in text
    assert "| theirs | 16x | +25.0 [" in text
    assert "| fullkv | 87.5 [" in text
    odd = [row("a | b\nc", "2x", n, 1.0) for n in range(2)]
    assert "\n| a \\| b c | 100.0 [" in markdown(make_tables(odd, SCORE), SCORE)
    table = list(csv.DictReader(io.StringIO(as_csv(found, SCORE))))
    table = [c for c in table if (c["method"], c["column"], c["samples"]) == ("theirs", "16x", "4")]
    assert {c["measure"]: float(c["mean"]) for c in table} == {"score": 50, "score minus ours": 25}


def test_lower_is_better_for_divergence():
    found = make_tables(ROWS, MEASURES["kl"])
    assert found[0].ranks("2x", MEASURES["kl"].higher) == {"ours": 1, "theirs": 2}
    with pytest.raises(ConfigError, match="Did you mean 'log_kl'"):
        measure("logkl")


def test_an_unknown_reference_is_refused():
    with pytest.raises(ConfigError, match="No rows of the method 'nobody'"):
        make_tables(ROWS, SCORE, "nobody")


def test_variants_of_a_method():
    found = variants("gracekv", [], True)
    assert found[0] == "gracekv"
    assert len([name for name in found if name.startswith("gracekv-no-")]) >= 5
    assert variants("gracekv", ["quota=global"], False) == ["gracekv", "gracekv[quota=global]"]
    with pytest.raises(ConfigError, match="no ablation recipes"):
        variants("fullkv", [], True)
