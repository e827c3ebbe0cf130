"""RULER's tasks: every seed, length and index gives a valid sample."""

import functools
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gracekv.errors import TaskError
from gracekv.evaluate import ruler
from gracekv.evaluate.sample import chat_prompt
from gracekv.evaluate.sources import Sources, ruler_forms
from gracekv.evaluate.tasks import Task
from gracekv.evaluate.texts import largest
from support.covering import cases

# The smallest unit that a task can add, in tokens of the test tokenizer, where it exceeds 2 %.
UNIT = {"niah_multikey_2": 45, "niah_multikey_3": 140, "qa_1": 60, "qa_2": 80}


@pytest.fixture(scope="module")
def make(tokenizer, small_data):
    sources = Sources(small_data)

    def make(name, length=1536, seed=7, index=0):
        return Task(f"ruler:{name}", length, seed).sample(index, sources, tokenizer)

    # Samples are immutable; most tests read the same ones.
    make.kept = functools.cache(make)
    return make


@pytest.mark.parametrize("name", ruler.TASKS)
@pytest.mark.parametrize("long", [False, True])
def test_fills_the_length_without_exceeding_it(make, tokenizer, name, long):
    # The test tokenizer splits cwe's rare words.
    length = (6144 if name == "cwe" else 4096) if long else 1536
    most = length - ruler_forms()["tasks"][name]["max_new_tokens"]
    tokens = len(chat_prompt(make(name, length), tokenizer).ids)
    assert most - max(0.02 * length, UNIT.get(name, 0)) <= tokens <= most


def test_the_haystack_is_the_user_s_essays_if_there_are_any(tmp_path, tokenizer):
    file = tmp_path / "essays/PaulGrahamEssays.json"
    file.parent.mkdir()
    for text in ('\n{"text": "Cats sleep. "}', '[{"text": "Cats"}, {"text": "sleep. "}]'):
        file.write_text(text, encoding="utf-8")
        sources = Sources(tmp_path)
        sample = Task("ruler:niah_single_2", 600, 7).sample(0, sources, tokenizer)
        assert sample.context.count("Cats sleep.") > 50
        assert sources.digest("essay").startswith(file.name)
    for text in ('{"texts": []}', "<html>", ""):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(TaskError, match="is no essay file"):
            Sources(tmp_path).essay  # noqa: B018


@pytest.mark.parametrize("name", ruler.TASKS)
def test_same_arguments_same_sample_and_another_index_another_text(make, name):
    sample = make.kept(name)
    assert make(name) == sample
    assert make(name, index=1).context != sample.context
    if not name.startswith("qa"):
        assert make(name, seed=8).answers != sample.answers


@pytest.mark.parametrize("name", ruler.TASKS)
def test_a_prompt_leaves_no_slot_of_its_template_open(make, name):
    sample = make.kept(name)
    texts = sample.instruction + sample.question + sample.answer_prefix
    assert not re.search(r"\{[a-z_]+\}", texts)
    assert all(answer.strip() for answer in sample.answers)


@pytest.mark.parametrize("name", [name for name in ruler.TASKS if name.startswith("niah")])
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=cases(2, 5))
def test_every_needle_is_present_once_and_the_answer_is_derivable(make, name, seed):
    sample = make(name, 1536, seed)
    # One of wonderwords' adjectives contains a space.
    found = re.findall(r"One of the special magic (\w+) for (.+?) is: (\S+)\.", sample.context)
    args = ruler_forms()["tasks"][name]["args"]
    asked = {key for _, key, _ in found if key in sample.question}
    assert len(asked) == args["num_needle_q"]
    assert sorted(v for _, key, v in found if key in asked) == sorted(sample.answers)
    assert {kind for kind, _, _ in found} == {args["type_needle_v"]}
    for answer in sample.answers:
        assert sample.context.count(answer) == 1
        assert answer not in sample.question + sample.answer_prefix + sample.instruction
    if args["type_haystack"] != "needle":
        assert len(found) == max(args["num_needle_k"], args["num_needle_q"]) * args["num_needle_v"]


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=5)
def test_a_chain_leads_from_the_value_to_every_answer(make, seed):
    sample = make("vt", 1536, seed)
    value = re.search(r"assigned the value (\d+)", sample.question)[1]
    lines = [line for line in sample.context.split("\n") if line.startswith("VAR")]
    reached, order = {value}, []
    for line in lines:
        new, old = re.fullmatch(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)", line).groups()
        assert old in reached
        reached.add(new)
        order.append(new)
    assert tuple(order) == sample.answers
    assert len(set(order)) == 5
    # The demonstration is solved, and is about other names.
    assert re.search(r"they are: (?:[A-Z]{3} ?){5}\n\n", sample.instruction)


@pytest.mark.parametrize(("length", "often", "seldom"), [(2048, 6, 1), (6144, 30, 3)])
def test_common_words_are_common(make, length, often, seldom):
    sample = make("cwe", length)
    counts = Counter(re.split(r"(?:^| )\d+\. ", sample.context)[1:])
    assert {word for word, count in counts.items() if count == often} == set(sample.answers)
    assert {count for word, count in counts.items() if word not in sample.answers} == {seldom}
    assert len(sample.answers) == 10
    assert not set(re.split(r"(?:^| )\d+\. ", sample.instruction)) & set(sample.answers)


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=5)
def test_coded_answers_are_the_three_most_frequent_words(make, seed):
    sample = make("fwe", 1536, seed)
    counts = Counter(sample.context.split(" ")).most_common(5)
    assert counts[0][0] == "..."
    assert tuple(word for word, _ in counts[1:4]) == sample.answers
    assert counts[3][1] > counts[4][1]


@pytest.mark.parametrize("name", ["qa_1", "qa_2"])
def test_questions_come_with_their_documents(make, name):
    for index in (0, 3):
        sample = make(name, 1536, index=index)
        numbers = [int(n) for n in re.findall(r"Document (\d+):\n", sample.context)]
        assert numbers == list(range(1, len(numbers) + 1))
        if name == "qa_1":
            assert sample.answers[0] in sample.context
        else:
            older, newer = re.findall(r"\d+", sample.question)
            assert f"Harbour {older} is" in sample.context
            assert f"Harbour {newer} is" in sample.context
    told = [f"Keeper{i}" if name == "qa_1" else f"H{100 + 10 * i}\n" for i in range(5)]
    assert len({make(name, 1536, index=i).context.index(text) for i, text in enumerate(told)}) > 1


IMPOSSIBLE = [
    ({"name": "cwe", "length": 256}, r"sample 0 of ruler:cwe.* does not fit the length 256"),
    ({"name": "qa_2", "index": 12}, "has 12 samples here; sample 12 does not exist"),
    ({"name": "qa_2", "length": 60_000}, "not enough data for ruler:qa_2"),
]


@pytest.mark.parametrize(("asked", "said"), IMPOSSIBLE)
def test_what_cannot_be_made_is_refused(make, asked, said):
    with pytest.raises(TaskError, match=said):
        make(**asked)


def test_questions_without_a_folder_name_the_file():
    with pytest.raises(TaskError, match=r"qa/squad\*\.json"):
        Sources().questions("squad")


@given(most=st.integers(0, 300), limit=st.integers(0, 300))
def test_largest_finds_the_border(most, limit):
    assert largest(lambda size: size <= limit, 0, most) == min(most, limit)
