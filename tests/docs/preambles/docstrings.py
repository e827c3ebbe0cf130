from pathlib import Path

import transformers

import gracekv
import gracekv.hf
import gracekv.report
from gracekv.evaluate import Experiment, Panel

model = transformers.AutoModelForCausalLM.from_pretrained("")
tokenizer = transformers.AutoTokenizer.from_pretrained("")
text = Path("book.txt").read_text()
prompt = gracekv.Prompt.from_chat(tokenizer, context=text, question="Who is Dinah?")
result = grace = gracekv.compress(model, prompt, ratio=8)
book = gracekv.compress(model, gracekv.Prompt.from_chat(tokenizer, context=text), ratio=2)
plus = result
messages = [{"role": "user", "content": text}]
tools = None
inputs = {"input_ids": prompt.ids[None]}
snap = gracekv.compress(model, prompt, ratio=8, pipeline="snapkv")
suite = Experiment(
    model="smollm2", panels=(Panel(tasks=("ruler:niah_single_1",), ratios=(8.0,), lengths=(1024,)),)
)
