"""A fast tokenizer with one token per byte."""


def byte_tokenizer(words, **special):
    """Its ids are places in `words`: signs of bytes as in byte-level BPE, and special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(words)}
    inner = Tokenizer(models.BPE(vocabulary, [], unk_token=special.get("unk_token")))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, **special)
