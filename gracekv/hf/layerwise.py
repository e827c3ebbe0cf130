"""From a prompt to compressed entries, without the full cache between them where that can be."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from gracekv.allocate import Budget
from gracekv.distributed.sharding import head_shard
from gracekv.distributed.strategies import check_works_sharded
from gracekv.errors import ConfigError, LayerOrderError, WholeCacheWarning
from gracekv.hf.capture import run_capture
from gracekv.pipeline import Pipeline
from gracekv.pipeline.layerwise import LayerwiseCompression, why_whole
from gracekv.pipeline.run import Run
from gracekv.prefill import Prefill
from gracekv.prefill.model_layers import head_sizes
from gracekv.prefill.options import CaptureOptions
from gracekv.prefill.past import Past
from gracekv.prefill.prompt import Prompt
from gracekv.segment import Partition


def prefilled_run(
    model: Any,
    prompt: Prompt,
    past: Past | None,
    pipeline: Pipeline,
    budget: Budget,
    options: CaptureOptions,
    slots: Callable[[Prefill], Partition | None] | None = None,
) -> Run:
    """Read `prompt` and compress it, layer by layer where `pipeline` allows it.

    Where everything is read first, `slots` may give what was segmented before.

    Other args and errors are those of `run_capture` and `Pipeline.run`; `BudgetError` comes before
    the model runs, `ConfigError` and `LayerOrderError` also if `options.stream` asks for what
    cannot be. Warns (`WholeCacheWarning`) where a model is read as a whole since its layers mix.
    """
    plan = pipeline.plan_for(model, prompt.spans, budget)
    if options.stream is not False:
        _, _, dim = head_sizes(model)
        reason = why_whole(pipeline, plan, 2 * dim * model.dtype.itemsize)
        if reason is None:
            stays = plan.total / (plan.layers * plan.heads * plan.context)
            try:
                return _layerwise_run(model, prompt, past, pipeline, budget, options, stays)
            except LayerOrderError as error:
                if options.stream:
                    raise
                warnings.warn(str(error), WholeCacheWarning, stacklevel=3)
        elif options.stream:
            raise ConfigError(
                f"CaptureOptions(stream=True) reads and compresses layer by layer, and this "
                f"pipeline needs all layers at once: {reason}. Leave stream out, or use another "
                f"recipe."
            )
    prefill = [run_capture(model, prompt, past, pipeline.needs(), options)]
    partition = None if slots is None else slots(prefill[0])
    # Nothing else holds the prefill, so a stage can free what later ones do not read.
    return pipeline.run(prefill.pop(), budget, partition)


def _layerwise_run(
    model: Any,
    prompt: Prompt,
    past: Past | None,
    pipeline: Pipeline,
    budget: Budget,
    options: CaptureOptions,
    stays: float,
) -> Run:
    """`stays`: the share of entries that is kept."""
    check_works_sharded(pipeline, head_shard(model))
    made = LayerwiseCompression(pipeline, budget)
    needs = pipeline.needs()
    return made.finish(run_capture(model, prompt, past, needs, options, made.layer, stays))
