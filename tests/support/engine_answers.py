"""Compares an inference engine's answers with gracekv's own cache."""

import torch

from gracekv.vllm import request

# Log-probabilities of both engines differ only by rounding; tokens may differ if this close.
MARGIN = 1e-3


def check_answer(served, name, question, answer, greedy=True):
    """Raise unless the answer's log-probabilities are those over gracekv's own cache.

    Args:
        served: store, tokenizer and model, and gracekv's results by name.
        name: name of the context.
        question: a text, or None.
        answer: vLLM's, with log-probabilities.
        greedy: each token is also the likeliest, or within `MARGIN` of it.
    """
    # Most answers recur: alone, among others, after an abort.
    known, asked = vars(served).setdefault("own_logprobs", {}), (name, question, *answer.token_ids)
    if asked not in known:
        ids = list(request(served.store, name, question, served.tokenizer).prompt_ids)
        cache = served.results[name].new_cache()
        known[asked] = own_logprobs(served.model, ids, list(answer.token_ids), cache)
    assert_same_logprobs(answer, *known[asked], greedy)


def assert_same_logprobs(answer, chosen, best, greedy=True):
    """An answer of two tokens or more has these log-probabilities, which are nearly the `best`."""
    got = torch.tensor([next(iter(step.values())).logprob for step in answer.logprobs])
    assert len(got) == len(chosen) > 1
    assert (got - chosen).abs().max() < MARGIN
    assert not greedy or (best - chosen).max() < MARGIN


def own_logprobs(model, asked, answer, cache):
    """gracekv's log-probabilities of each answered token and of the likeliest one in its place."""
    with torch.inference_mode():
        ids = torch.tensor([asked + answer[:-1]])
        logits = model(ids, past_key_values=cache).logits[0, len(asked) - 1 :]
    logprobs = logits.float().log_softmax(-1)
    return logprobs.gather(1, torch.tensor(answer)[:, None])[:, 0], logprobs.max(-1).values
