"""Metrics on tables of cases, and against the official code's values where they are at hand."""

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


@pytest.mark.parametrize(
    ("metric", "prediction", "answers", "expected"),
    [
        ("set_recall", "", ["12"], 0),
        ("set_recall", "they are 12 and 13", ["12", "13", "14", "15"], 0.5),
        ("set_recall", "ALPHA", ["alpha"], 1),
        ("set_recall", "1\x072", ["12"], 0),
        ("set_recall", "soak", ["oak"], 1),
        ("strict_recall", "soak", ["oak"], 0),
        ("strict_recall", "a, b, oak", ["oak"], 0),
        ("strict_recall", "1. oak 2. elm", ["elm", "oak"], 1),
        ("set_any", "it was Rollo.", ["Rollo", "Hrolf"], 1),
        ("set_any", "nobody", ["Rollo", "Hrolf"], 0),
        ("qa_f1", "", ["Paris"], 0),
        ("qa_f1", "the", ["the"], 0),
        ("qa_f1", "Paris, France.", ["paris"], 2 / 3),
        ("qa_f1", "Paris, France.", ["Rome", "paris france"], 1),
        ("qa_f1", "U.S.-led", ["usled"], 1),
        ("rouge_l", "", ["a b"], 0),
        ("rouge_l", "a a a", ["a"], 0.5),
        ("rouge_l", "A b", ["a b"], 0.5),
        ("rouge_l", "b a", ["a b"], 0.5),
        ("rouge_l", "x y", ["a b", "x y"], 1),
        ("rouge_l_longbench", "", ["a b"], 0),
        ("rouge_l_longbench", ".", ["a b"], 0),
        ("rouge_l_longbench", "a a a", ["a"], 1),
        ("rouge_l_longbench", "x. a b", ["a b. x"], 1),
        ("rouge_l_longbench", "a b. ", ["a b."], 0.8),
    ],
)
def test_cases(metric, prediction, answers, expected):
    got = metrics.evaluate(metric, prediction, sample(metric, *answers))
    assert got == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(
    ("prediction", "answer", "classes", "expected"),
    [
        ("Date", "Date", ["Date", "Other"], 1),
        ("Date or Food", "Date", ["Date", "Food"], 0.5),
        ("Other location", "Other location", ["Other location", "Other", "Location"], 1),
        ("date", "Date", ["Date"], 0),
        # Deleting from the list that is walked over spares "ab".
        ("abcab", "abc", ["a", "ab", "abc"], 0.5),
        ("", "Date", ["Date"], 0),
    ],
)
def test_classification(prediction, answer, classes, expected):
    case = sample("classification", answer, classes=tuple(classes))
    assert metrics.evaluate("classification", prediction, case) == expected


def test_a_few_shot_answer_is_its_first_line():
    case = sample("qa_f1", "Paris", first_line=True)
    assert metrics.evaluate("qa_f1", "\n\nParis\nQuestion: and Rome?", case) == 1
    assert metrics.evaluate("qa_f1", "Paris\nRome", replace(case, first_line=False)) < 1


def test_an_empty_reference_is_an_error():
    with pytest.raises(ConfigError, match="no usable reference"):
        sample("set_recall", "12", " ")


def test_score_reports_the_primary_metric_first_and_its_company():
    assert list(metrics.score(sample("rouge_l", "a b"), "a")) == ["rouge_l", "rouge_l_longbench"]
    words = replace(sample("set_recall", "oak"), task="ruler:cwe")
    assert list(metrics.score(words, "oak")) == ["set_recall", "strict_recall"]


def golden(folder, name):
    lines = (folder / "metrics" / f"{name}.jsonl").read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line]


def test_agrees_with_longbench_on_real_predictions(real_data):
    for case in golden(real_data, "longbench_metric_vectors"):
        form = longbench_forms().get(case["dataset"])
        if form is None:
            continue
        one = sample(
            form["metric"],
            *case["answers"],
            first_line=form["first_line_only"],
            classes=tuple(case.get("all_classes") or ()),
        )
        official = {"rouge_l": "rouge_l_longbench"}.get(form["metric"], form["metric"])
        got = metrics.evaluate(official, case["prediction"], one)
        assert got == pytest.approx(case["score"], abs=1e-9), case["dataset"]
        if "rougeL_plain_lcs_f1" in case:
            got = metrics.evaluate("rouge_l", case["prediction"], one)
            assert got == pytest.approx(case["rougeL_plain_lcs_f1"], abs=1e-6)


def test_agrees_with_longbench_on_edge_cases(real_data):
    for case in golden(real_data, "edge_cases"):
        name = {"rouge": "rouge_l_longbench"}.get(case["metric"], case["metric"])
        answers = [answer or " " for answer in case["answers"]]
        if name == "classification":
            got = metrics.class_accuracy(case["prediction"], answers[0], case["all_classes"])
        elif name not in metrics.PAIRWISE:
            continue
        else:
            got = max(metrics.PAIRWISE[name](case["prediction"], a) for a in case["answers"])
        assert got == pytest.approx(case["score"], abs=1e-9), case
