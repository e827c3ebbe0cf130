"""An engine that compresses documents, as tests ask it, and what transformers makes of the same.

Its functions take a namespace with `engine`, and the `model` and `tokenizer` of transformers.
"""

import time

import torch

from support.engine_answers import MARGIN

QUESTION = "Why is she tired?"
TOKENS = 12


def params(order=None, tokens=1, **options):
    """Sampling parameters of a request, with what it says of contexts."""
    from vllm import SamplingParams

    extra = None if order is None else {"kv_transfer_params": {"gracekv": order}}
    return SamplingParams(temperature=0.0, max_tokens=tokens, extra_args=extra, **options)


def run(made, *requests):
    """The outputs of (ids, sampling parameters), all at once."""
    prompts = [{"prompt_token_ids": list(ids)} for ids, _ in requests]
    return made.engine.generate(prompts, [x for _, x in requests], use_tqdm=False)


def said(output):
    """What an output says of contexts."""
    return output.kv_transfer_params["gracekv"]


def listing(made):
    """All contexts, by name."""
    (output,) = run(made, ([0], params({"list": True})))
    return {one["name"]: one for one in said(output)["contexts"]}


def wait(made, name):
    """The listing's member, once the context is made or has failed."""
    for _ in range(600):
        one = listing(made)[name]
        if one["state"] != "compressing":
            return one
        time.sleep(0.1)
    raise AssertionError(one)


def compress(name, **options):
    """A document shall become the context `name`."""
    return params({"compress": {"name": name, "ratio": 4, **options}})


def asking(name):
    """A question about a context, with log-probabilities."""
    return params(name, TOKENS, logprobs=0, ignore_eos=True)


def question(made):
    """Ids of the question."""
    return made.tokenizer(QUESTION).input_ids


def by_transformers(made, ids, **options):
    """The result of the same document: one token is read after it."""
    import gracekv

    prompt = gracekv.Prompt.from_ids([*ids, ids[-1]], (0, len(ids)), question_end=len(ids))
    return gracekv.compress(made.model, prompt, **{"ratio": 4, **options})


def check(made, answer, result):
    """Log-probabilities of an answer are those over a result's cache."""
    asked, tokens = question(made), list(answer.token_ids)
    with torch.inference_mode():
        ids = torch.tensor([asked + tokens[:-1]])
        logits = made.model(ids, past_key_values=result.new_cache()).logits[0, len(asked) - 1 :]
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    got = torch.tensor([next(iter(step.values())).logprob for step in answer.logprobs])
    assert len(got) == TOKENS
    assert (got - own).abs().max() < MARGIN
    assert (logprobs.max(-1).values - own).max() < MARGIN


def tokens_of(layers):
    """(layer, head, position) of each entry."""
    from gracekv.kernels.ragged import rows

    return {
        (number, head, place)
        for number, layer in enumerate(layers)
        for head, place in zip(rows(layer.lengths).tolist(), layer.positions.tolist(), strict=True)
    }
