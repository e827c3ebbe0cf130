"""Texts that follow others: their ids decode to the given text, with nothing before it."""

from os.path import commonprefix

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer, UnigramTrainer
from transformers import PreTrainedTokenizerFast

from gracekv.errors import PromptError
from gracekv.prefill import chat_text, messages
from gracekv.prefill.chat_text import check_question, continued, plain_ids
from gracekv.prefill.history import History
from gracekv.prefill.messages import turn_ids
from gracekv.prefill.prompt import Prompt
from gracekv.testing.models import tiny_tokenizer
from support.chapter import CHAPTER as TEXT
from support.skips import needs_smollm2

WORDS = sorted(set(TEXT.split()))


def sentencepiece_like(kind):
    """Puts a space before every text, like Llama 2's ("bpe") and T5's ("unigram")."""
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    if kind == "bpe":
        raw = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        steps = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        raw.normalizer = normalizers.Sequence(steps)
        trainer = BpeTrainer(vocab_size=900, special_tokens=special, show_progress=False)
        raw.train_from_iterator(TEXT.split(), trainer)
    else:
        raw = Tokenizer(models.Unigram())
        raw.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = UnigramTrainer(
            vocab_size=600, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
        )
        raw.train_from_iterator(TEXT.split("\n"), trainer)
    # Also decodes the leading space, so that an extra one shows.
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    raw.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>")


BYTES = tiny_tokenizer()
TOKENIZERS = {
    "bytes": BYTES,
    "letters": tiny_tokenizer(["anine abc ano .the |x 0of\n\n"] * 300, vocabulary=900),
    "bpe": sentencepiece_like("bpe"),
    "unigram": sentencepiece_like("unigram"),
}


def changed(tokenizer, texts):
    return [x for x in texts if tokenizer.decode(continued(tokenizer, x)) != x]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_every_word_is_read_as_it_is(name):
    assert changed(TOKENIZERS[name], [*WORDS, *(" " + word for word in WORDS)]) == []


@given(text=st.text("ab\u00e9nt \n.0|\u4e2d\u0301\U0001f642", max_size=8))
@example(text="nine rabbits")
@pytest.mark.parametrize("name", ["bytes", "letters"])
def test_every_text_is_read_as_it_is(name, text):
    assert changed(TOKENIZERS[name], [text]) == []


def test_where_no_lead_comes_off_the_text_is_encoded_alone():
    def whole_texts(text, **_):
        return {"input_ids": [text]}  # one token, so no lead can be told from what follows it

    assert (continued(whole_texts, "nine"), continued(whole_texts, "")) == (["nine"], [])


def test_a_tokenizer_that_changes_case_is_not_refused():
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    assert tokenizer.decode(continued(tokenizer, "No RABBITS")) == "no rabbits"


@pytest.mark.parametrize("passage", ["nine rabbits", "not one", "then", "a"])
def test_a_context_goes_on_with_the_passage(passage):
    prompt = Prompt.from_chat(BYTES, context="It was late.").extended(passage)
    context = prompt.ids[prompt.spans.context_start : prompt.spans.context_end]
    assert BYTES.decode(context) == "It was late." + passage


@pytest.mark.parametrize("question", ["no one was there?", "then?", "a"])
def test_questions_without_a_separator_are_read_as_they_are(question):
    for after in ("context", "answer"):
        asked = [{"role": "user", "content": question}]
        [ids] = turn_ids(BYTES, asked, separator="", template=False, after=after)
        assert BYTES.decode(ids) == question


def test_a_history_of_many_turns_is_encoded_twice_not_once_per_turn(monkeypatch):
    said = [{"role": ("user", "assistant")[n % 2], "content": TEXT[: 7 * n]} for n in range(31)]
    read = []
    monkeypatch.setattr(chat_text, "plain_ids", lambda t, x: read.append(x) or plain_ids(t, x))
    turns = turn_ids(BYTES, said, "", True)
    assert [BYTES.decode(ids).count("<|user|>") for ids in turns] == [1] * 31
    assert sum(map(len, read)) < 2.5 * sum(len(BYTES.decode(ids)) for ids in turns)


