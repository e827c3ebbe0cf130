"""Token texts concatenate to the prompt, with any tokenizer."""

import pytest

from gracekv import Prompt
from gracekv.report.data import token_texts
from support.byte_tokenizer import byte_tokenizer

tokenizers = pytest.importorskip("tokenizers")

TEXT = "Caf\u00e9 🙂\n\n<script>alert(1)</script> \u05d0\u05d1 end."


@pytest.fixture(scope="module")
def by_bytes():
    """A fast tokenizer with one token per byte, so that characters are split."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    return byte_tokenizer([*letters, "<s>"], bos_token="<s>")


def test_texts_are_cut_from_the_prompt(by_bytes):
    prompt = Prompt.from_chat(by_bytes, context=TEXT, question="Why 🙂?", template=False)
    bare = Prompt.from_ids(prompt.ids, (0, 10), tokenizer=by_bytes)
    # Without the prompt's text they are decoded.
    for one in (bare, prompt):
        texts = token_texts(one.ids, one.tokenizer)
        assert len(texts) == len(prompt.ids)
        assert "".join(texts) == "".join(prompt.parts)
    # Four bytes share one character, which one token gets.
    assert texts.count("🙂") == 2
    assert texts.count("") == 2 * 3 + 1 + 2


def test_bytes_that_are_no_text_do_not_swallow_the_rest(by_bytes):
    wrong = by_bytes.convert_tokens_to_ids("ð")
    letters = [by_bytes.convert_tokens_to_ids(letter) for letter in "abc"]
    prompt = Prompt.from_ids([wrong] * 6 + letters, (0, 5), tokenizer=by_bytes)
    texts = token_texts(prompt.ids, prompt.tokenizer)
    assert len(texts) == 9
    assert "".join(texts).endswith("abc")


@pytest.mark.parametrize("text", ["e \ufffd\ufffd\ufffd🙂 end", "\ufffd🙂\ufffd" * 2 + "\n\nx"])
def test_a_replacement_character_of_the_text_does_not_swallow_others(by_bytes, text):
    texts = token_texts(by_bytes(text, return_tensors="pt")["input_ids"][0], by_bytes)
    assert ("".join(texts), texts.count("🙂")) == (text, text.count("🙂"))


def test_a_special_token_shows_its_name(by_bytes):
    ids = [by_bytes.bos_token_id, *by_bytes("ab", add_special_tokens=False)["input_ids"]]
    bare = Prompt.from_ids(ids, (1, 3))
    # The text does not hold it, so tokenising it again gives other ids, and they are decoded.
    known = Prompt(bare.ids, bare.spans, ("", "ab", "", ""), by_bytes)
    assert token_texts(known.ids, known.tokenizer) == ["<s>", "a", "b"]


def test_without_a_tokenizer_ids_stand_for_themselves():
    prompt = Prompt.from_ids([7, 0, 96], (0, 2))
    assert token_texts(prompt.ids, prompt.tokenizer) == ["⟨7⟩ ", "⟨0⟩ ", "⟨96⟩ "]


def test_a_plain_decoder_keeps_its_blanks(words):
    prompt = Prompt.from_ids(range(9), (0, 5), tokenizer=words())
    texts = token_texts(prompt.ids, prompt.tokenizer)
    assert texts[3] == " word3"
    assert texts[6] == " word6.\n"
