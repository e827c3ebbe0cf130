"""Tasks with long answers: their traces, and rows of a cache with a limit."""

import json

import pytest

from gracekv.errors import TaskError
from gracekv.evaluate import Experiment, read_rows, run
from gracekv.evaluate.sources import Sources
from gracekv.evaluate.tasks import LONG, Task

TASK = "long_output:countdown"
# Long enough for several intervals.
TRACE = "\n".join(f"{n} + {n} = {2 * n}" for n in range(30))
RECORDS = {
    "path_traversal": {
        "question_repr": ["Aba", "Bab"],
        "context_nl": "Aba leads to Bab.",
        "answer_nl": "From Aba, take a bus to Bab.",
    },
    "countdown": {"nums": [1, 2], "target": 3, "demonstration": TRACE},
    "tom_tracking": {"story": "Step 0: none.", "question": "Where?", "solution": "- Step 0: here"},
    "pseudo_to_code": {"pseudocode_lines": ["print"], "code_lines": ["int main() {", "}"]},
}
PROMPTS = {
    "path_traversal": "Rules. {city_context}\n\nNow find the route from {src_city} to {dst_city}.",
    "countdown": "Rules. {demonstration}\n\n[Problem]\nNumbers: {nums}\nTarget: {target}",
    "tom_tracking": "Rules {{x}}. {story}\n\n[QUESTION]\n{question}",
    "pseudo_to_code": "Rules. {pseudocode}\n\n[CODE]:",
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "longproc"
    folder.mkdir()
    for name, record in RECORDS.items():
        other = {**record, "demonstration": "2 + 1 = 3"}
        (folder / f"{name}_0.5k.first2.json").write_text(json.dumps([record, other]))
        # JSON is YAML.
        (folder / f"{name}.prompts.yaml").write_text(json.dumps({"USER_PROMPT": PROMPTS[name]}))
    return Sources(folder.parent)


@pytest.mark.parametrize("name", LONG)
def test_a_sample_holds_the_whole_trace(name, sources, tokenizer):
    task = Task(name, None, 0)
    sample = task.sample(0, sources, tokenizer)
    assert sample.context
    assert sample.question
    assert sample.reference(3) == sample.answers[0].strip()
    assert task.group == "long_output"
    assert list(task.available(9, sources)) == [0, 1]
    with pytest.raises(TaskError, match="2 samples: none from number 2 on"):
        task.available(9, sources, first=2)
    assert "0.5k" in task.source(sources)


def test_the_prompt_is_part_of_the_data(tmp_path):
    (tmp_path / "longproc").mkdir()
    (tmp_path / "longproc/countdown_0.5k.json").write_text(json.dumps([RECORDS["countdown"]]))
    found = set()
    for text in ("Rules.", "Other rules.", "Rules."):
        (tmp_path / "longproc/countdown.prompts.yaml").write_text(f"USER_PROMPT: {text}")
        found.add(Task(TASK, None, 0).source(Sources(tmp_path)))
    assert len(found) == 2
    for text in ("Rules.", "{", "PROMPT: Rules.", "USER_PROMPT: '{other}'"):
        (tmp_path / "longproc/countdown.prompts.yaml").write_text(text)
        with pytest.raises(TaskError, match=r"^countdown\.prompts\.yaml is no|^Record 0 .*'other'"):
            Task(TASK, None, 0).sample(0, Sources(tmp_path), None)


def test_demonstrations_are_of_other_problems(sources, tokenizer):
    sample = Task("long_output:countdown", None, 0).sample(0, sources, tokenizer)
    assert "2 + 1 = 3" in sample.context
    assert sample.answers == (TRACE,)


def test_without_data_the_files_are_named(tokenizer):
    with pytest.raises(TaskError, match=r"longproc/countdown_0\.5k.*prompts\.yaml"):
        Task("long_output:countdown", None, 0).sample(0, Sources(), tokenizer)


@pytest.fixture
def rows_of(sources, model, tokenizer, tmp_path):
    def rows_of(methods, ratio):
        """Rows by method, none of which failed."""
        few = {"methods": methods, "ratios": [ratio], "samples": 1, "generate": False}
        what = {"model": "tiny", "tasks": [TASK], "data": str(sources.folder)}
        experiment = Experiment.from_dict(what | few)
        done = run(experiment, tmp_path, model=model, tokenizer=tokenizer)
        assert (done.written, done.failed) == (len(methods), 0)
        return {row["method"]: row for row in read_rows(tmp_path)}

    return rows_of


def test_rows_tell_what_each_interval_lost(rows_of):
    methods = [f"snapkv[decode={name}]" for name in ("none", "random", "fitted")]
    rows = rows_of([*methods, "fullkv"], 3)
    assert rows["fullkv"]["fidelity"]["kl"] == 0
    assert "by_interval" not in rows["fullkv"]
    for name in methods:
        parts, whole = rows[name]["by_interval"], rows[name]["fidelity"]
        assert [part["tokens"] for part in parts[:-1]] == [64] * (len(parts) - 1)
        for what in ("kl", "nll", "top1"):
            total = sum(part[what] * part["tokens"] for part in parts)
            assert total / whole["tokens"] == pytest.approx(whole[what], abs=1e-6)
        # Without a cut, only rounding loses anything.
        assert (rows[name]["fidelity"]["kl"] > 1e-6) == (name != methods[0])
    assert rows[methods[0]]["by_interval"] != rows[methods[1]]["by_interval"]


def test_a_long_question_leaves_the_context_half_of_what_remains(rows_of):
    # At 6x, the prompt and the last tokens alone would exceed the limit.
    rows = rows_of(["snapkv[decode=random]", "snapkv[decode=none]"], 6)
    assert [row.get("error") for row in rows.values()] == [None, None]
