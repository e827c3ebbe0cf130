"""`pipeline("gracekv-text-generation")`: one context, any number of questions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

from transformers import AutoModelForCausalLM, Pipeline
from transformers.pipelines import PIPELINE_REGISTRY

from gracekv import pipeline as stages
from gracekv.allocate import Budget, BudgetOptions
from gracekv.errors import ConfigError, PromptError
from gracekv.hf.capture import prefilled_run
from gracekv.hf.compress import chosen_pipeline
from gracekv.hf.result import CompressionResult
from gracekv.prefill import Prefill, PromptSpans
from gracekv.prefill.options import DEFAULTS
from gracekv.prefill.prompt import Prompt
from gracekv.prefill.supported import check_model
from gracekv.segment import Partition

TASK = "gracekv-text-generation"

_PROMPT = ("instruction", "answer_prefix", "separator", "template")
_BUDGET = tuple(BudgetOptions.__annotations__)
_COMPRESSION = (*_BUDGET, "pipeline", "backend", "capture")


class GraceTextGeneration(Pipeline):  # type: ignore[misc]
    """Answers to questions about a long context, over its compressed cache.

        pipe = transformers.pipeline("gracekv-text-generation", model=model, tokenizer=tokenizer)
        pipe(context=text, question="Who is Dinah?", ratio=8)["answer"]
        [x["answer"] for x in pipe(context=text, question=["Who?", "Where?"], ratio=8)]

    The context is segmented without looking at the question, so a list of questions shares one
    segmentation and answers as calls of their own would (ours: in `gracekv.compress` the medians
    that boundaries are measured by run over the question too). Prefill, scores, trees and
    allocation are made for each question anew: they depend on it.

    With `reuse=True` the context is read and compressed once, before any question is known, and all
    questions are asked about what is left: see `CompressionResult.ask`. That costs one prefill
    whatever the number of questions, and more entries for the same answers.

    Keyword arguments of the constructor are defaults for calls. A call's budget replaces the
    constructor's.
    """

    _load_processor: ClassVar[bool] = False
    _load_image_processor: ClassVar[bool] = False
    _load_feature_extractor: ClassVar[bool] = False
    _load_tokenizer: ClassVar[bool] = True

    def _sanitize_parameters(self, **kwargs: Any) -> tuple[dict[str, Any], ...]:
        prompt = {name: kwargs.pop(name) for name in _PROMPT if name in kwargs}
        return prompt, kwargs, {}

    def __call__(
        self,
        *,
        context: str,
        question: str | Sequence[str] = "",
        reuse: bool | None = None,
        **kwargs: Any,
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """Answer one question, or each of several about the same context.

        Args:
            context: the long text, the only part that is compressed.
            question: a text, or a list of them.
            reuse: one prefill and one compressed context for all questions; default: the
                constructor's, or False.
            kwargs: `instruction`, `answer_prefix`, `separator`, `template` as in
                `Prompt.from_chat`; a budget, `pipeline`, `backend` and `capture` as in
                `gracekv.compress`; everything else, such as `max_new_tokens`, goes to `generate`.

        Returns:
            For each question {"question", "answer", "budget", "spent", "kv_bytes", "full_bytes"}:
            texts, context entries, bytes of keys and values. A list for a list.

        Raises:
            PromptError: `question` is an empty list; with `reuse`, as `CompressionResult.ask`.
            ConfigError: `reuse` with an `answer_prefix`, which would stand before the question.
        """
        prompt_options, options, _ = self._sanitize_parameters(**kwargs)
        prompt_options = self._preprocess_params | prompt_options
        defaults = dict(self._forward_params)
        if any(options.get(name) is not None for name in _BUDGET):
            defaults = {name: x for name, x in defaults.items() if name not in _BUDGET}
        options = defaults | options
        default = options.pop("reuse", False)
        reuse = default if reuse is None else reuse
        questions = [question] if isinstance(question, str) else list(question)
        if not questions:
            raise PromptError("question takes a text or a list of at least one; got an empty list.")
        if reuse and prompt_options.get("answer_prefix"):
            raise ConfigError(
                "answer_prefix stands after a question that the prompt holds; with reuse=True the "
                "prompt holds none. Leave answer_prefix out, or reuse=True."
            )
        shared: dict[Any, Partition] = {}
        answers = []
        for asked in [questions] if reuse else questions:
            inputs = {"context": context, "question": asked}
            answers += self.run_single(inputs, prompt_options, options | {"shared": shared}, {})
        return answers[0] if isinstance(question, str) else answers

    def preprocess(self, inputs: dict[str, Any], **options: Any) -> dict[str, Any]:
        """The prompt of one question, or for a list of questions the prompt without any.

        Raises `ConfigError` if the pipeline has no tokenizer.
        """
        if self.tokenizer is None:
            raise ConfigError(
                f"{TASK} needs a tokenizer. Use pipeline({TASK!r}, model=model, "
                f"tokenizer=tokenizer)."
            )
        texts = dict(inputs)
        if isinstance(texts["question"], list):
            texts["question"] = ""
        return {"prompt": Prompt.from_chat(self.tokenizer, **texts, **options)} | inputs

    def _forward(
        self, inputs: dict[str, Any], shared: dict[Any, Partition], **options: Any
    ) -> list[dict[str, Any]]:
        compression = {name: options.pop(name) for name in _COMPRESSION if name in options}
        budget = Budget.of({name: compression.get(name) for name in _BUDGET})
        prompt = inputs["prompt"]
        pipe = chosen_pipeline(compression.get("pipeline"), compression.get("backend"), [prompt])
        check_model(self.model)
        how = compression.get("capture", DEFAULTS)

        def slots(prefill: Prefill) -> Partition | None:
            return _shared_partition(pipe, prefill, budget, shared)

        run = prefilled_run(self.model, prompt, None, pipe, budget, how, slots)
        result = CompressionResult.from_runs(self.model, [prompt], [run], pipe)
        kept, questions = result.accounting, inputs["question"]
        if isinstance(questions, list):
            answers = result.ask(questions, **options)
        else:
            questions, answers = [questions], [result.generate(**options)]
        return [
            {
                "question": question,
                "answer": answer,
                "budget": kept.budget,
                "spent": kept.spent,
                "kv_bytes": kept.bytes,
                "full_bytes": kept.full_bytes,
            }
            for question, answer in zip(questions, answers, strict=True)
        ]

    def postprocess(self, outputs: list[dict[str, Any]], **options: Any) -> list[dict[str, Any]]:
        """What a call returns, question by question, as `_forward` made it."""
        return outputs


def _shared_partition(
    pipe: stages.Pipeline, prefill: Prefill, budget: Budget, shared: dict[Any, Partition]
) -> Partition | None:
    """Slots of the region, from `shared` if they are there; None if nothing will be compressed.

    Their key is all that segmenting reads: the ids up to the region's end, and the region. A
    question whose first letters merge with the context's last token has ids of its own.
    """
    plan = pipe.plan(prefill, budget)
    if pipe.keep_all or plan.keeps_all:
        return None
    assert prefill.token_ids is not None  # `capture` keeps them
    end, region = prefill.spans.context_end, prefill.spans.region(plan.recent)
    key = (tuple(prefill.token_ids[:end].tolist()), region)
    if key not in shared:
        shared[key] = pipe.segment(without_question(prefill), region)
    return shared[key]


def without_question(prefill: Prefill) -> Prefill:
    """Views of `prefill` up to the context's end: what no question can change."""
    spans = prefill.spans
    end = spans.context_end
    here = prefill.query_positions < end
    return dataclasses.replace(
        prefill,
        spans=PromptSpans(spans.context_start, end, end, end),
        keys=tuple(x[:, :end] for x in prefill.keys),
        values=tuple(x[:, :end] for x in prefill.values),
        queries=tuple(x[:, here.to(x.device)] for x in prefill.queries),
        query_positions=prefill.query_positions[here],
        observed={
            x: tensor.narrow(x.causal_axis, 0, end)
            for x, tensor in prefill.observed.items()
            if x.causal_axis is not None
        },
        logits=None,
        token_ids=None if prefill.token_ids is None else prefill.token_ids[:end],
    )


def register() -> None:
    """Make the task known to `transformers.pipeline`; a second call changes nothing."""
    if TASK not in PIPELINE_REGISTRY.supported_tasks:
        PIPELINE_REGISTRY.register_pipeline(
            TASK, pipeline_class=GraceTextGeneration, pt_model=AutoModelForCausalLM, type="text"
        )
