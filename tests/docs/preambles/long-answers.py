from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import gracekv

model, tokenizer = AutoModelForCausalLM.from_pretrained(""), AutoTokenizer.from_pretrained("")
_text = Path("book.txt").read_text()[:600]
book = gracekv.compress(model, gracekv.Prompt.from_chat(tokenizer, context=_text), ratio=4)
_asked = gracekv.Prompt.from_chat(tokenizer, context=_text, question="Who is Dinah?")
result = gracekv.compress(model, _asked, ratio=4)
