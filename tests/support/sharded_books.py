"""Checks of several kinds of models, in one process and in several that share a model.

`steady` says whether rounding could change a result: to count as equal, it must also be that of
models whose weights are off by one part in a million.
"""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import gracekv
from gracekv.hf.questions import ask_ids
from gracekv.testing.models import tiny_model, tiny_tokenizer

VOCABULARY, RATIO, TOKENS = 300, 3, 4
TEXT = " ".join(f"word{i % 37} and{i % 11}" for i in range(24))
QUESTIONS = ["Where is word7?", "And what of word11 and word3?"]
PASSAGE = torch.randint(5, VOCABULARY, (48,), generator=torch.Generator().manual_seed(5))
SIZES = {"layers": 4, "heads": 8, "kv_heads": 4, "dim": 8, "vocabulary": VOCABULARY}
BITS = {
    "8 bits": ("gracekv-plus", {"name": "uniform", "bits": 8}),
    "4 bits": ("gracekv-plus", {"name": "uniform", "bits": 4}),
    "allocated": ("gracekv-plus-allocated", "allocated"),
    "a price in each head": ("rdkv", "rate_distortion"),
    # Trees, whose auction must end at the budget in bytes.
    "trees": ("gracekv", {"name": "uniform", "bits": 4}),
}
# transformers has no plan for the attention of GPT-OSS.
PLANS = {
    "gpt_oss": {
        **{f"model.layers.*.self_attn.{x}_proj": "colwise" for x in "qkv"},
        "model.layers.*.self_attn.o_proj": "rowwise",
        "model.layers.*.self_attn.sinks": "colwise",
        "model.layers.*.self_attn": "local_params",
    }
}
EAGER = {"gpt_oss": {"attn_implementation": "eager"}}
MIXED = {
    "gemma3_text": {"window": 24},
    "gpt_oss": {"window": 24, "attention": "eager", "bias": True},
    "qwen3_next": {"partial": 0.5},
}


def save_models(folder: Path) -> None:
    """Write the checkpoints."""
    for name, options in MIXED.items():
        tiny_model(name, seed=3, **SIZES, **options).save_pretrained(folder / name)


def load_model(folder: Path, name: str, **how):
    return AutoModelForCausalLM.from_pretrained(folder / name, **EAGER.get(name, {}), **how).eval()


def near_models(folder: Path, name: str):
    """The model, and two whose weights are off by 1e-6 of their size."""
    for seed in range(3):
        model, rng = load_model(folder, name), torch.Generator().manual_seed(seed)
        if seed:
            with torch.no_grad():
                for weight in model.parameters():
                    weight.mul_(1 + 1e-6 * torch.randn(weight.shape, generator=rng).clamp(-3, 3))
        yield model


def steady(found, folder: Path, name: str):
    """The findings for the model, which must also be those for nearby models."""
    want, *near = map(found, near_models(folder, name))
    assert near == [want, want], "rounding would choose otherwise"
    return want


def positions(packed):
    """Position of each entry, by sequence, layer and head."""
    return [
        [[layer.head(g, s)[2].tolist() for g in range(layer.heads)] for layer in packed.layers]
        for s in range(packed.sequences)
    ]


def facts(result):
    """The entries of a result, as plain data."""
    kept = result.accounting
    return {
        "positions": positions(result.packed),
        "ids": result.generate_ids(TOKENS).tolist(),
        "entries": kept.entries.tolist(),
        "numbers": [kept.budget, kept.spent, kept.bytes, kept.full_bytes, kept.spent_bytes],
        "widths": [[share.bits, share.entries, share.bytes] for share in kept.widths],
        "kept": dict(kept.other_bytes),
    }


def book_facts(model, path: Path):
    """One context: compressed, saved to `path`, loaded again, asked, chatted with and extended."""
    prompt = gracekv.Prompt.from_chat(tiny_tokenizer(vocabulary=VOCABULARY), context=TEXT)
    book = gracekv.compress(model, prompt, ratio=RATIO)
    found = {"compressed": facts(book)}
    book.save(path)
    loaded = gracekv.load(path, model, tokenizer=prompt.tokenizer)
    found["loaded"] = facts(loaded)
    found["asked"] = ask_ids(loaded, QUESTIONS, TOKENS, {}).tolist()
    chat = loaded.chat()
    found["chat"] = [chat.ask(question, TOKENS) for question in QUESTIONS]
    chat.compress(ratio=1)
    found["chat"].append(chat.ask(QUESTIONS[0], TOKENS))
    longer = loaded.extend(PASSAGE, ratio=RATIO)
    found["extended"] = facts(longer.extend(PASSAGE.flip(0), ratio=RATIO))
    return found


def context_of(prompt):
    """The ids of `prompt` without a question."""
    return gracekv.Prompt.from_ids(prompt.ids, (4, len(prompt.ids)))


def bits_facts(model, prompt):
    """One prompt with quantised entries, by recipe; and a context that is extended."""
    found = {}
    for name, (recipe, precision) in BITS.items():
        pipeline = gracekv.Pipeline.from_dict({"precision": precision}, base=recipe)
        found[name] = facts(gracekv.compress(model, prompt, ratio=RATIO, pipeline=pipeline))
    bits = gracekv.Pipeline.from_dict({"precision": "allocated"}, base="gracekv-agnostic")
    # The paper's slots are exchanged, in steps that all processes must count alike.
    for name, pipeline in (("extended", bits), ("extended trees", "gracekv")):
        book = gracekv.compress(model, context_of(prompt), ratio=RATIO, pipeline=pipeline)
        found[name] = facts(book.extend(prompt.ids[20:70], ratio=RATIO))
    return found
