"""An agent with a search tool, whose conversation is compressed as it grows.

The tool's results are long and soon less important, so they are compressed; the system prompt (the
task) and the questions keep all their entries. The embedded model is too small to call tools, so
the search terms are given. Runs on a CPU: python examples/agent.py
"""

from importlib.resources import files

import gracekv
from gracekv.hf.smollm2 import load_smollm2

TASK = "You answer questions about a story, with the help of a search."
QUESTIONS = {
    "Rabbit": "What does the Rabbit take out of its waistcoat-pocket?",
    "bottle": "What is written on the bottle?",
    "key": "What is the key made of?",
    "cake": "What is marked on the cake in currants?",
    "Dinah": "Who is Dinah?",
}


def search(story: str, word: str) -> str:
    """The sentences that contain `word`, at most 1,000 characters."""
    found = [one for one in story.replace("\n", " ").split(". ") if word in one]
    return ". ".join(found)[:1000]


def main() -> None:
    """Ask all questions in one conversation, and print how many entries it holds."""
    model, tokenizer = load_smollm2()
    story = (files("gracekv") / "data" / "alice_chapter_1.txt").read_text(encoding="utf-8")
    messages: list[dict[str, str]] = [{"role": "system", "content": TASK}]
    prompt = gracekv.Prompt.from_messages(tokenizer, messages)
    policy = gracekv.Compaction(after=300, ratio=4, recent=2, keep=("user",))
    with gracekv.compress(model, prompt, ratio=1).chat(compact=policy) as chat:
        for word, question in QUESTIONS.items():
            messages.append({"role": "user", "content": question})
            messages.append({"role": "tool", "content": search(story, word)})
            answer = chat.send(messages, max_new_tokens=24)
            messages.append({"role": "assistant", "content": answer})
            print(f"{question}\n  {answer.strip()}\n  {chat.accounting.entries:,} entries")


if __name__ == "__main__":
    main()
