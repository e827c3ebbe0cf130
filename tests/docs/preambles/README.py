from pathlib import Path

from transformers import AutoTokenizer

import gracekv

book = Path("book.txt").read_text()
_tokenizer = AutoTokenizer.from_pretrained("")
prompt_a = gracekv.Prompt.from_chat(_tokenizer, context=book, question="Who is Dinah?")
prompt_b = gracekv.Prompt.from_chat(_tokenizer, context=book[500:], question="Who is Alice?")
