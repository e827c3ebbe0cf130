"""A conversation of 200 turns that does not grow: `benchmarks/results/conversation.md`.

    OMP_NUM_THREADS=1 python benchmarks/conversation.py [--turns 60] [--ways compressed full]

A friend reads the demo's chapter aloud and tells twenty facts in turns 2 to 40; the replies are
given, so that every way has the same history. At four checkpoints, each fact is asked for from the
same state. Rows are stored in a folder per state of the code; the command skips ways that are
already there, so they can be measured one by one. Ways:

- compressed: older messages are compressed 4x, and a limit holds all entries, positions closed;
- full: the history uncompressed, as long as the model's positions last;
- window: only the newest 600 tokens;
- again: the whole history is compressed again at each checkpoint, to 600 entries per head.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import machine
import torch
from asked_text import facts
from matplotlib.figure import Figure

import gracekv
from gracekv.files import write_atomically
from gracekv.hf.smollm2 import load_smollm2

RESULTS = Path(__file__).parent / "results"
ROWS = Path("runs/conversation") / machine.digest()
ENTRIES, AFTER, EVERY, RATIO = 600, 256, 512, 4
CHECKPOINTS = 4
WAYS = ("compressed", "full", "window", "again")
BEGIN = "A friend reads a story aloud and tells some facts."
REPLY = " I see."
# What the friend tells and asks, how the answer begins, and what it must contain.
FACTS = (
    ("My name is Oliver.", "What is my name?", "Your name is", "Oliver"),
    ("I live in Lisbon.", "Which city do I live in?", "You live in", "Lisbon"),
    ("My dog is called Biscuit.", "What is my dog called?", "Your dog is called", "Biscuit"),
    ("My sister works as a dentist.", "What is my sister?", "Your sister works as a", "dentist"),
    ("My favourite colour is purple.", "Which colour?", "Your favourite colour is", "purple"),
    ("I was born in 1987.", "When was I born?", "You were born in", "1987"),
    ("I play the cello.", "Which instrument do I play?", "You play the", "cello"),
    ("My car is a Volvo.", "What is my car?", "Your car is a", "Volvo"),
    ("I am allergic to peanuts.", "What am I allergic to?", "You are allergic to", "peanuts"),
    ("My best friend is Martha.", "Who is my best friend?", "Your best friend is", "Martha"),
    ("I had pancakes for breakfast.", "What was my breakfast?", "You had", "pancakes"),
    ("My flat number is 42.", "What is my flat number?", "Your flat number is", "42"),
    ("My book is about volcanoes.", "What is my book about?", "Your book is about", "volcano"),
    ("My teacher comes from Norway.", "And my teacher?", "Your teacher comes from", "Norway"),
    ("My birthday is in October.", "When is my birthday?", "Your birthday is in", "October"),
    ("My son wants to be a pilot.", "And my son?", "Your son wants to be a", "pilot"),
    ("I lost my umbrella.", "What did I lose?", "You lost your", "umbrella"),
    ("The password is marzipan.", "What is the password?", "The password is", "marzipan"),
    ("My train leaves from platform nine.", "My train?", "It leaves from platform", "nine"),
    ("My neighbour keeps ostriches.", "And my neighbour?", "Your neighbour keeps", "ostrich"),
)


class Says:
    """A logits processor that forces the model to say these tokens."""

    def __init__(self, ids: list[int]) -> None:
        self._left = iter(ids)

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        said = torch.full_like(scores, -torch.inf)
        said[:, next(self._left)] = 0
        return said


def spoken(count: int) -> list[str]:
    """What the friend says in each turn."""
    chapter = files("gracekv.data").joinpath("alice_chapter_1.txt").read_text(encoding="utf-8")
    text = " ".join(chapter.split())
    size = 170
    parts = [text[i : i + size].strip() for i in range(0, len(text) - size, size)]
    turns = [parts[number % len(parts)] for number in range(count)]
    for number, (told, *_) in enumerate(FACTS):
        turns[2 * number + 1] = f"{told} {turns[2 * number + 1]}"
    return turns


def turn(text: str) -> str:
    return f"Friend: {text}\nYou:"


def asked() -> Iterator[tuple[str, str]]:
    """The questions, up to the start of the answer, and what it must contain."""
    for _, question, start, held in FACTS:
        yield f"{turn(question)} {start}", held


def told(chat: Any) -> int:
    """How many facts the conversation knows; the questions are not kept in it."""
    right, (now, undo) = 0, marked(chat)
    # If a compaction is due, a single one serves all questions.
    chat._compress_older()
    state, back = marked(chat)
    for question, held in asked():
        right += held in chat.ask(question, max_new_tokens=8)
        chat.__dict__.update(state)
        back()
    chat.__dict__.update(now)
    undo()
    return right


def marked(chat: Any) -> tuple[dict[str, Any], Any]:
    """The conversation's attributes, and a function that restores its cache to this state."""
    return dict(chat.__dict__), chat._cache.mark()


