"""A tiny model with a tokenizer of its own, texts for it, and the optional folder of real data."""

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
    """The same model on disk, for processes of their own."""
    folder = tmp_path_factory.mktemp("model")
    tiny_llama(vocabulary=VOCABULARY).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def paragraph(number):
    return f"Harbour {number} lies in the north. Its keeper is called Keeper{number}. " * 2


@pytest.fixture(scope="session")
def small_data(tmp_path_factory):
    """Own texts in the benchmarks' formats: nothing here is copied from a data set."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "qa").mkdir()
    (folder / "longbench").mkdir()
    articles = [
        {
            "title": f"Coast {a}",
            "paragraphs": [
                {
                    "context": paragraph(10 * a + p),
                    "qas": [
                        {
                            "question": f"Who keeps harbour {10 * a + p}?",
                            "answers": [{"text": f"Keeper{10 * a + p}"}] * 2,
                            "is_impossible": False,
                        },
                        {"question": "Who paints it?", "answers": [], "is_impossible": True},
                    ],
                }
                for p in range(10)
            ],
        }
        for a in range(20)
    ]
    (folder / "qa" / "squad_small.json").write_text(json.dumps({"data": articles}))
    hotpot = [
        {
            "question": f"Which harbour is older, {n} or {n + 1}?",
            "answer": f"Harbour {n}",
            "supporting_facts": [[f"H{n}", 0], [f"H{n + 1}", 0]],
            "context": [
                [f"H{n + i}", [f"Harbour {n + i} is {n + i} years old. " * 3]] for i in range(10)
            ],
        }
        for n in range(100, 220, 10)
    ]
    (folder / "qa" / "hotpot_small.json").write_text(json.dumps(hotpot))
    records = [
        {
            "input": f"Who keeps harbour {n}?",
            "context": " ".join(paragraph(i) for i in range(n, n + 3 + 4 * (n % 3))),
            "answers": [f"Keeper{n}", f"the keeper Keeper{n}"],
            "all_classes": None,
        }
        for n in range(6)
    ]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "longbench" / "qasper.small.jsonl").write_text(lines)
    shots = {
        "input": "Dialogue: A: hi\r\nB: {hello}\nSummary: ",
        "context": "Dialogue: A: bye\r\nB: bye\nSummary: They part. \n" * 8,
        "answers": ["A greets B."],
        "all_classes": None,
    }
    (folder / "longbench" / "samsum.small.jsonl").write_text(json.dumps(shots) + "\n")
    return folder


@pytest.fixture(scope="module")
def experiment(small_data, request):
    """Of the module's `PANEL` over these texts."""
    return Experiment.from_dict({"model": "tiny", "data": str(small_data), **request.module.PANEL})


@pytest.fixture(scope="session")
def real_data():
    folder = os.environ.get("GRACEKV_EVAL_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("GRACEKV_EVAL_DATA names no folder of benchmark data")
    return Path(folder)
