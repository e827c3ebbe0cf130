from pathlib import Path

from transformers import AutoTokenizer

import gracekv

text = Path("book.txt").read_text()
_tokenizer = AutoTokenizer.from_pretrained("")
prompt_a = gracekv.Prompt.from_chat(_tokenizer, context=text, question="Who is Dinah?")
prompt_b = gracekv.Prompt.from_chat(_tokenizer, context=text[500:], question="Who is Alice?")
