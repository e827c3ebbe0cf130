"""Documents that vLLM compresses, and the requests that continue them."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors

from gracekv import Prompt
from gracekv.errors import PromptError, StoreError
from gracekv.prefill.fingerprint import tokenizer_marks
from gracekv.testing.models import tiny_tokenizer
from gracekv.vllm import document, request
from gracekv.vllm.requests import continuing, passage, question_text, split_document

TEXT = "Alice was beginning to get very tired of sitting by her sister on the bank."
SYSTEM = (
    "<s>{% if messages[0]['role'] != 'system' %}Be kind.{% endif %}"
    "{% for m in messages %}<|user|>\n{{ m['content'] | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)

THOUGHT = "{% if enable_thinking is defined %}<a>\n\n</a>\n\n{% endif %}"


def made(template):
    # Two line ends are one token if nothing follows.
    tokenizer = tiny_tokenizer(["a\n\n"] * 200, vocabulary=500)
    if template != "tiny":
        tokenizer.chat_template = template
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    return tokenizer


LINE = "<|user|>\n{{ messages[0]['content'] }}<|end|><|assistant|>"
TEMPLATES = {"chat": "tiny", "system": SYSTEM, "none": None, "newline": LINE}
TOKENIZERS = {name: made(template) for name, template in TEMPLATES.items()}
CHATS = ("chat", "system")
words = st.text("aZ 0.?\nß", min_size=1, max_size=12).map(lambda text: f"Who {text}?")


def header(made_with, **fields):
    known = {"tokenizer": tokenizer_marks(made_with), "has_question": False}
    return SimpleNamespace(**{**known, "separator": "\n\n", "template": True, **fields})


def chat(tokenizer, *messages, role="user", **options):
    said = [{"role": role if n == 0 else "user", "content": m} for n, m in enumerate(messages)]
    text = tokenizer.apply_chat_template(
        said, tokenize=False, add_generation_prompt=True, **options
    )
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(question=words)
def test_document_and_question_are_one_conversation(name, question):
    tokenizer = TOKENIZERS[name]
    ids = [*document(tokenizer, TEXT), *request(None, "book", question, tokenizer).prompt_ids]
    whole = Prompt.from_chat(tokenizer, context=TEXT, question=question)
    assert tokenizer.decode(ids) == tokenizer.decode(whole.ids)
    assert ids[: whole.spans.context_end] == whole.ids[: whole.spans.context_end].tolist()


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_server_finds_the_document(name):
    tokenizer = TOKENIZERS[name]
    ids = document(tokenizer, TEXT)
    prompt = Prompt.from_chat(tokenizer, context=TEXT)
    assert split_document(tokenizer, ids) == (ids, prompt.spans.context_start)
    if name in CHATS:
        assert split_document(tokenizer, chat(tokenizer, TEXT)) == (ids, prompt.spans.context_start)
        # Messages are a context unchanged, including the end of the last turn.
        said = Prompt.from_messages(tokenizer, [{"role": "user", "content": TEXT}])
        whole = said.ids[: said.spans.context_end].tolist()
        assert split_document(tokenizer, whole)[0] == whole
        # A text in no format of the tokenizer is a document as a whole.
        plain = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
        assert split_document(tokenizer, plain) == (plain, None)


def test_the_document_ends_before_an_answer_that_is_opened_with_a_thought():
    tokenizer = made("<|user|>{{ messages[0]['content'] }}<|end|><|assistant|>" + THOUGHT)
    ids = document(tokenizer, TEXT)
    whole = chat(tokenizer, TEXT, enable_thinking=False)
    assert tokenizer.decode(whole).endswith("</a>\n\n")
    assert split_document(tokenizer, whole) == (ids, 1)
    # An answer is a part of the document.
    for answer in ("No", "<|end|>"):
        text = f"<|end|><|assistant|>{answer}"
        answered = ids + tokenizer(text, add_special_tokens=False)["input_ids"]
        assert split_document(tokenizer, answered) == (answered, 1)


def test_a_tokenizer_without_rendered_chats_is_refused_by_name():
    kind = type("CachedMistralTokenizer", (), {"chat_template": None})
    with pytest.raises(StoreError, match="--tokenizer-mode hf"):
        split_document(kind(), [1, 2, 3])


def test_a_system_prompt_of_its_own_is_part_of_the_document():
    tokenizer = TOKENIZERS["system"]
    ids, start = split_document(tokenizer, chat(tokenizer, "Be brief.", TEXT, role="system"))
    assert start == 0
    assert tokenizer.decode(ids).endswith(f"<|user|>\n{TEXT}")


@pytest.mark.parametrize("name", TOKENIZERS)
@given(question=words)
def test_what_continues_a_context_is_left_and_a_chat_goes_on_in_its_turn(name, question):
    tokenizer = TOKENIZERS[name]
    ids = list(request(None, "book", question, tokenizer).prompt_ids)
    for sent in (ids, chat(tokenizer, question)) if name in CHATS else (ids,):
        assert continuing(tokenizer, "book", header(tokenizer), sent) == ids


@pytest.mark.parametrize("separator", ["", " ", "\n", "\n\n"])
def test_any_separator_takes_the_place_of_what_opens_a_chat(separator):
    tokenizer = TOKENIZERS["chat"]
    ids = chat(tokenizer, "no one?")
    got = continuing(tokenizer, "book", header(tokenizer, separator=separator), ids)
    assert tokenizer.decode(got) == f"{separator}no one?<|end|><|assistant|>"


def test_a_text_may_begin_as_every_text_does():
    tokenizer = TOKENIZERS["none"]
    ids = tokenizer("\n\nWho?")["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert continuing(tokenizer, "book", header(tokenizer), ids) == ids[1:]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_passage_has_no_special_tokens_before_it(name):
    tokenizer = TOKENIZERS[name]
    plain = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    told = [chat(tokenizer, TEXT)] if name in CHATS else []
    for sent in (plain, tokenizer(TEXT)["input_ids"], *told):
        assert passage(tokenizer, sent) == plain


def test_the_question_s_last_token_may_hold_a_part_of_the_template():
    tokenizer = tiny_tokenizer(["What?? " * 200], vocabulary=500)
    tokenizer.chat_template = "<|user|>{{ messages[0]['content'] }}?<|end|><|assistant|>"
    ids = list(request(None, "book", "Who?", tokenizer).prompt_ids)
    assert tokenizer.convert_ids_to_tokens(ids)[-3:] == ["??", "<|end|>", "<|assistant|>"]
    assert continuing(tokenizer, "book", header(tokenizer), ids) == ids
    # So may the document's.
    assert split_document(tokenizer, chat(tokenizer, "Who?"))[0] == document(tokenizer, "Who?")
    # An ending of only whitespace, like GLM 4's, does not tell a chat from a text.
    tokenizer.chat_template = "<|user|>\n{{ messages[0]['content'] }}<|assistant|>\n"
    ids = tokenizer("It was late.\n", add_special_tokens=False)["input_ids"]
    assert split_document(tokenizer, ids) == (ids, None)


def test_a_message_s_first_token_may_hold_the_end_of_the_opening():
    tokenizer, text = TOKENIZERS["newline"], f"\n\n{TEXT}"
    ids = document(tokenizer, text)
    start = Prompt.from_chat(tokenizer, context=text).spans.context_start
    assert start == Prompt.from_chat(tokenizer, context=TEXT).spans.context_start - 1
    for sent in (ids, chat(tokenizer, text)):
        assert split_document(tokenizer, sent) == (ids, start)
    assert tokenizer.decode(passage(tokenizer, chat(tokenizer, text))) == f"\n{text}"
    got = continuing(tokenizer, "book", header(tokenizer), chat(tokenizer, "\n\nWho?"))
    assert got == list(request(None, "book", "\n\nWho?", tokenizer).prompt_ids)


OTHERS = {
    "a text alone": lambda t: t("\n\nWho is it?", add_special_tokens=False)["input_ids"],
    "another system prompt": lambda t: chat(t, "Be brief.", "Who is it?", role="system"),
    "a text after the first token": lambda t: t("\n\nWho?<|end|>\n<|assistant|>\n")["input_ids"],
    "nothing but an opened turn": lambda t: document(t, "Who is it?"),
}


@pytest.mark.parametrize("how", OTHERS)
def test_what_begins_or_leaves_a_turn_is_refused(how):
    tokenizer = TOKENIZERS["system"]
    ids = OTHERS[how](tokenizer)
    with pytest.raises(StoreError, match="does not continue context 'book'"):
        continuing(tokenizer, "book", header(tokenizer), ids)
    # Nothing is known about these contexts, or another kind of question follows.
    for fields in ({"tokenizer": {}}, {"has_question": True}):
        assert continuing(tokenizer, "book", header(tokenizer, **fields), ids) == list(ids)


def test_what_follows_as_text():
    assert question_text(TOKENIZERS["none"]) == "\n\n{question}"
    assert question_text(TOKENIZERS["chat"]) == "\n\n{question}<|end|><|assistant|>"


def test_a_format_that_hides_the_message_is_no_format():
    tokenizer = made("{{ messages[0]['content'] }}{{ messages[0]['content'] }}")
    assert question_text(tokenizer) is None
    assert split_document(tokenizer, [5, 6]) == ([5, 6], 0)
    assert continuing(tokenizer, "book", header(tokenizer), [5, 6]) == [5, 6]
    with pytest.raises(PromptError, match="exactly once"):
        document(tokenizer, TEXT)


@pytest.mark.parametrize("question", ["", " ", None, 3])
def test_a_question_is_a_text(question):
    with pytest.raises(PromptError, match="A question must be non-empty text"):
        request(None, "book", question, TOKENIZERS["chat"])
