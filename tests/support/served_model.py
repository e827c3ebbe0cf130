"""The embedded model and a store with its contexts, for engines and servers."""

from types import SimpleNamespace

from support.chapter import CHAPTER

RECIPES = {
    "global": {"pipeline": "gracekv-agnostic", "ratio": 3},
    "tight": {"pipeline": "gracekv-agnostic", "ratio": 8},
    "merged": {"pipeline": "gracekv", "ratio": 4},
    "full": {"pipeline": "fullkv", "ratio": 1},
}
# Of each context. An engine on one core reads a few hundred characters per second.
CHARACTERS = 1600


def serve(store):
    """The model and its folder, contexts in a store, and gracekv's results for them.

    One context per recipe, named after it, and "asked", which includes its question.
    """
    import gracekv
    from gracekv.hf.smollm2 import load_smollm2
    from gracekv.vllm import export

    model, tokenizer = load_smollm2()
    results = {}
    for number, (name, options) in enumerate(RECIPES.items()):
        context = CHAPTER[number * 1500 : number * 1500 + CHARACTERS]
        prompt = gracekv.Prompt.from_chat(tokenizer, context=context)
        results[name] = gracekv.compress(model, prompt, **options)
    question = gracekv.Prompt.from_chat(
        tokenizer, context=CHAPTER[:CHARACTERS], question="Who is Alice?"
    )
    results["asked"] = gracekv.compress(model, question, ratio=4)
    for name, result in results.items():
        export(result, store / name)
    folder = tokenizer.name_or_path
    return SimpleNamespace(
        model=model, tokenizer=tokenizer, store=store, results=results, folder=folder
    )
