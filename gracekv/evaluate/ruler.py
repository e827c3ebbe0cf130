"""RULER's 13 tasks, generated locally from their published procedure, for any tokenizer.

The tasks are counting (cwe, fwe), questions about documents (qa), and hidden sentences: with keys
and values (niah_*), in essays, in noise or among similar sentences; or with variables (vt), each
assigned the previous one, in noise.
"""

from __future__ import annotations

import itertools
import math
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from gracekv.evaluate.sample import FurtherQuestion
from gracekv.evaluate.sources import Question, Sources, ruler_forms
from gracekv.evaluate.texts import Family, Texts, distinct, letters, words

TASKS = tuple(ruler_forms()["tasks"])

_ZETA_2 = math.pi**2 / 6
# RULER draws depths from 40 evenly spaced percentages of the text.
_DEPTHS = tuple(i / 39 for i in range(40))
_SENTENCE = re.compile(r"(?<=[.!?])\s+")


def family(name: str, length: int, index: int, sources: Sources) -> Family:
    """The texts of sample `index` of task `name`, at any size; `length` is in tokens."""
    task = ruler_forms()["tasks"][name]
    if task["family"] == "niah":
        return needles(task, sources.essay if task["part"] == "essay" else ())
    if task["family"] == "qa":
        questions, corpus = sources.questions(task["part"])
        return documents(task, questions[index], corpus)
    return _MADE[task["family"]](task, length)


def common_words(task: Mapping[str, Any], length: int) -> Family:
    """cwe: the most common words of a numbered list; sizes count distinct words.

    Ten words occur `often` times, all others `seldom` times; a smaller, solved instance precedes
    the instruction and is never compressed (ours). Shorter lengths repeat less, as in RULER.
    """
    args = task["args"]
    common = args["num_cw"]
    often, seldom = (args["freq_cw"], args["freq_ucw"]) if length >= 4096 else (6, 1)
    shown, shown_often, shown_seldom = (40, 10, 3) if length >= 4096 else (20, 3, 1)
    vocabulary = words("adjectives", "nouns", "verbs")

    def instance(terms: Sequence[str], often: int, seldom: int, rng: Random) -> Texts:
        text = list(terms[:common]) * often + list(terms[common:]) * seldom
        rng.shuffle(text)
        return _texts(task, _numbered(text), tuple(terms[:common]))

    def draw(size: int, rng: Random) -> Texts:
        shuffled = rng.sample(vocabulary, len(vocabulary))
        # The demonstration's words come from the end, so that they do not depend on the size.
        example = instance(shuffled[-shown:], shown_often, shown_seldom, rng)
        solved = f"{example.solved()} {_numbered(example.asked[0].answers)}\n"
        real = instance(shuffled[:size], often, seldom, rng)
        return real._replace(instruction=solved + real.instruction)

    return Family(draw, least=common + 1, most=len(vocabulary) - shown)


def coded_words(task: Mapping[str, Any], length: int) -> Family:
    """fwe: sizes count the words of a Zipf text, in which rank 1 is printed as dots.

    The answers are ranks 2 to 4.
    """
    vocabulary = max(5, (length - task["max_new_tokens"]) // 50)

    def draw(size: int, rng: Random) -> Texts:
        ranked = letters(6, vocabulary, rng)
        ranked[0] = "..."
        counts = [math.floor(size * k**-2 / _ZETA_2) for k in range(1, vocabulary + 1)]
        text = list(Counter(dict(zip(ranked, counts, strict=True))).elements())
        rng.shuffle(text)
        return _texts(task, " ".join(text), tuple(ranked[1:4]))

    # From this size on, ranks 2 to 5 have different counts.
    return Family(draw, least=80)


def documents(task: Mapping[str, Any], question: Question, corpus: Sequence[str]) -> Family:
    """qa_1 and qa_2: a question about one or two documents; sizes count characters of distractors.

    Distractors are added in RULER's order (near ones, then random ones), skipping those that no
    longer fit, so that whole documents fill the length (ours; RULER adds ten at a time).
    """
    most = sum(len(text) for text in {*question.near, *corpus} - set(question.gold))
    own = {*question.near, *question.gold}
    others = [text for text in corpus if text not in own]

    def draw(size: int, rng: Random) -> Texts:
        near = list(question.near)
        rng.shuffle(near)
        far = list(others)
        rng.shuffle(far)
        texts, room = list(question.gold), size
        for text in near + far:
            if len(text) <= room:
                texts.append(text)
                room -= len(text)
        rng.shuffle(texts)
        return _texts(task, numbered_documents(texts), question.answers, query=question.text)

    return Family(draw, least=0, most=most)


def numbered_documents(texts: Sequence[str]) -> str:
    """Several documents in RULER's format."""
    form = ruler_forms()["document"]
    return "\n\n".join(form.format(i=i, document=text) for i, text in enumerate(texts, 1))


def _texts(task: Mapping[str, Any], context: str, answers: tuple[str, ...], **fields: str) -> Texts:
    """A task's own instruction and question around `context`; `fields` fill the question."""
    question = task["question"].format(**fields) if fields else task["question"]
    asked = FurtherQuestion(question, task["answer_prefix"], answers)
    return Texts(task["prefix"], context, (asked,))


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))