SHOWN = "<|user|>{{ m.content }}<|end|>{% endfor %}"
EACH = "<s>{% for m in messages %}"
OPENS = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
FORMATS = {
    "as Mistral": EACH + SHOWN,
    "as Phi 4": EACH + SHOWN + "{{ '<|assistant|>' if add_generation_prompt else '</s>' }}",
    "as GPT-OSS": EACH + "<|user|>{{ m.content }}{{ '</s>' if loop.last and m.role == 'assistant' "
    "and not add_generation_prompt else '<|end|>' }}{% endfor %}" + OPENS,
    "as Gemma": "<s>{% for m in messages[1:] %}{% if loop.first %}{{ messages[0].content }}"
    "{% endif %}" + SHOWN + OPENS,
    "as Qwen 3": EACH + "{{ '(thought)' if loop.last and m.role == 'assistant' }}" + SHOWN + OPENS,
    "as Command R": EACH
    + "{{ '<|assistant|>' if m.role == 'assistant' }}"
    + SHOWN
    + "<|assistant|>",
    "as Nemotron": EACH + "{% if not loop.last or m.role == 'user' %}" + SHOWN[:-12] + "{% endif %}"
    "{% endfor %}" + OPENS + "(thought){{ messages[-1].content if messages[-1].role != 'user' }}",
}


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.mark.parametrize("count", range(1, 5))
@pytest.mark.parametrize("name", FORMATS)
def test_messages_follow_those_of_the_context_as_the_template_shows_them(name, count, tokenizer):
    tokenizer.chat_template = FORMATS[name]
    roles = ("system", "user", "assistant", "user")
    said = [{"role": x, "content": TEXT[9 * n : 9 * n + 9].strip()} for n, x in enumerate(roles)]
    prompt = Prompt.from_messages(tokenizer, said[:count])
    ids = prompt.ids[: prompt.spans.context_end].tolist()
    assert len(ids) < len(prompt.ids)
    new = History().new_turns(tokenizer, said, None, count)
    for message, (_, own) in zip(said[count:], new, strict=count < 4):
        assert message["content"] in tokenizer.decode(own)
    ids += [x for _, own in new for x in own]
    text = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(ids) == text
    assert ids == plain_ids(tokenizer, text)


def test_a_tool_s_result_follows_a_call_and_the_call_s_own_end(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls"
        " %}{{ raise_exception('no call') }}{% endif %}<|user|>{{ m.content or 'search' }}"
        "{{ '</s>' if m.tool_calls else '<|end|>' }}{% endfor %}" + OPENS
    )
    call = {"id": "1", "type": "function", "function": {"name": "search", "arguments": {}}}
    said = [{"role": "user", "content": "Who?"}, {"role": "assistant", "tool_calls": [call]}]
    told = {"role": "tool", "tool_call_id": "1", "content": "A cat."}
    [(_, ids)] = History(said).new_turns(tokenizer, [*said, told], None, 1)
    assert tokenizer.decode(ids) == "</s><|user|>A cat.<|end|><|assistant|>"
    tokenizer.chat_template = tokenizer.chat_template.replace("'</s>' if", "'<s><|end|>' if")
    # The model wrote the whole call except for the token that ends it.
    read = plain_ids(tokenizer, "A call, as it writes it<s>")
    [(_, ids)] = History(said, ids=read).new_turns(tokenizer, [*said, told], None, 1)
    assert tokenizer.decode(ids) == "<|end|><|user|>A cat.<|end|><|assistant|>"


ASKED = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "(a call)"}]
CALL = {"function": {"name": "search", "arguments": '{"for": "a cat"}'}}
TOLD = [ASKED[0], {"role": "assistant", "content": None, "tool_calls": [CALL]}]
TOLD.append({"role": "tool", "content": "A cat."})


@pytest.mark.parametrize("wrote", ['{"for": "a cat"}<s>', "(its own way)<s>", "(its own way)"])
@pytest.mark.parametrize("tools", [None, [{"call": '{"for": <what>}<s>'}]])
def test_a_call_that_nothing_follows_may_be_shown_with_more(tools, wrote, tokenizer):
    """As in Qwen 3: with a thought, so that the two renderings differ before the call."""
    tokenizer.chat_template = (
        "{{ tools[0].call if tools }}{% for m in messages %}<|user|>{{ '(thought)' if loop.last "
        "and m.tool_calls }}{{ m.content or m.tool_calls[0].function.arguments | tojson + '<s>' }}"
        "<|end|>{% endfor %}" + OPENS
    )
    for end in ("<s>", "(no token of the format)"):
        tokenizer.chat_template = tokenizer.chat_template.replace("'<s>'", f"'{end}'")
        read = plain_ids(tokenizer, wrote.replace("<s>", end))
        [(_, ids)] = History(ASKED, tools, read).new_turns(tokenizer, TOLD, tools, 1)
        assert tokenizer.decode(ids) == "<|end|><|user|>A cat.<|end|><|assistant|>"


