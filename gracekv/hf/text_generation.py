"""`pipeline("gracekv-text-generation")`: one context, any number of questions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from transformers import AutoModelForCausalLM, Pipeline
from transformers.pipelines import PIPELINE_REGISTRY

from gracekv.allocate import BudgetOptions
from gracekv.errors import ConfigError, PromptError, expect
from gracekv.hf.compress import compress
from gracekv.prefill.prompt import Prompt

TASK = "gracekv-text-generation"

_PROMPT = ("instruction", "answer_prefix", "separator", "template")
_BUDGET = tuple(BudgetOptions.__annotations__)
_COMPRESSION = (*_BUDGET, "pipeline", "backend", "capture")


class GraceTextGeneration(Pipeline):  # type: ignore[misc]
    """Answers questions about a long context from its compressed cache.

        pipe = transformers.pipeline("gracekv-text-generation", model=model, tokenizer=tokenizer)
        pipe(context=text, question="Who is Dinah?", ratio=8)["answer"]
        [x["answer"] for x in pipe(context=text, question=["Who?", "Where?"], ratio=8)]

    The prompt is read and compressed anew for each question, as by `gracekv.compress`, so what is
    kept depends on the question.

    With `reuse=True`, the context is read and compressed once, before any question is known, and
    all questions are asked about what is left: see `CompressionResult.ask`. That takes one prefill
    for any number of questions, but more entries for the same answers.

    Keyword arguments of the constructor are defaults for calls. A call's budget replaces the
    constructor's.
    """

    _load_tokenizer: ClassVar[bool] = True
    _load_processor = _load_image_processor = _load_feature_extractor = False

    def _sanitize_parameters(self, **options: Any) -> tuple[dict[str, Any], ...]:
        return {}, options, {}

    def __call__(
        self, *, context: str, question: str | Sequence[str] = "", **options: Any
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """Answer one question, or each of several about the same context.

        Args:
            context: the long text, the only part that is compressed.
            question: a string, or a list of strings.
            options: `reuse`, whether one prefill and one compressed context serve all questions;
                `instruction`, `answer_prefix`, `separator`, `template` as in `Prompt.from_chat`; a
                budget, `pipeline`, `backend` and `capture` as in `gracekv.compress`; everything
                else, such as `max_new_tokens`, is passed to `generate`.

        Returns:
            For each question {"question", "answer", "budget", "spent", "kv_bytes", "full_bytes"}:
            strings, context entries, bytes of keys and values. A list for a list.

        Raises:
            PromptError: `question` is an empty list; with `reuse`, as `CompressionResult.ask`.
            ConfigError: an argument of kvpress's task; `reuse` with an `answer_prefix`, which would
                come before the question; or the pipeline has no tokenizer.
        """
        if others := options.keys() & {"questions", "press", "cache"}:
            raise ConfigError(f"Give question= and pipeline= instead of {', '.join(others)}.")
        expect(question, Iterable, "question takes a string or a list of strings", PromptError)
        questions = [question] if isinstance(question, str) else list(question)
        if not questions:
            raise PromptError("question takes a string or a non-empty list; got an empty list.")
        defaults = dict(self._forward_params)
        if any(options.get(name) is not None for name in _BUDGET):
            defaults = {name: x for name, x in defaults.items() if name not in _BUDGET}
        answers = self._forward({"context": context, "questions": questions}, **defaults | options)
        return answers[0] if isinstance(question, str) else answers

    def _forward(
        self, inputs: dict[str, Any], *, reuse: bool = False, **options: Any
    ) -> list[dict[str, Any]]:
        if self.tokenizer is None:
            raise ConfigError(f"{TASK} needs a tokenizer: pipeline(..., tokenizer=tokenizer).")
        if reuse and options.get("answer_prefix"):
            raise ConfigError(
                "answer_prefix comes after the prompt's question, and with reuse=True the prompt "
                "has none. Leave out answer_prefix or reuse=True."
            )
        texts = {name: options.pop(name) for name in _PROMPT if name in options}
        compression = {name: options.pop(name) for name in _COMPRESSION if name in options}
        questions, records = inputs["questions"], []
        for batch in [questions] if reuse else [[one] for one in questions]:
            texts |= {"context": inputs["context"], "question": "" if reuse else batch[0]}
            result = compress(self.model, Prompt.from_chat(self.tokenizer, **texts), **compression)
            answers = result.ask(batch, **options) if reuse else [result.generate(**options)]
            account = result.accounting
            sizes = {"budget": account.budget, "spent": account.spent}
            sizes |= {"kv_bytes": account.bytes, "full_bytes": account.full_bytes}
            both = zip(batch, answers, strict=True)
            records += [{"question": x, "answer": answer, **sizes} for x, answer in both]
        return records

    def preprocess(self, inputs: Any, **_: Any) -> Any:
        """Returns `inputs`: `_forward` renders the prompts and returns the answers."""
        return inputs

    postprocess = preprocess


def register() -> None:
    """Register the task with `transformers.pipeline`; a second call has no effect."""
    if TASK not in PIPELINE_REGISTRY.supported_tasks:
        PIPELINE_REGISTRY.register_pipeline(
            TASK, pipeline_class=GraceTextGeneration, pt_model=AutoModelForCausalLM, type="text"
        )
