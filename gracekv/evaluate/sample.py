"""`Sample`: questions about one long text, and their token ids, the same for all methods."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from gracekv.errors import ConfigError, TaskError
from gracekv.prefill.chat_text import plain_ids
from gracekv.prefill.messages import turn_ids
from gracekv.prefill.prompt import Prompt

Truncate = Literal["middle", "start", "error"]


class FurtherQuestion(NamedTuple):
    """Another question about the text of a sample.

    Attributes:
        question: the text after the context.
        answer_prefix: the given start of the answer.
        answers: the references.
    """

    question: str
    answer_prefix: str
    answers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """One record of a benchmark, before tokenisation.

    The user's message is instruction, context and question with nothing in between; the model's
    turn opens with `answer_prefix`. Only the context may be compressed.

    Attributes:
        task: name of the task, such as "ruler:niah_multikey_1".
        index: number of the sample inside its task.
        instruction: the text before the context.
        context: the long text.
        question: the text after it.
        answer_prefix: the given start of the answer.
        answers: the references, at least one and none empty.
        metric: the name of the primary metric, see `gracekv.evaluate.metrics`.
        chat: whether the tokenizer's chat format is used.
        first_line: score only the first line that is not empty.
        stop: the answer ends at this text.
        classes: all class names, for classification.
        further: more questions about the same text, answered over the same compressed cache.
        in_turns: whether they are turns of one conversation, each after the reference answers to
            earlier ones (as in SCBench, arXiv:2412.10319); else each is asked independently.
        whole: whether the reference is fed in full, however many words it has.

    Raises:
        ConfigError: there is no reference answer, or an empty one.
    """

    task: str
    index: int
    instruction: str
    context: str
    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    metric: str
    chat: bool = True
    first_line: bool = False
    stop: str | None = None
    classes: tuple[str, ...] = ()
    further: tuple[FurtherQuestion, ...] = ()
    in_turns: bool = False
    whole: bool = False

    def __post_init__(self) -> None:
        # An empty reference is a substring of everything and would score 1.
        if not self.answers or not all(answer.strip() for answer in self.answers):
            raise ConfigError(
                f"Sample {self.index} of {self.task} has no usable reference answer: "
                f"{list(self.answers)!r}. Every answer must contain some text; fix the record."
            )

    def questions(self) -> tuple[Sample, ...]:
        """One sample for each question, starting with this one's, without further questions."""
        first = replace(self, further=(), in_turns=False)
        return (first, *(replace(first, **one._asdict()) for one in self.further))

    def reference(self, words: int) -> str:
        """The text that teacher forcing feeds: all answers of a set, else the first; ours.

        At most `words` whitespace-separated words, so that a long summary costs no more than
        others.
        """
        text = ", ".join(self.answers) if self.metric == "set_recall" else self.answers[0]
        parts = text.split()
        return text.strip() if self.whole or len(parts) <= words else " ".join(parts[:words])


@dataclass(frozen=True, slots=True, eq=False)
class Rendered:
    """One question's prompt and the reference answer's tokens.

    Attributes:
        sample: the question.
        prompt: ids and spans; the same for all methods.
        answer_ids: int64 [A], the reference as it would follow the prompt.
        removed: number of context tokens removed by truncation.
    """

    sample: Sample
    prompt: Prompt
    answer_ids: Tensor
    removed: int = 0

    @property
    def digest(self) -> str:
        """Identifies ids, spans and reference answer."""
        spans = self.prompt.spans
        borders = torch.tensor([spans.context_start, spans.context_end, spans.question_end])
        parts = (x.numpy().tobytes() + b"|" for x in (self.prompt.ids, borders, self.answer_ids))
        return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def chat_prompt(sample: Sample, tokenizer: Any) -> Prompt:
    """The sample's full prompt, not truncated."""
    names = ("instruction", "context", "question", "answer_prefix")
    texts: dict[str, Any] = {name: getattr(sample, name) for name in names}
    return Prompt.from_chat(tokenizer, **texts, separator="", template=sample.chat)


