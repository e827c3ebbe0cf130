"""A tiny model with its own tokenizer, texts for it, and the optional folder of real data."""

import json
import os
from pathlib import Path

import pytest

from gracekv.evaluate import Experiment
from gracekv.evaluate.sources import longbench_forms, ruler_forms
from gracekv.testing.models import tiny_llama, tiny_tokenizer

VOCABULARY = 2000


@pytest.fixture(scope="session")
def tokenizer():
    forms = json.dumps(ruler_forms()) + json.dumps(longbench_forms()["qasper"])
    return tiny_tokenizer([forms], VOCABULARY)


@pytest.fixture(scope="session")
def model():
    return tiny_llama(vocabulary=VOCABULARY)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory, tokenizer):
    """The same model on disk, for separate processes."""
    folder = tmp_path_factory.mktemp("model")
    tiny_llama(vocabulary=VOCABULARY).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def paragraph(number):
    return f"Harbour {number} lies in the north. Its keeper is called Keeper{number}. " * 2


def paragraph_with_questions(number):
    keeper = {"text": f"Keeper{number}"}
    asked = {"question": f"Who keeps harbour {number}?", "answers": [keeper, keeper]}
    other = {"question": "Who paints it?", "answers": []}
    questions = [{**asked, "is_impossible": False}, {**other, "is_impossible": True}]
    return {"context": paragraph(number), "qas": questions}


def older_of_two(number):
    near = range(number, number + 10)
    return {
        "question": f"Which harbour is older, {number} or {number + 1}?",
        "answer": f"Harbour {number}",
        "supporting_facts": [[f"H{number}", 0], [f"H{number + 1}", 0]],
        "context": [[f"H{n}", [f"Harbour {n} is {n} years old. " * 3]] for n in near],
    }


def record(question, context, *answers):
    return {"input": question, "context": context, "answers": answers, "all_classes": None}


@pytest.fixture(scope="session")
def small_data(tmp_path_factory):
    """Own texts in the benchmarks' formats: nothing here is copied from a data set."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "qa").mkdir()
    (folder / "longbench").mkdir()
    parts = [[paragraph_with_questions(10 * a + p) for p in range(10)] for a in range(20)]
    articles = [{"title": f"Coast {a}", "paragraphs": part} for a, part in enumerate(parts)]
    (folder / "qa" / "squad_small.json").write_text(json.dumps({"data": articles}))
    hotpot = [older_of_two(number) for number in range(100, 220, 10)]
    (folder / "qa" / "hotpot_small.json").write_text(json.dumps(hotpot))
    lines = ""
    for n in range(6):
        context = " ".join(map(paragraph, range(n, n + 3 + 4 * (n % 3))))
        asked = f"Who keeps harbour {n}?", context, f"Keeper{n}", f"the keeper Keeper{n}"
        lines += json.dumps(record(*asked)) + "\n"
    (folder / "longbench" / "qasper.small.jsonl").write_text(lines)
    before = "Dialogue: A: bye\r\nB: bye\nSummary: They part. \n" * 8
    shots = record("Dialogue: A: hi\r\nB: {hello}\nSummary: ", before, "A greets B.")
    (folder / "longbench" / "samsum.small.jsonl").write_text(json.dumps(shots) + "\n")
    return folder


@pytest.fixture(scope="module")
def experiment(small_data, request):
    """The module's `PANEL` over these texts, as an experiment."""
    return Experiment.from_dict({"model": "tiny", "data": str(small_data), **request.module.PANEL})


@pytest.fixture(scope="session")
def real_data():
    folder = os.environ.get("GRACEKV_EVAL_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("GRACEKV_EVAL_DATA names no folder of benchmark data")
    return Path(folder)
