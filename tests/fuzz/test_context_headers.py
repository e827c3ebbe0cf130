"""Crafted headers of contexts, with and without a valid checksum, raise named errors."""

import json
from random import Random

import gracekv
from gracekv.errors import PromptError, StoreError
from gracekv.testing.models import tiny_model, tiny_tokenizer
from gracekv.vllm import ContextStore, export, request
from gracekv.vllm.served_model import model_facts
from support.covering import LONG, cases
from support.forged_contexts import signed
from support.mutations import JUNK, mutated_bytes

HEADERS = cases(150, 2000)


def crafted(good, rng):
    """Whether the checksum is valid, and the text of a header with a changed value."""
    data = json.loads(good)
    kind = rng.choice(["field", "field", "model", "rope", "drop", "add", "deep", "number", "bytes"])
    if kind == "bytes":
        return False, mutated_bytes(good.encode(), rng)[1].decode(errors="replace")
    place = {"model": data["model"], "rope": data["model"]["rope"]}.get(kind, data)
    field = rng.choice([x for x in place if x not in ("format", "sha256")])
    if kind == "drop":
        del place[field]
    else:
        place["more" if kind == "add" else field] = rng.choice(JUNK)
    fits = rng.random() < 0.7
    # JSON that no writer produces: values nested deeper than any stack, numbers beyond any float.
    if kind in ("deep", "number"):
        deep = rng.choice([800, 10**5])
        other = "[" * deep + "]" * deep if kind == "deep" else rng.choice(["1e999", "-1e999"])
        return False, json.dumps({**data, field: "HERE"}).replace('"HERE"', other)
    return fits, (signed(data) if fits else json.dumps(data))


def test_crafted_headers_are_refused(tmp_path, tally):
    model, tokenizer = tiny_model(vocabulary=500), tiny_tokenizer(vocabulary=500)
    prompt = gracekv.Prompt.from_chat(tokenizer, context="Alice was tired of sitting. " * 4)
    path = export(gracekv.compress(model, prompt, ratio=2), tmp_path / "book") / "header.json"
    good, facts_of_model = path.read_text(encoding="utf-8"), model_facts(model)
    want = ContextStore(tmp_path).header("book")
    for seed in range(HEADERS):
        fits, text = crafted(good, Random(seed))
        path.write_text(text, encoding="utf-8")
        store = ContextStore(tmp_path, model=facts_of_model)
        try:
            with tally:
                header = store.admit({"gracekv": "book"})
                store.load("book")
                request(store, "book", "Who is tired?", tokenizer)
        except (StoreError, PromptError) as error:
            said = str(error)
            short = len(said) < 1000 and str(tmp_path) not in said
            tally.add("refused" if short else f"refused with too much: {said}")
            continue
        # A header with a forged checksum may have other text, but never other entries.
        facts = ("length", "entries", "bytes", "digest")
        assert [getattr(header, x) for x in facts] == [getattr(want, x) for x in facts]
        assert fits or header == want, f"{seed}: an edit without its checksum was served"
        tally.add("another context's words" if header != want else "unchanged")
    assert set(tally.outcomes) <= {"refused", "another context's words", "unchanged"}
    if LONG:
        assert tally.slowest < 1.0