def render(
    sample: Sample, tokenizer: Any, limit: int, truncate: Truncate, answer_words: int
) -> Rendered:
    """Prompt and reference answer.

    Args:
        sample: the question and its texts.
        tokenizer: a Hugging Face tokenizer.
        limit: maximum tokens of the prompt.
        truncate: how a longer one is handled. "middle" removes tokens from the middle of the
            context, "start" keeps its first tokens; instruction and question stay whole. "error"
            raises, as in the paper's protocol.
        answer_words: maximum words of the reference.

    Raises `TaskError` if the prompt is too long and may not be cut, or cannot be cut enough.
    """
    full = chat_prompt(sample, tokenizer)
    answer = _answer_ids(full, sample, tokenizer, answer_words)
    if (excess := len(full.ids) - limit) <= 0:
        return Rendered(sample, full, answer)
    spans = full.spans
    room = spans.context_length - excess
    if truncate == "error" or room < 2:
        raise TaskError(
            f"Sample {sample.index} of {sample.task} has {len(full.ids)} tokens, more than the "
            f"{limit} allowed. Allow more, or use truncate='middle'."
        )
    head = room if truncate == "start" else (room + 1) // 2
    start, end = spans.context_start, spans.context_end
    ids = torch.cat([full.ids[: start + head], full.ids[end - (room - head) :]])
    cut = Prompt.from_ids(ids, (start, start + room), spans.question_end - excess, tokenizer)
    return Rendered(sample, cut, answer, excess)


def render_questions(
    sample: Sample, tokenizer: Any, limit: int, truncate: Truncate, answer_words: int
) -> tuple[Rendered, ...]:
    """`render` for every question of a sample; all prompts are equal up to the first question.

    A turn of a conversation follows the prompt and reference answer of the previous turn. Texts
    with several questions are never truncated.

    Raises `TaskError` as `render` does, and if the tokenizer merges the context's end with
    different questions.
    """
    if len(questions := sample.questions()) > 1:
        truncate = "error"
    renderings = [render(each, tokenizer, limit, truncate, answer_words) for each in questions]
    spans, ids = renderings[0].prompt.spans, renderings[0].prompt.ids
    start, end = spans.context_start, spans.context_end
    for number, each in enumerate(questions[1:] if sample.in_turns else (), 1):
        before = renderings[number - 1]
        turns = [{"role": "user", "content": each.question.strip()}]
        turn = turn_ids(tokenizer, turns, "\n", each.chat, answer_prefix=each.answer_prefix)[0]
        joint = torch.cat([before.prompt.ids, before.answer_ids, torch.tensor(turn)])
        prompt = Prompt.from_ids(joint, (start, end), tokenizer=tokenizer)
        renderings[number] = Rendered(each, prompt, renderings[number].answer_ids)
    longest = max(len(rendered.prompt.ids) for rendered in renderings)
    if len(questions) > 1 and longest > limit:
        raise TaskError(
            f"Sample {sample.index} of {sample.task} has {longest} tokens with all its turns, more "
            f"than the {limit} allowed. Allow more, or ask for a smaller length."
        )
    if any(not torch.equal(each.prompt.ids[: end + 1], ids[: end + 1]) for each in renderings):
        raise TaskError(
            f"The questions of sample {sample.index} of {sample.task} do not share a context: the "
            f"tokenizer merges its end with what follows. Begin all questions the same way."
        )
    return tuple(renderings)


def joint_digest(rendered: tuple[Rendered, ...]) -> str:
    """Identifies all prompts and reference answers of a sample."""
    if len(rendered) == 1:
        return rendered[0].digest
    return hashlib.sha256("|".join(one.digest for one in rendered).encode()).hexdigest()[:16]


def _answer_ids(prompt: Prompt, sample: Sample, tokenizer: Any, words: int) -> Tensor:
    """The reference's ids after the prompt, tokenised as one text if possible."""
    assert prompt.parts is not None  # from_chat always keeps them
    text = "".join(prompt.parts)
    answer = sample.reference(words)
    if not text[-1].isspace():
        answer = " " + answer
    # A word's token may differ at the start of a text; ids of the joint text show it in place.
    joint, alone = plain_ids(tokenizer, text + answer), plain_ids(tokenizer, text)
    together = joint[: len(alone)] == alone
    ids = joint[len(alone) :] if together else plain_ids(tokenizer, answer)
    return torch.tensor(ids, dtype=torch.int64)
