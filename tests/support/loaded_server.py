"""A server with a tiny model, texts for it, and its answers."""

import contextlib
import random

from support.engine_answers import MARGIN
from support.vllm_server import NAME, vllm_server

TOKENS, QUESTION = 24, "Why is she tired?"


@contextlib.contextmanager
def loaded_server(folder):
    """A running server with short steps, whose store is empty."""
    from gracekv.testing.models import tiny_llama, tiny_tokenizer
    from gracekv.vllm import Client

    tokenizer = tiny_tokenizer(vocabulary=500)
    # Conversations are longer than a single request may be.
    tiny_llama(vocabulary=500, dim=32, positions=2**17).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "store").mkdir()
    # Few pages, so that all of them are soon allocated.
    options = {"max-model-len": 2048, "max-num-batched-tokens": 128, "max-num-seqs": 12}
    options["num-gpu-blocks-override"] = 200
    line = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    with vllm_server(folder, folder / "model", folder / "store", *line) as running:
        running.tokenizer = tokenizer
        running.client = Client(f"{running.url}/v1", tokenizer=tokenizer)
        yield running


def words(seed, count=120):
    """A different text for each seed."""
    letters = random.Random(seed)
    return " ".join("".join(letters.choices("abcdefgh", k=4)) for _ in range(count))


def answer(server, ids, name=None):
    """The tokens of a greedy answer with their log-probabilities."""
    import httpx

    body = {"model": NAME, "prompt": list(ids), "max_tokens": TOKENS, "temperature": 0}
    body |= {"logprobs": 0, "ignore_eos": True, "return_token_ids": True}
    if name is not None:
        body["kv_transfer_params"] = {"gracekv": name}
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300)
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    found = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    assert [len(x) for x in found] == [TOKENS, TOKENS]
    return list(zip(*found, strict=True))


def same(found, wanted):
    """Whether two greedy answers agree up to the first near tie, after which they may diverge."""
    for (token, mine), (other, theirs) in zip(found, wanted, strict=True):
        if abs(mine - theirs) > MARGIN:
            return False
        if token != other:
            break
    return True


def asked(server, name):
    from gracekv.vllm import request

    return request(None, name, QUESTION, server.tokenizer).prompt_ids
