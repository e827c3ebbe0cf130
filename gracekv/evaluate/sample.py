"""`Sample`: one or more questions about one long text, with answers and how they are scored."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from gracekv.errors import ConfigError


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
    """One record of a benchmark, before any tokenizer has seen it.

    The user's message is instruction, context and question without anything between them; the
    model's turn opens with `answer_prefix`. Only the context may be compressed.

    Attributes:
        task: such as "ruler:niah_multikey_1".
        index: number of the sample inside its task.
        instruction: the text before the context.
        context: the long text.
        question: the text after it.
        answer_prefix: the given start of the answer.
        answers: the references, at least one and none empty.
        metric: the name of the primary metric, see `gracekv.evaluate.metrics`.
        chat: whether the tokenizer's chat format is used.
        first_line: score the first line that is not empty only.
        stop: the answer ends at this text.
        classes: all class names, for classification.
        further: more questions about the same text, answered over the same compressed cache.
        in_turns: whether they are turns of one conversation, each after the reference answers of
            those before (as in SCBench, arXiv:2412.10319); else each is asked by itself.
        whole: whether the reference is fed whole, however many words it has.

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
                f"{list(self.answers)!r}. Every answer must hold some text; repair the record."
            )

    def questions(self) -> tuple[Sample, ...]:
        """One sample for each question, this one's first, without further questions."""
        first = replace(self, further=(), in_turns=False)
        return (first, *(replace(first, **one._asdict()) for one in self.further))

    def reference(self, words: int) -> str:
        """The text that teacher forcing feeds: all answers of a set, else the first; ours.

        At most `words` blank-separated words, so that a long summary costs no more than others.
        """
        text = ", ".join(self.answers) if self.metric == "set_recall" else self.answers[0]
        if self.whole:
            return text.strip()
        parts = text.split()
        return text.strip() if len(parts) <= words else " ".join(parts[:words])
