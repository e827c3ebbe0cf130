"""From samples to ids: nothing lost, one BOS, and only the context truncated."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gracekv.errors import TaskError
from gracekv.evaluate.sample import chat_prompt, render
from gracekv.evaluate.sources import Sources
from gracekv.evaluate.tasks import FORMS, SUITES, expand, record_sample


@pytest.fixture(scope="module")
def record(small_data):
    return record_sample("qasper", 0, Sources(small_data))


def test_a_longbench_record_keeps_its_own_prompt(record):
    assert record.instruction.endswith("Article: ")
    assert record.question.endswith("Question: Who keeps harbour 0?\n\nAnswer:")
    assert record.answers == ("Keeper0", "the keeper Keeper0")
    assert record.chat


def test_few_shot_sets_have_no_chat_format_and_stop_at_a_line(small_data, tokenizer):
    shots = record_sample("samsum", 0, Sources(small_data))
    assert (shots.chat, shots.first_line, shots.stop) == (False, True, "\n")
    text = "".join(chat_prompt(shots, tokenizer).parts)
    # Braces and carriage returns of the record survive.
    assert text.endswith("\n\nDialogue: A: hi\r\nB: {hello}\nSummary: ")
    assert "<|user|>" not in text


def test_the_ids_are_those_of_the_whole_prompt(record, tokenizer):
    prompt = chat_prompt(record, tokenizer)
    assert tokenizer.decode(prompt.ids) == "".join(prompt.parts)
    assert prompt.ids.tolist().count(tokenizer.bos_token_id) == 1
    start, end = prompt.spans.context_start, prompt.spans.context_end
    assert tokenizer.decode(prompt.ids[start:end]).strip() == record.context.strip()


@given(room=st.integers(5, 60), middle=st.booleans())
def test_truncation_keeps_instruction_and_question(record, tokenizer, room, middle):
    full = chat_prompt(record, tokenizer)
    spans = full.spans
    limit = spans.length - spans.context_length + room
    cut = render(record, tokenizer, limit, "middle" if middle else "start", 48)
    kept = cut.prompt
    assert len(kept.ids) == min(limit, spans.length)
    assert cut.removed == max(0, spans.context_length - room)
    start, end = kept.spans.context_start, kept.spans.context_end
    assert torch.equal(kept.ids[:start], full.ids[: spans.context_start])
    assert torch.equal(kept.ids[end:], full.ids[spans.context_end :])
    context = full.ids[spans.context_start : spans.context_end]
    head = (room + 1) // 2 if middle else room
    if cut.removed:
        expected = torch.cat([context[:head], context[len(context) - (room - head) :]])
        assert torch.equal(kept.ids[start:end], expected)
    assert kept.spans.question_end - end == spans.question_end - spans.context_end


def test_what_may_not_be_cut_is_refused(record, tokenizer):
    for size, how, why in ((100, "error", "than the 100 allowed"), (10, "middle", "Allow more")):
        with pytest.raises(TaskError, match=why):
            render(record, tokenizer, size, how, 48)


def test_the_reference_follows_the_prompt_as_text(record, tokenizer):
    found = render(record, tokenizer, 10_000, "error", 48)
    assert tokenizer.decode(found.answer_ids) == " Keeper0"
    # The same content gives the same digest, another answer a different one.
    assert found.digest == render(record, tokenizer, 10_000, "error", 48).digest


def test_suites_hold_known_tasks_only():
    assert all(name in FORMS for names in SUITES.values() for name in names)
    assert len(SUITES["ruler"]) == 13
    assert expand(["retrieval", "ruler:niah_multikey_1"]) == list(SUITES["retrieval"])
    with pytest.raises(TaskError, match="Did you mean 'retrieval'"):
        expand(["retreival"])


def test_data_that_is_not_here_is_named(small_data, tmp_path):
    with pytest.raises(TaskError, match=r"longbench/trec\.\*jsonl, .* data\.zip"):
        Sources(small_data).records("longbench:trec")
    with pytest.raises(TaskError, match="does not exist"):
        Sources(tmp_path / "none")