ARGUMENTS = [
    (
        "{% for k, v in m.tool_calls[0].function.arguments | items %}{{ k }}={{ v }}{% endfor %}",
        "for=a cat",
    ),
    ("{{ m.tool_calls[0].function.arguments + '.' }}", '{"for": "a cat"}.'),
]


@pytest.mark.parametrize(("show", "shown"), ARGUMENTS)
def test_arguments_may_come_as_json(show, shown, tokenizer):
    tokenizer.chat_template = "{% for m in messages %}<|user|>{% if m.content %}{{ m.content }}"
    tokenizer.chat_template += "{% else %}" + show + "{% endif %}<|end|>{% endfor %}" + OPENS
    prompt = Prompt.from_messages(tokenizer, TOLD)
    text = f"<|user|>Who?<|end|><|user|>{shown}<|end|><|user|>A cat.<|end|><|assistant|>"
    assert tokenizer.decode(prompt.ids) == text


def test_tokens_of_the_format_stay_with_it_whatever_blanks_they_take_in():
    """As in Phi 4."""
    tokenizer = tiny_tokenizer()
    new = [AddedToken(x, lstrip=True, rstrip=True, special=True) for x in ("<|sep|>", "<|stop|>")]
    tokenizer.add_tokens(new)
    tokenizer.chat_template = "<|user|><|sep|>{{ messages[0].content }}<|stop|>"
    prompt = Prompt.from_chat(tokenizer, context="\n" * 12 + "It was late." + "\n" * 12)
    context = prompt.ids[prompt.spans.context_start : prompt.spans.context_end]
    assert tokenizer.decode(context) == "It was late."


def test_only_the_first_part_of_a_prompt_has_a_blank_before_it():
    slow = type("Slow", (PreTrainedTokenizerFast,), {"is_fast": False})
    tokenizer = slow(tokenizer_object=TOKENIZERS["bpe"].backend_tokenizer, unk_token="<unk>")
    tokenizer.chat_template = "(user){{ messages[0].content }}(answer)"
    prompt = Prompt.from_chat(tokenizer, context="late", question="Who?", answer_prefix="Alice")
    assert tokenizer.decode(prompt.ids) == " (user)late\n\nWho?(answer)Alice"


def test_a_text_keeps_its_own_last_end_token():
    text = "<|user|>Who?<|end|>It was late.</s>"
    assert BYTES.decode(Prompt.from_chat(BYTES, context=text, template=False).ids) == text


def test_what_the_model_wrote_of_an_answer_s_end_is_not_read_again(tokenizer):
    tokenizer.chat_template = EACH + SHOWN.replace("<|end|>", "</s><|end|>") + OPENS
    said = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Alice"}]
    for end, rest in (("</s>", ""), ("", "</s>")):
        read = plain_ids(tokenizer, "Alice" + end)
        [(_, ids)] = History(said, ids=read).new_turns(tokenizer, [*said, said[0]])
        assert tokenizer.decode(ids) == rest + "<|end|><|user|>Who?</s><|end|><|assistant|>"


def test_a_tokenizer_whose_chats_are_no_text_is_refused():
    mistral = type("MistralCommonBackend", (type(tiny_tokenizer()),), {})
    with pytest.raises(PromptError, match="mistral_format=False"):
        Prompt.from_chat(mistral(tokenizer_object=Tokenizer(models.BPE())), context="It was late.")


def test_passages_and_questions_that_are_not_unicode_are_refused():
    prompt = Prompt.from_chat(BYTES, context="It was late.")
    with pytest.raises(PromptError, match=r"passage must be valid Unicode.* at position 2\. Dec"):
        prompt.extended("a \ud800")
    with pytest.raises(PromptError, match=r"question must be valid Unicode.* at position 0\. Dec"):
        check_question("\ud800")


@pytest.mark.model
@needs_smollm2
def test_the_real_tokenizer_reads_every_word_as_it_is():
    from gracekv.hf.smollm2 import load_smollm2

    _, tokenizer = load_smollm2()
    texts = [before + word for before in ("", " ", "\n", "\n\n") for word in WORDS]
    assert changed(tokenizer, [*texts, "nine rabbits", "not one", "then", "a"]) == []


@given(st.text("ab", max_size=30), st.text("ab", max_size=30), st.text("ab", max_size=30))
def test_what_two_texts_share_is_their_common_prefix(shared, one, other):
    one, other = shared + one, shared + other
    want = len(commonprefix([one, other]))  # noqa: RUF071
    assert messages.shared_length(one, other) == want
    assert messages.shared_length(list(one), list(other)) == want
