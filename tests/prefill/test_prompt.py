"""Prompts from chat texts and from ids: spans and refusals."""

from itertools import pairwise
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from gracekv.errors import PromptError
from gracekv.prefill import PromptSpans
from gracekv.prefill.chat_text import turn_change
from gracekv.prefill.prompt import Prompt

TEXT = "What is the code of the room?\n\nThe code of room seven is 4 1 9. Read this: " * 3
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|user|>\n{{ m['content'] | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def trained(chat):
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|user|>", "<|end|>", "<|assistant|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=330, special_tokens=special, initial_alphabet=alphabet)
    raw.train_from_iterator([TEXT], trainer)
    ends = [("<s>", 0), ("</s>", 1)]
    raw.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = TEMPLATE if chat else None
    return tokenizer


class Slow:
    """A tokenizer without offsets of its tokens."""

    is_fast = False

    def __init__(self, inner):
        self.inner = inner
        self.eos_token_id, self.bos_token_id = inner.eos_token_id, inner.bos_token_id
        self.chat_template = inner.chat_template
        self.apply_chat_template = inner.apply_chat_template

    def __call__(self, text, add_special_tokens, truncation):
        return self.inner(text, add_special_tokens=add_special_tokens)


FAST = {chat: trained(chat) for chat in (True, False)}


def pieces(prompt, tokenizer):
    s, ids = prompt.spans, prompt.ids
    cuts = [0, s.context_start, s.context_end, s.question_end, s.length]
    return [tokenizer.decode(ids[a:b]) for a, b in pairwise(cuts)]


@pytest.mark.parametrize("slow", [False, True])
def test_a_chat_prompt_is_cut_where_the_texts_meet(slow):
    tokenizer = FAST[True]
    texts = {"context": "The code of room seven is 419.", "question": "What is the code?"}
    around = {"instruction": "Read this:", "answer_prefix": "The code is"}
    prompt = Prompt.from_chat(Slow(tokenizer) if slow else tokenizer, **texts, **around)

    assert pieces(prompt, tokenizer) == [
        "<s><|user|>\nRead this:\n\n",
        "The code of room seven is 419.",
        "\n\nWhat is the code?",
        "<|end|>\n<|assistant|>\nThe code is",
    ]
    assert tuple(pieces(prompt, tokenizer)) == prompt.parts
    assert prompt.ids.tolist().count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize("slow", [False, True])
def test_without_a_chat_template_the_texts_follow_each_other(slow):
    tokenizer = FAST[False]
    prompt = Prompt.from_chat(
        Slow(tokenizer) if slow else tokenizer, context="The code is 419.", question="What is it?"
    )

    assert pieces(prompt, tokenizer) == ["<s>", "The code is 419.", "\n\nWhat is it?", ""]


def test_an_empty_question_leaves_no_question_probes():
    with torch.device("meta"):  # as torch.set_default_device
        prompt = Prompt.from_chat(FAST[True], context="Code of room seven.", instruction="Read.")
    assert prompt.ids.is_cpu
    assert prompt.spans.question_end == prompt.spans.context_end
    assert pieces(prompt, FAST[True])[2:] == ["", "<|end|>\n<|assistant|>\n"]
    assert prompt.ids[prompt.spans.context_end :].tolist() == turn_change(FAST[True])


@given(
    context=st.text("aeo .\n4é🙂", min_size=1).filter(str.strip),
    question=st.text("aeo ?\n", max_size=8).filter(lambda text: not text or text.strip()),
    instruction=st.text("aeo :\n", max_size=8),
)
@pytest.mark.parametrize("chat", [True, False])
def test_joint_ids_are_those_of_the_unsplit_text(chat, context, **others):
    tokenizer = FAST[chat]
    prompt = Prompt.from_chat(tokenizer, context=context, **others)

    text = "".join(prompt.parts)
    whole = tokenizer(text, add_special_tokens=not chat)["input_ids"]
    assert prompt.ids.tolist() == (whole if chat else whole[:-1])
    # Tokens that cross a border move it by less than their length.
    spans, asked = prompt.spans, {"add_special_tokens": not chat, "return_offsets_mapping": True}
    offsets = tokenizer(text, **asked)["offset_mapping"]
    start, end = len(prompt.parts[0]), len(prompt.parts[0]) + len(context)
    inside = [i for i, (s, e) in enumerate(offsets) if start <= s < e <= end]
    touching = [i for i, (s, e) in enumerate(offsets) if s < end and e > start]
    if inside:
        assert spans.context_start <= inside[0]
        assert spans.context_end > inside[-1]
    assert spans.context_start >= touching[0]
    assert spans.context_end <= touching[-1] + 1


def test_a_token_across_a_border_goes_to_the_side_that_holds_most_of_it():
    class Fixed:
        is_fast, chat_template, eos_token_id, bos_token_id = True, None, None, None

        def __init__(self, offsets):
            self.offsets = offsets

        def __call__(self, text, **_):
            return {"input_ids": range(len(self.offsets)), "offset_mapping": self.offsets}

    # "ii\n\n" is [0, 4), "cccccc" [4, 10), "\n\nqq" [10, 14), "aa" [14, 16).
    def spans(*offsets):
        return Prompt.from_chat(
            Fixed(offsets), context="c" * 6, question="qq", instruction="ii", answer_prefix="aa"
        ).spans

    assert spans((0, 3), (3, 6), (6, 9), (9, 12), (12, 15), (15, 16)) == PromptSpans(1, 3, 5, 6)
    assert spans((0, 1), (1, 5), (5, 9), (9, 11), (11, 13), (13, 16)) == PromptSpans(2, 4, 5, 6)
    # Half and half: context before template, question before tail.
    assert spans((0, 3), (3, 5), (5, 9), (9, 11), (11, 13), (13, 15)) == PromptSpans(1, 4, 6, 6)


def test_question_probes_are_the_question_s_or_all():
    assert PromptSpans(4, 50, 60, 64).question_probes() == list(range(50, 60))
    assert PromptSpans(4, 50, 50, 64).question_probes() == list(range(48, 64))


def test_ids_may_come_in_any_whole_number_type():
    for ids in ([1, 2, 3, 4], [[1, 2, 3, 4]], torch.tensor([1, 2, 3, 4], dtype=torch.int32)):
        prompt = Prompt.from_ids(ids, context=(1, 3))
        assert prompt.ids.dtype == torch.int64
        assert prompt.spans == PromptSpans(1, 3, 4, 4)
    assert Prompt.from_ids([1, 2, 3, 4], context=(1, 2), question_end=3).spans.question_end == 3


def test_a_prompt_has_its_own_ids():
    ids = np.arange(1, 5)
    prompt = Prompt.from_ids(ids, context=(1, 3))
    ids[:] = 9
    assert prompt.ids.tolist() == [1, 2, 3, 4]


BAD_IDS = [
    ([[1, 2, 3]] * 2, {}, r"one sequence of shape \[T\] or \[1, T\].*one by one"),
    ([[1, 2], [3]], {}, "token ids of one sequence"),
    ("abc", {}, "token ids of one sequence"),
    ([0.5, 1.0, 2.0], {}, "whole numbers of at least 0; got torch.float32"),
    ([True, False, True], {}, "whole numbers of at least 0; got torch.bool"),
    ([1, -100, 3], {}, "at least 0; got torch.int64, -100"),
    ([], {}, "at least 2 tokens"),
    ([1], {"context": (0, 1)}, "at least 2 tokens"),
    ([1, 2, 3], {"context": (2, 2)}, "context start < context end <="),
    ([1, 2, 3], {"context": (0, 4)}, "context start < context end <="),
    ([1, 2, 3], {"context": (-1, 2)}, "context start < context end <="),
    ([1, 2, 3], {"context": 2}, r"two token positions, \(start, end\)"),
    ([1, 2, 3], {"context": (0.0, 2)}, r"two token positions, \(start, end\)"),
    ([1, 2, 3], {"question_end": 1}, "context end <= question_end <= length"),
    ([1, 2, 3], {"question_end": np.int64(2)}, "question_end takes .*; got int64"),
    ([1, 2, 3], {"question_end": 4}, "context end <= question_end <= length"),
]


@pytest.mark.parametrize(("ids", "fields", "message"), BAD_IDS)
def test_bad_ids_and_spans_are_refused(ids, fields, message):
    with pytest.raises(PromptError, match=message):
        Prompt.from_ids(ids, **({"context": (0, 2)} | fields))


MESSAGE = "{{ messages[0]['content'] }}"
CHANGED = MESSAGE.replace("}}", "| replace('code', 'CODE') }}")


def template(text):
    tokenizer = trained(True)
    tokenizer.chat_template = text
    return tokenizer


BAD_TEXTS = [
    (lambda: FAST[True], {"context": ""}, "context is empty"),
    (lambda: FAST[True], {"context": " \n"}, "context is empty"),
    (lambda: FAST[True], {"context": ["a", "b"]}, "context must be text; got list"),
    (lambda: FAST[True], {"question": None}, "question must be text; got NoneType"),
    (lambda: FAST[True], {"question": " \n"}, r"A question must be non-empty text; got '"),
    (lambda: Mock(image_processor=1), {}, "pass the processor's tokenizer"),
    (lambda: FAST[True], {"template": MESSAGE}, "template is True or False; got str"),
    (lambda: template("fixed"), {}, "shows the user's message 0 times"),
    (lambda: template(2 * MESSAGE), {}, "shows the user's message 2 times"),
    (lambda: template(CHANGED), {}, "changes the question's text"),
]


@pytest.mark.parametrize(("make", "fields", "message"), BAD_TEXTS)
def test_bad_texts_and_templates_are_refused(make, fields, message):
    texts = {"context": "The room is seven.", "question": "What is the code?"} | fields
    with pytest.raises(PromptError, match=message):
        Prompt.from_chat(make(), **texts)


def test_texts_that_hold_the_mark_are_still_told_apart():
    text = "See [[context 2]]."
    prompt = Prompt.from_chat(
        FAST[True], context=text, question="What is [[context 0]]?", instruction="[[context 1]]"
    )
    assert prompt.parts[0].endswith("[[context 1]]\n\n")
    assert prompt.parts[1:3] == (text, "\n\nWhat is [[context 0]]?")


def test_piecewise_ids_keep_words_with_their_blanks():
    tokenizer = template("Read this: {{ messages[0]['content'] }}")
    texts = {"context": "The code of room seven.", "question": "What is the code?"}
    slow = Prompt.from_chat(Slow(tokenizer), **texts)
    assert torch.equal(slow.ids, Prompt.from_chat(tokenizer, **texts).ids)
    assert tokenizer.decode(slow.ids[: slow.spans.context_start]) == "Read this:"


def test_texts_may_bring_their_own_separators():
    parts = {"instruction": "Read: ", "context": "a b c", "question": "\nWhat is a?"}
    prompt = Prompt.from_chat(FAST[True], **parts, separator="")
    assert "".join(prompt.parts).startswith("<s><|user|>\nRead: a b c\nWhat is a?<|end|>")
    assert prompt.parts[2] == "\nWhat is a?"


def test_the_chat_format_can_be_left_out():
    plain = Prompt.from_chat(FAST[True], context="a b c", question="What?", template=False)
    assert "".join(plain.parts) == "a b c\n\nWhat?"
    same = Prompt.from_chat(FAST[False], context="a b c", question="What?")
    assert plain.ids.tolist() == same.ids.tolist()


@pytest.mark.parametrize(
    "name", ["context", "question", "instruction", "answer_prefix", "separator"]
)
def test_a_lone_surrogate_is_refused_by_the_text_s_name_and_its_place(name):
    texts = {"context": "The room is seven.", name: b"bad \xff".decode("utf-8", "surrogateescape")}
    message = rf"^{name} must be valid Unicode; .*'\\udcff', at position 4\. Decode it as UTF-8"
    with pytest.raises(PromptError, match=message):
        Prompt.from_chat(FAST[True], **texts)


def test_a_prompt_shows_as_one_short_line():
    shown = repr(Prompt.from_chat(FAST[True], context="a b c " * 200, question="What?"))
    assert shown.startswith("Prompt(spans=PromptSpans(")
    assert "a b c" not in shown
    assert len(shown) < 250
