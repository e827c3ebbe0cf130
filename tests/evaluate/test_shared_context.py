"""One cache and many questions: the texts, the turns, and their rows."""

import itertools
import json
import math
from dataclasses import replace

import pytest
import torch

from gracekv.errors import ConfigError, TaskError
from gracekv.evaluate import read_rows, run
from gracekv.evaluate.measures import measure
from gracekv.evaluate.sample import render_questions
from gracekv.evaluate.sources import Sources
from gracekv.evaluate.tasks import SHARED, Task

PANEL = {"tasks": list(SHARED), "methods": ["fullkv", "snapkv"], "ratios": [3], "lengths": [700]}
PANEL |= {"samples": 1, "max_new_tokens": 3, "protocol": "query_agnostic", "recent_share": 0.5}


@pytest.fixture(scope="module")
def sources(small_data):
    return Sources(small_data)


@pytest.fixture
def rendered(sources, tokenizer):
    def rendered(name, index=0, seed=3, limit=700):
        sample = Task(name, 700, seed).sample(index, sources, tokenizer)
        return sample, render_questions(sample, tokenizer, limit, "error", 48)

    return rendered


@pytest.mark.parametrize("name", SHARED)
def test_every_question_can_be_answered_from_the_context(rendered, name):
    sample, found = rendered(name)
    asked = sample.questions()
    assert len({one.question for one in asked}) == len(asked) >= 5
    assert all(one.answers[0] in sample.context for one in asked)
    assert all(one.context == sample.context for one in asked)
    cap = Task(name, 700, 3).max_new_tokens
    # Filled up to a pair of the object, or a paragraph.
    assert 700 - cap - 120 < max(len(one.prompt.ids) for one in found) <= 700 - cap
    assert rendered(name)[0] == sample
    assert rendered(name, seed=4)[0] != sample


def test_lookups_ask_for_the_objects_own_values(rendered):
    sample, _ = rendered("shared_context:kv")
    values = json.loads(sample.context)
    for one in sample.questions():
        assert one.answers == (str(values[one.question.split('"')[1]]),)


def test_passages_of_different_samples_are_of_different_articles(rendered, sources):
    assert Task("shared_context:squad", 700, 3).available(99, sources).stop == len(sources.articles)
    one, other = (rendered("shared_context:squad", index)[0] for index in (0, 1))
    texts = [set(sample.context.split("\n")[1::3]) for sample in (one, other)]
    assert not texts[0] & texts[1]
    with pytest.raises(TaskError, match="sample 20 does not exist"):
        rendered("shared_context:squad", 20)


@pytest.mark.parametrize("name", SHARED)
def test_all_prompts_share_the_context_and_turns_follow_each_other(rendered, tokenizer, name):
    sample, found = rendered(name)
    end = found[0].prompt.spans.context_end
    for before, one in itertools.pairwise(found):
        assert one.prompt.spans.context_end == end
        assert torch.equal(one.prompt.ids[: end + 1], before.prompt.ids[: end + 1])
        said = torch.cat([before.prompt.ids, before.answer_ids])
        follows = torch.equal(one.prompt.ids[: len(said)], said)
        assert follows == sample.in_turns == (name == "shared_context:kv")
    for number, (one, asked) in enumerate(zip(found, sample.questions(), strict=True), 1):
        text = tokenizer.decode(one.prompt.ids)
        assert text.rstrip().endswith(asked.answer_prefix.strip())
        assert text.count("<|user|>") == (number if sample.in_turns else 1)
        assert tokenizer.decode(one.answer_ids).strip() == asked.answers[0]


def test_several_questions_are_never_cut(rendered):
    with pytest.raises(TaskError, match="with all its turns, more than the 600 allowed"):
        rendered("shared_context:kv", limit=600)
    with pytest.raises(TaskError, match="more than the 300 allowed"):
        rendered("shared_context:squad", limit=300)


def test_cells_compress_once_for_all_questions(experiment, model, tokenizer, tmp_path, monkeypatch):
    from gracekv.evaluate import worker

    made, real = [], worker.compress
    monkeypatch.setattr(worker, "compress", lambda *a, **k: made.append(k) or real(*a, **k))
    done = run(experiment, tmp_path, model=model, tokenizer=tokenizer)
    assert (done.written, done.failed) == (4, 0)
    # Two cells for each of two samples, and a FullKV reference for each sample.
    assert len(made) == 6
    for row in read_rows(tmp_path):
        parts = row["questions"]
        assert row["settings"]["protocol"] == "query_agnostic"
        assert len(parts) == len(row["answers"]) >= 5
        assert row["score"] == pytest.approx(sum(part["score"] for part in parts) / len(parts))
        divergences = [part["fidelity"]["kl"] for part in parts]
        assert row["fidelity"]["kl"] == pytest.approx(sum(divergences) / len(parts))
        logs = [math.log(max(kl, 1e-4)) for kl in divergences]
        assert measure("log_kl").read(row) == pytest.approx(sum(logs) / len(logs))
        if row["method"] == "fullkv":
            assert row["fidelity"]["kl"] == 0
        else:
            assert max(divergences) > 1e-4
    # A second run finds every row.
    assert run(experiment, tmp_path, model=model, tokenizer=tokenizer).kept == 4


def test_one_cache_for_many_questions_cannot_have_seen_them(experiment):
    with pytest.raises(ConfigError, match="query_agnostic"):
        replace(experiment.panels[0], protocol="query_aware")


def test_a_panel_begins_at_its_first_sample(experiment, model, tokenizer, tmp_path):
    tasks = ("longbench:qasper", "shared_context:squad")
    panel = replace(experiment.panels[0], tasks=tasks, first=5, samples=2, methods=("fullkv",))
    run(replace(experiment, panels=(panel,)), tmp_path, model=model, tokenizer=tokenizer)
    found = sorted((row["task"], row["index"]) for row in read_rows(tmp_path))
    # There are six records.
    assert found == [(tasks[0], 5), (tasks[1], 5), (tasks[1], 6)]