def needles(task: Mapping[str, Any], essay: Sequence[str]) -> Family:
    """A niah task; sizes count words of essay, sentences of noise, or distractor needles.

    `essay` is the haystack as words, repeated as needed. Sentences are split at whitespace after
    '.', '!' or '?' (RULER: nltk's punkt, whose data would have to be downloaded; only the places of
    the needles differ).
    """
    args = task["args"]
    kind = args["type_haystack"]
    queried = args["num_needle_q"]
    keys, per_key = max(args["num_needle_k"], queried), args["num_needle_v"]
    single = queried * per_key == 1

    def draw(size: int, rng: Random) -> Texts:
        used: set[str] = set()
        names = distinct(args["type_needle_k"], keys, rng, used)
        values = {k: distinct(args["type_needle_v"], per_key, rng, used) for k in names}
        hidden = [_needle(args, k, v) for k in names for v in values[k]]
        rng.shuffle(hidden)
        if kind == "essay":
            sentences = _SENTENCE.split(" ".join(itertools.islice(itertools.cycle(essay), size)))
            depths = sorted(rng.sample(_DEPTHS, len(hidden)))
            places = [round(depth * len(sentences)) for depth in depths]
            context = " ".join(_insert(sentences, places, hidden))
        else:
            lines = noise_lines(size)
            if kind == "needle":
                kinds = args["type_needle_k"], args["type_needle_v"]
                drawn = [distinct(kind, size, rng, used) for kind in kinds]
                lines = [_needle(args, k, v) for k, v in zip(*drawn, strict=True)]
            context = "\n".join(_among(lines, hidden, rng))
        queries = rng.sample(names, queried)
        query = queries[0] if queried == 1 else ", ".join(queries[:-1]) + ", and " + queries[-1]
        value_type = args["type_needle_v"].removesuffix("s" if single else "")
        fields = {"type_needle_v": value_type, "query": query}
        texts = [task["prefix"], task["question"], task["answer_prefix"]]
        texts = [_singular(text) for text in texts] if single else texts
        instruction, question, answer_prefix = (text.format(**fields) for text in texts)
        answers = tuple(v for k in queries for v in values[k])
        return Texts(instruction, context, (FurtherQuestion(question, answer_prefix, answers),))

    return Family(draw, least=1)


def chains(task: Mapping[str, Any], length: int) -> Family:
    """vt, the variable tracing task; sizes count sentences of noise.

    The demonstration, a solved instance with shorter names, precedes the instruction and is never
    compressed (ours; RULER has no compression).
    """
    # Lines of the demonstration, as RULER's search for at most 500 tokens finds them: one step.
    lines = 10 if length >= 4096 else 5
    names = task["args"]["num_hops"] + 1

    def instance(sentences: int, letters_per_name: int, rng: Random) -> Texts:
        variables = letters(letters_per_name, names, rng, string.ascii_uppercase)
        value = str(rng.randint(10_000, 99_998))
        form = ruler_forms()
        chain = [form["vt_first"].format(x=variables[0], value=value)]
        for old, new in itertools.pairwise(variables):
            chain.append(form["vt_next"].format(y=new, x=old).rstrip())
        text = noise_lines(sentences)
        places = sorted(rng.choices(range(len(text) + 1), k=names))
        for place, line in reversed(list(zip(places, chain, strict=True))):
            text.insert(place, line)
        texts = (task["question"], task["answer_prefix"])
        question, answer_prefix = (x.format(query=value, num_v=names) for x in texts)
        asked = FurtherQuestion(question, answer_prefix, tuple(variables))
        return Texts(task["prefix"], "\n".join(text), (asked,))

    def draw(size: int, rng: Random) -> Texts:
        # A separate stream, so that the demonstration does not change with the instance's size.
        shown = instance(5 * lines, 3, Random(rng.getrandbits(64)))
        solved = shown.solved() + " ".join(shown.asked[0].answers)
        real = instance(size, 5, rng)
        return real._replace(instruction=f"{solved}\n\n{real.instruction}")

    return Family(draw, least=1)


def noise_lines(sentences: int) -> list[str]:
    """RULER's noise in lines of five sentences; the last may be shorter, to fill the length."""
    line = _SENTENCE.split(ruler_forms()["noise"])
    full, rest = divmod(sentences, len(line))
    return [" ".join(line)] * full + ([" ".join(line[:rest])] if rest else [])


def _needle(args: Mapping[str, Any], key: str, value: str) -> str:
    form: str = ruler_forms()["needle"]
    return form.format(type_needle_v=args["type_needle_v"], key=key, value=value)


def _singular(text: str) -> str:
    """RULER's rewriting of the task's text if one value is asked for."""
    return text.replace("Some", "A").replace("are all", "is").replace("are", "is")


def _among(lines: list[str], hidden: Sequence[str], rng: Random) -> list[str]:
    # Short texts may have fewer lines than needles; then several share a place.
    places = [rng.randint(0, len(lines)) for _ in hidden]
    if len(lines) >= len(hidden):
        places = rng.sample(range(len(lines) + 1), len(hidden))
    return _insert(lines, sorted(places), hidden)


def _insert(pieces: list[str], places: Sequence[int], hidden: Sequence[str]) -> list[str]:
    result = list(pieces)
    # From the back, so that earlier places stay valid.
    for place, text in sorted(zip(places, hidden, strict=True), key=lambda x: x[0], reverse=True):
        result.insert(place, text)
    return result


_MADE = {
    "variable_tracking": chains,
    "common_words_extraction": common_words,
    "freq_words_extraction": coded_words,
}