def talk(model: Any, tokenizer: Any, turns: list[str], marks: list[int], *, full: bool) -> Any:
    """Hold the conversation; yields one row per turn."""
    prompt = gracekv.Prompt.from_chat(tokenizer, context=BEGIN, template=False, separator="\n")
    book = gracekv.compress(model, prompt, ratio=1)
    limit = gracekv.Limit(entries_per_head=ENTRIES, every=EVERY, positions="closed")
    policy = gracekv.Compaction(after=AFTER, ratio=RATIO)
    units = len(book.packed.layers) * book.packed.layers[0].heads
    reply = [*tokenizer(REPLY, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    with book.chat() if full else book.chat(limit, policy) as chat:
        for number, text in enumerate(turns, 1):
            if full and len(chat._ids) > model.config.max_position_embeddings - 400:
                return
            clocks = time.perf_counter(), time.process_time()
            chat.ask(turn(text), max_new_tokens=8, logits_processor=[Says(reply)])
            row = {
                "turn": number,
                "tokens": len(chat._ids),
                "entries": chat.accounting.entries / units,
                "wall": time.perf_counter() - clocks[0],
                "cpu": time.process_time() - clocks[1],
            }
            yield row | ({"right": told(chat)} if number in marks else {})


def history(tokenizer: Any, turns: list[str]) -> torch.Tensor:
    """Token ids [T] of the conversation after these turns."""
    parts = [BEGIN, *(f"\n{turn(text)}{REPLY}" for text in turns)]
    return torch.tensor(
        [x for part in parts for x in tokenizer(part, add_special_tokens=False)["input_ids"]]
    )


def anew(model: Any, tokenizer: Any, turns: list[str], marks: list[int], *, window: bool) -> Any:
    """At each checkpoint, read the newest tokens or compress the whole history; yields rows."""
    for mark in marks:
        ids = history(tokenizer, turns[:mark])
        if window:
            ids = ids[-ENTRIES:]
        if len(ids) > model.config.max_position_embeddings - 400:
            return
        whole = gracekv.Prompt.from_ids(ids, (0, len(ids)), tokenizer=tokenizer)
        prompt = dataclasses.replace(whole, template=False, separator="\n")
        clocks = time.perf_counter(), time.process_time()
        budget: Any = {"ratio": 1} if window else {"entries_per_head": ENTRIES}
        book = gracekv.compress(model, prompt, **budget)
        row = {
            "turn": mark,
            "tokens": len(ids),
            "entries": float(book.packed.entries().float().mean()),
        }
        row |= {"wall": time.perf_counter() - clocks[0], "cpu": time.process_time() - clocks[1]}
        right = 0
        for question, held in asked():
            said = book.ask(question, max_new_tokens=8)
            right += held in said
        yield row | {"right": right}


def measure(way: str, turns: list[str], marks: list[int]) -> None:
    """Write the rows of one way, unless they exist."""
    path = ROWS / f"{way}-{len(turns)}.json"
    if path.exists():
        return
    ROWS.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load_smollm2()
    # Loads kernels; its tokens are not counted.
    first = gracekv.Prompt.from_ids(history(tokenizer, turns[:8]), (0, 200), tokenizer=tokenizer)
    gracekv.compress(model, first, ratio=4)
    read = [0]

    def count(_: Any, args: Any, given: dict[str, Any]) -> None:
        read[0] += given["input_ids"].numel() if given.get("input_ids") is not None else 0

    model.register_forward_pre_hook(count, with_kwargs=True)
    if way in ("compressed", "full"):
        made = talk(model, tokenizer, turns, marks, full=way == "full")
    else:
        made = anew(model, tokenizer, turns, marks, window=way == "window")
    rows = []
    for row in made:
        rows.append(row | {"read": read[0]})
        if "right" in row:
            print(way, rows[-1], flush=True)
            write_atomically(path.with_suffix(".part"), json.dumps(rows).encode())
    write_atomically(path, json.dumps(rows).encode())


def page(found: dict[str, list[dict[str, Any]]], count: int) -> str:
    """The rows of all ways as a page."""
    lines = [
        f"# A conversation of {count} turns",
        "",
        *facts(),
        f"- conversation: {found['compressed'][-1]['tokens']:,} tokens; {len(FACTS)} facts, told "
        f"in turns 2 to {2 * len(FACTS)}, all asked at each checkpoint; every reply is given",
        f"- compressed: `Compaction(after={AFTER}, ratio={RATIO})` and `Limit(entries_per_head="
        f'{ENTRIES}, every={EVERY}, positions="closed")`; full: as long as the model\'s 8,192 '
        f"positions last; window: the newest {ENTRIES} tokens; again: the whole history compressed "
        f"to {ENTRIES} entries a head",
        "- entries: per KV head on average; CPU s: of a turn, the median of the last ten, or of a "
        "reading; read: tokens that the model has read in all, questions included; sent again: "
        "tokens that a stateless engine reads up to then, where the history is sent with each turn",
        "",
        "| turn | way | facts | entries | CPU s | read | sent again |",
        "|--:|---|--:|--:|--:|--:|--:|",
    ]
    lengths = {row["turn"]: row["tokens"] for way in ("compressed", "full") for row in found[way]}
    for way, rows in found.items():
        for number, row in enumerate(rows):
            if "right" not in row:
                continue
            last = rows[max(0, number - 9) : number + 1] if len(rows) > CHECKPOINTS else [row]
            seconds = statistics.median(one["cpu"] for one in last)
            again = sum(length for turn, length in lengths.items() if turn <= row["turn"])
            lines.append(
                f"| {row['turn']} | {way} | {row['right']} of {len(FACTS)} | {row['entries']:,.0f} "
                f"| {seconds:.2f} | {row['read']:,} | {again:,} |"
            )
    return "\n".join(lines) + "\n"


def drawn(found: dict[str, list[dict[str, Any]]], count: int) -> Figure:
    """Entries and facts over turns."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    held, told = figure.subplots(1, 2)
    colours = dict(zip(WAYS, ("tab:blue", "tab:gray", "tab:orange", "tab:green"), strict=True))
    for way, rows in found.items():
        turns = [row["turn"] for row in rows]
        style = "-" if len(rows) > CHECKPOINTS else "--"
        held.plot(turns, [row["entries"] for row in rows], style, color=colours[way], label=way)
        marks = [row for row in rows if "right" in row]
        right = [row["right"] for row in marks]
        told.plot([row["turn"] for row in marks], right, "o" + style, color=colours[way], label=way)
    held.set_ylabel("entries per head")
    told.set_ylabel(f"facts answered, of {len(FACTS)}")
    told.set_ylim(-0.5, len(FACTS))
    for axes in (held, told):
        axes.set_xlabel("turn")
        axes.set_xlim(0, count + 5)
        axes.spines[["top", "right"]].set_visible(False)
    told.legend(frameon=False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=200, help=f"at least {2 * len(FACTS)}")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    args = parser.parse_args()
    if args.turns < 2 * len(FACTS):
        parser.error(f"the facts are told in {2 * len(FACTS)} turns; got --turns {args.turns}")
    turns = spoken(args.turns)
    marks = [args.turns * (n + 1) // CHECKPOINTS for n in range(CHECKPOINTS)]
    for way in args.ways:
        measure(way, turns, marks)
    paths = {way: ROWS / f"{way}-{args.turns}.json" for way in WAYS}
    if missing := [way for way, path in paths.items() if not path.exists()]:
        print(f"No page without the rows of {', '.join(missing)}.")
        return
    found = {way: json.loads(path.read_bytes()) for way, path in paths.items()}
    write_atomically(RESULTS / "conversation.md", page(found, args.turns).encode())
    drawn(found, args.turns).savefig(RESULTS / "conversation.png", dpi=110)


if __name__ == "__main__":
    main()
