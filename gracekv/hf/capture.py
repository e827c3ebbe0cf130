"""`capture`: one standard forward pass, and everything that compression reads from it."""

from __future__ import annotations

from typing import Any

import torch

from gracekv.errors import PromptError
from gracekv.prefill.base import Prefill
from gracekv.prefill.capture_pass import run_capture
from gracekv.prefill.length_limits import check_prompt_length
from gracekv.prefill.needs import Needs
from gracekv.prefill.options import DEFAULTS, CaptureOptions
from gracekv.prefill.past import Past
from gracekv.prefill.prompt import Prompt
from gracekv.prefill.supported import check_model, check_needs
from gracekv.segment.curvature import Curvature
from gracekv.segment.surprisal import Surprisal
from gracekv.value.output_projection import OutputProjection

EVERYTHING = (
    Needs(prompt_samples=1024, context_samples=frozenset({512}), recent=4, later_queries=True)
    | Curvature((0.33, 0.5, 0.67, 0.75)).needs()
    | Needs.observed(Surprisal())
    | OutputProjection().needs()
)
"""What `capture` keeps unless told less: all that the strategies with default fields read of one
pass, but for sums over all queries, which are made from queries when they are read. What runs the
model again (`Reconstruction`, `Draft`), or multiplies all values (`WrittenNorms`), is made only
when asked for."""


@torch.no_grad()
def capture(
    model: Any,
    prompt: Prompt,
    needs: Needs | None = None,
    options: CaptureOptions = DEFAULTS,
) -> Prefill:
    """Run the model once over the prompt and keep what compression reads.

    A prompt of at most 2,048 tokens runs in one stock pass: its keys, values and last logits are
    those of `model(ids)`. A longer one runs in chunks, which attend to the keys and values of the
    chunks before, so that what the model's layers hold meanwhile does not grow with the prompt;
    the result is the same up to rounding. Temporary attention function and hooks are removed
    afterwards, or if the pass fails or is interrupted. While it runs, no other thread may use
    the model.

    Queries are the large part of what can be captured, H/(2G) times keys and values together. Those
    of known positions (direct probes, observation windows, evenly spaced samples) are held. Where
    positions known only later are needed, too, all queries are held if they take at most
    `memory_limit` bytes; else `Prefill.with_queries` runs the tokens of those positions once more.

    Args:
        model: a transformers causal language model of a tested family, in evaluation mode, with
            "sdpa" or "eager" attention.
        prompt: one sequence; without a question it is read up to the token after the context.
        needs: what to keep beyond keys and values; default: `EVERYTHING`.
        options: how it runs.

    Raises:
        UnsupportedModelError: the model breaks an assumption, has a sliding window that does not
            cover the prompt, or is in training mode.
        PromptError: `prompt` is not a `Prompt`, has ids outside the vocabulary, is longer than
            what the model was made for, or has a length at which transformers drops the cache.
        ObserverError: an observer reads what this model cannot give; before it runs.
        CaptureMemoryError: memory ran out; the model is as before.
        NonFiniteError: keys, values or queries hold NaN or infinity.

    Warns (`LengthWarning`) where little room is left before a length at which the cache ends.
    """
    check_model(model)
    if not isinstance(prompt, Prompt):
        raise PromptError(
            f"capture takes one Prompt; got {type(prompt).__name__}. Build it with "
            f"Prompt.from_chat or Prompt.from_ids."
        )
    prompt = prompt.without_tail()
    check_prompt_length(model, prompt.spans.length, beyond_positions=options.beyond_positions)
    needs = EVERYTHING if needs is None else needs
    check_needs(model, needs)
    return run_capture(model, prompt, None, needs, options)


@torch.no_grad()
def capture_passage(
    model: Any,
    prompt: Prompt,
    past: Past,
    needs: Needs,
    options: CaptureOptions = DEFAULTS,
) -> Prefill:
    """As `capture`, of a passage that follows what was compressed before.

    The passage is read once, over the entries that are there, at its true positions. In the
    prefill, positions count places: first those of `past`, then the passage's tokens. Its `rope`
    has their rotations, its keys and queries the coordinates of `Past`.

    Args:
        model: as for `capture`; not in use by another thread.
        prompt: `past.places` ids that are not read, then the passage's.
        past: what it follows.
        needs: what to keep.
        options: as for `capture`; `progress` counts the places of `past` as done.

    Raises what `capture` raises, and `ObserverError` for needs that run the model a second time.
    """
    check_needs(model, needs, passage=True)
    return run_capture(model, prompt, past, needs, options)
