"""Metrics on tables of cases, and against the official code's values where available."""

import json
from dataclasses import replace

import pytest

from gracekv.errors import ConfigError
from gracekv.evaluate import metrics
from gracekv.evaluate.sample import Sample
from gracekv.evaluate.sources import longbench_forms


def sample(metric, *answers, **fields):
    texts = {"instruction": "", "context": "c", "question": "q", "answer_prefix": ""}
    return Sample("test:case", 0, **texts, answers=answers, metric=metric, **fields)


@pytest.mark.parametrize(("metric", "prediction", "answers", "expected"), [
    ("set_recall", "", ["12"], 0),
    ("set_recall", "they are 12 and 13", ["12", "13", "14", "15"], 0.5),
    ("set_recall", "ALPHA", ["alpha"], 1), ("set_recall", "1\x072", ["12"], 0),
    ("set_recall", "soak", ["oak"], 1), ("set_any", "it was Rollo.", ["Rollo", "Hrolf"], 1),
    ("set_any", "nobody", ["Rollo", "Hrolf"], 0), ("qa_f1", "", ["Paris"], 0),
    ("qa_f1", "the", ["the"], 0), ("qa_f1", "Paris, France.", ["paris"], 2 / 3),
    ("qa_f1", "Paris, France.", ["Rome", "paris france"], 1), ("qa_f1", "U.S.-led", ["usled"], 1),
    ("rouge_l", "", ["a b"], 0), ("rouge_l", "a a a", ["a"], 0.5), ("rouge_l", "A b", ["a b"], 0.5),
    ("rouge_l", "b a", ["a b"], 0.5), ("rouge_l", "x y", ["a b", "x y"], 1),
])  # fmt: skip
def test_cases(metric, prediction, answers, expected):
    assert metrics.score(sample(metric, *answers), prediction) == pytest.approx(expected, abs=1e-7)


CLASSES = [
    ("Date", "Date", ["Date", "Other"], 1),
    ("Date or Food", "Date", ["Date", "Food"], 0.5),
    ("Other location", "Other location", ["Other location", "Other", "Location"], 1),
    ("date", "Date", ["Date"], 0),
    # Deleting from the list that is walked over spares "ab".
    ("abcab", "abc", ["a", "ab", "abc"], 0.5),
    ("", "Date", ["Date"], 0),
]


@pytest.mark.parametrize(("prediction", "answer", "classes", "expected"), CLASSES)
def test_classification(prediction, answer, classes, expected):
    case = sample("classification", answer, classes=tuple(classes))
    assert metrics.score(case, prediction) == expected


def test_a_few_shot_answer_is_its_first_line():
    case = sample("qa_f1", "Paris", first_line=True)
    assert metrics.score(case, "\n\nParis\nQuestion: and Rome?") == 1
    assert metrics.score(replace(case, first_line=False), "Paris\nRome") < 1


def test_an_empty_reference_is_an_error():
    with pytest.raises(ConfigError, match="no usable reference"):
        sample("set_recall", "12", " ")


def golden(folder, name):
    lines = (folder / "metrics" / f"{name}.jsonl").read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line]


def test_agrees_with_longbench_on_real_predictions(real_data):
    for case in golden(real_data, "longbench_metric_vectors"):
        form = longbench_forms().get(case["dataset"])
        if form is None:
            continue
        fields = {"first_line": form["first_line_only"]}
        fields["classes"] = tuple(case.get("all_classes") or ())
        one = sample(form["metric"], *case["answers"], **fields)
        if form["metric"] != "rouge_l":
            assert metrics.score(one, case["prediction"]) == pytest.approx(case["score"], abs=1e-9)
        elif "rougeL_plain_lcs_f1" in case:
            expected = pytest.approx(case["rougeL_plain_lcs_f1"], abs=1e-6)
            assert metrics.score(one, case["prediction"]) == expected


def test_agrees_with_longbench_on_edge_cases(real_data):
    for case in golden(real_data, "edge_cases"):
        if case["metric"] == "classification":
            got = metrics.class_accuracy(
                case["prediction"], case["answers"][0] or " ", case["all_classes"]
            )
        elif case["metric"] == "qa_f1":
            got = max(metrics.qa_f1(case["prediction"], answer) for answer in case["answers"])
        else:
            continue
        assert got == pytest.approx(case["score"], abs=1e-9), case
