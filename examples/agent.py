"""An agent with a search tool, whose conversation is compressed as it grows.

The tool's results are long and soon less important, so they are compressed; the first message, with
the task, keeps all its entries. Runs on a CPU with the embedded model: python examples/agent.py
"""

from importlib.resources import files

import gracekv
from gracekv.hf.smollm2 import load_smollm2

TASK = "You answer questions about a story. Each question comes with what a search has found."
QUESTIONS = {
    "Rabbit": "What does the Rabbit take out of its waistcoat-pocket?",
    "bottle": "What is written on the bottle?",
    "key": "What is the key made of?",
    "cake": "What is marked on the cake in currants?",
    "Dinah": "Who is Dinah?",
}


def search(story: str, word: str) -> str:
    """The sentences with a word, at most 1,000 characters of them."""
    found = [one for one in story.replace("\n", " ").split(". ") if word in one]
    return ". ".join(found)[:1000]


def main() -> None:
    """Ask all questions in one conversation, and print how many entries it holds."""
    model, tokenizer = load_smollm2()
    story = (files("gracekv") / "data" / "alice_chapter_1.txt").read_text(encoding="utf-8")
    prompt = gracekv.Prompt.from_chat(tokenizer, context=TASK)
    policy = gracekv.Compaction(after=300, ratio=4, recent=2, keep=(0,))
    with gracekv.compress(model, prompt, ratio=1).chat(compact=policy) as chat:
        for word, question in QUESTIONS.items():
            answer = chat.ask(f"Found: {search(story, word)}\n\n{question}", max_new_tokens=24)
            print(f"{question}\n  {answer.strip()}\n  {chat.accounting.entries:,} entries")


if __name__ == "__main__":
    main()
