"""Answers over a compressed cache: greedy and timed, or the reference answer fed in.

Feeding the reference shows how far a compressed cache takes the model from FullKV. It is one
forward pass over all tokens of the answer, so it costs about as much as one token and does not need
a model that could answer. It distinguishes methods even where all scores are near zero.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gracekv.evaluate.sample import Sample
from gracekv.hf.generation import continue_ids
from gracekv.prefill.cache_keyword import cache_keyword
from gracekv.prefill.model_layers import attention_module, input_device, model_layers
from gracekv.prefill.passes import end_ids
from gracekv.undo import hooked


class Answer(NamedTuple):
    """A generated answer and its time.

    Attributes:
        text: the answer without prompt and special tokens.
        tokens: number of generated tokens.
        seconds: wall time for the uncached part of the prompt and all generated tokens.
    """

    text: str
    tokens: int
    seconds: float


def greedy(
    model: Any, tokenizer: Any, ids: Tensor, cache: Any, sample: Sample, max_new_tokens: int
) -> Answer:
    """The model's greedy answer; ends at the model's end-of-sequence tokens or `sample.stop`.

    `ids` is the whole prompt, int64 [T], and `cache` a fresh `GraceCache` of it, which is modified.
    """
    options: dict[str, Any] = {"repetition_penalty": 1.0}  # not the model's own
    if sample.stop is not None:
        # As in LongBench: the last token of the stop text ends the answer, but not at once.
        stop = tokenizer(sample.stop, add_special_tokens=False)["input_ids"]
        ends = end_ids(model.generation_config.eos_token_id)
        options |= {"min_new_tokens": 1, "eos_token_id": [*ends, *stop[-1:]]}
    device = input_device(model)
    start = _now(device)
    new = continue_ids(model, [ids], cache, tokenizer, max_new_tokens, options)[0]
    seconds = _now(device) - start
    return Answer(tokenizer.decode(new, skip_special_tokens=True), len(new), seconds)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@dataclass(frozen=True, slots=True, eq=False)
class AnswerOutputs:
    """The model's outputs for the answer's tokens over one cache.

    Attributes:
        log_probs: float32 [A, vocabulary] log-probabilities; row a predicts answer token a.
        outputs: attention block outputs [A, D] of each layer, at the predicting positions.
    """

    log_probs: Tensor
    outputs: tuple[Tensor, ...]

    def part(self, tokens: slice) -> AnswerOutputs:
        """The outputs for some of the answer's tokens."""
        return AnswerOutputs(self.log_probs[tokens], tuple(x[tokens] for x in self.outputs))


@torch.no_grad()
def teacher_force(model: Any, ids: Tensor, answer: Tensor, cache: Any) -> AnswerOutputs:
    """Feed the answer after a compressed prompt.

    Args:
        model: an attached model, see `gracekv.hf.attach`.
        ids: int64 [T], the whole prompt; the part that `cache` does not cover is fed first.
        answer: int64 [A].
        cache: a fresh `GraceCache` of the prompt, which is modified.
    """
    fed = torch.cat([ids[cache.packed_length :], answer[:-1]])
    device = input_device(model)
    rows: list[Tensor] = []

    def listen(module: Any, args: Any, output: Any) -> None:
        mixed = output[0] if isinstance(output, tuple) else output
        rows.append(mixed[0, -len(answer) :])

    with hooked() as hooks:
        for layer in model_layers(model):
            if layer.has_attention:
                attention = attention_module(model.get_decoder().layers[layer.number])
                hooks.append(attention.register_forward_hook(listen))
        # A cache with a limit is cut between pieces.
        pieces = fed.split(len(fed) if cache.limit is None else cache.limit.every)
        options = {cache_keyword(model.forward): cache, "logits_to_keep": len(answer)}
        logits = [model(input_ids=x[None].to(device), **options).logits[0] for x in pieces]
    count = len(hooks)
    outputs = (torch.cat(rows[n::count])[-len(answer) :] for n in range(count))
    return AnswerOutputs(torch.cat(logits)[-len(answer) :].float().log_softmax(-1), tuple(outputs))


def compare(method: AnswerOutputs, full: AnswerOutputs, answer: Tensor) -> dict[str, float]:
    """Distances of a method from FullKV, over the same answer int64 [A].

    Returns `kl` (mean over tokens of KL(FullKV || method), nats), `nll` and `full_nll` (mean
    negative log-likelihood of the answer, nats), `dnll` (their difference; negative if compression
    happens to help), `top1` (share of positions with the same argmax), `aoe` (mean over layers of
    |o - o_full| / |o_full| of the attention blocks, including errors from lower layers), and
    `tokens`, A. For FullKV itself, all differences are 0 and `top1` is 1.
    """
    ours, theirs = method.log_probs.double(), full.log_probs.double()
    at = answer.to(ours.device)[:, None]
    nll = -ours.gather(-1, at).mean()
    full_nll = -theirs.gather(-1, at).mean()
    outputs = zip(method.outputs, full.outputs, strict=True)
    pairs = ((of_method.double(), of_full.double()) for of_method, of_full in outputs)
    errors = [float((x - y).norm() / y.norm().clamp_min(1e-30)) for x, y in pairs]
    return {
        # Rounding can make the divergence of equal distributions negative; NaN stays NaN.
        "kl": max(float((theirs.exp() * (theirs - ours)).sum(-1).mean()), 0.0),
        "nll": float(nll),
        "full_nll": float(full_nll),
        "dnll": float(nll - full_nll),
        "top1": float((ours.argmax(-1) == theirs.argmax(-1)).double().mean()),
        "aoe": sum(errors) / len(errors),
        "tokens": len(answer),
    }
