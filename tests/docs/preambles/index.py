from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = AutoModelForCausalLM.from_pretrained(""), AutoTokenizer.from_pretrained("")
text = Path("book.txt").read_text()
