"""Greedy answers over a compressed cache, timed."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gracekv.evaluate.sample import Sample


class Answer(NamedTuple):
    """What was generated, and how fast.

    Attributes:
        text: without the prompt and special tokens.
        tokens: how many were generated.
        seconds: wall time from the first token to the last.
    """

    text: str
    tokens: int
    seconds: float


@torch.no_grad()
def greedy(
    model: Any, tokenizer: Any, ids: Tensor, cache: Any, sample: Sample, max_new_tokens: int
) -> Answer:
    """The model's greedy answer; ends at the model's own end tokens and at `sample.stop`.

    `ids` is the whole prompt, int64 [T], and `cache` a fresh `GraceCache` of it, used up here.
    """
    device = model.get_input_embeddings().weight.device
    prompt = ids[None].to(device)
    # The model's own sampling settings would only raise warnings here.
    options: dict[str, Any] = {"temperature": None, "top_p": None, "top_k": None}
    ends = _ends(model)
    if sample.stop is not None:
        # As LongBench does it: the first token may not be an end, and a text that is one token
        # ends the answer as that token.
        stop = tokenizer(sample.stop, add_special_tokens=False)["input_ids"]
        options["min_new_tokens"] = 1
        if len(stop) == 1:
            ends = [*ends, stop[0]]
        else:
            options |= {"stop_strings": [sample.stop], "tokenizer": tokenizer}
    if ends:
        options |= {"eos_token_id": ends, "pad_token_id": ends[0]}
    start = _now(device)
    output = model.generate(
        prompt,
        past_key_values=cache,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        **options,
    )
    seconds = _now(device) - start
    new = output[0, len(ids) :]
    return Answer(tokenizer.decode(new, skip_special_tokens=True), len(new), seconds)


def _ends(model: Any) -> list[int]:
    ends = model.generation_config.eos_token_id
    if ends is None:
        return []
    return list(ends) if isinstance(ends, list | tuple) else [ends]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
