"""A tokenizer trained in a fraction of a second, for random-weight models."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import Any

_CHAT = (
    "<s>{% for m in messages %}<|user|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_tokenizer(texts: Sequence[str] = (), vocabulary: int = 2000) -> Any:
    """A fast byte-level BPE tokenizer with a chat template; the same arguments give the same one.

    Args:
        texts: what it is trained on beside the chapter that comes with gracekv.
        vocabulary: number of token ids, special ones included. `tiny_model` takes the same number.

    Returns:
        A transformers `PreTrainedTokenizerFast`; any text survives encoding and decoding.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from tokenizers.trainers import BpeTrainer
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    raw.decoder = decoders.ByteLevel()
    chapter = (files("gracekv") / "data" / "alice_chapter_1.txt").read_text(encoding="utf-8")
    trainer = BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<s>", "</s>", "<|user|>", "<|end|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator([chapter, *texts], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = _CHAT
    return tokenizer
