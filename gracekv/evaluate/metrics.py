"""The benchmarks' official metrics, each from 0 to 1.

Sources: RULER's `string_match_all` and `string_match_part`, LongBench's `metrics.py`. Rouge comes
in two variants that must not share a table, because they lie on different scales:

* `rouge_l`: F1 of the longest common subsequence of blank-separated words, exact and
  case-sensitive, over the whole text; the paper's word-level Rouge-L. By the package rouge-score
  with a tokenizer that only splits at blanks, without stemming.
* `rouge_l_longbench`: "rouge-l"/"f" of the package rouge 1.0.1, as LongBench's leaderboard has it.
  It works on sets of words of matched sentences. Like the official code it gives 0 where the
  package fails (empty texts, and texts of about a thousand words without a full stop).
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

from gracekv.errors import required
from gracekv.evaluate.sample import Sample

_CONTROL = re.compile("[\x00-\x1f]")
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def score(sample: Sample, prediction: str) -> dict[str, float]:
    """The sample's primary metric first, then those that are reported with it."""
    names = [sample.metric]
    if sample.metric == "rouge_l":
        names.append("rouge_l_longbench")
    if sample.task in ("ruler:cwe", "ruler:fwe"):
        names.append("strict_recall")
    return {name: evaluate(name, prediction, sample) for name in names}


def evaluate(name: str, prediction: str, sample: Sample) -> float:
    """Metric `name` of a prediction against the sample's references."""
    if name in ("set_recall", "set_any", "strict_recall"):
        return _found(name, prediction, sample.answers)
    if sample.first_line:
        prediction = prediction.lstrip("\n").split("\n")[0]
    if name == "classification":
        return max(class_accuracy(prediction, answer, sample.classes) for answer in sample.answers)
    return max(PAIRWISE[name](prediction, answer) for answer in sample.answers)


def clean(prediction: str) -> str:
    """RULER's post-processing: control characters become line ends."""
    return _CONTROL.sub("\n", prediction.strip()).strip()


def _found(name: str, prediction: str, answers: Sequence[str]) -> float:
    text = clean(prediction).lower()
    wanted = [answer.lower() for answer in answers]
    if name == "strict_recall":
        # Diagnostic (ours): whole words only, so that "oak" is not found in "soak", and no more
        # guesses than there are answers.
        guesses = list(dict.fromkeys(w for w in re.findall(r"[^\W\d_][\w'-]*", text)))
        return sum(answer in guesses[: len(wanted)] for answer in wanted) / len(wanted)
    hits = [answer in text for answer in wanted]
    return float(any(hits)) if name == "set_any" else sum(hits) / len(hits)


def qa_f1(prediction: str, answer: str) -> float:
    """Token F1 after lower-casing and removing ASCII punctuation and English articles."""
    return _f1(_normal(prediction).split(), _normal(answer).split())


def rouge_l(prediction: str, answer: str) -> float:
    """F1 of the longest common subsequence of blank-separated words."""
    score: float = _lcs_scorer().score(answer, prediction)["rougeL"].fmeasure
    return score


def rouge_l_longbench(prediction: str, answer: str) -> float:
    """LongBench's Rouge-L: the package rouge, 0 where it fails."""
    scorer = required("rouge", "evaluate").Rouge()
    try:
        score: float = scorer.get_scores([prediction], [answer], avg=True)["rouge-l"]["f"]
    except (ValueError, RecursionError, ZeroDivisionError):
        return 0.0
    return score


def class_accuracy(prediction: str, answer: str, classes: Sequence[str]) -> float:
    """1 over the number of class names that the prediction holds, if the right one is among them.

    Names inside the right one do not count. The official loop deletes from the list it walks over,
    which can spare a name; that is part of the metric.
    """
    named = [name for name in classes if name in prediction]
    for name in named:
        if name in answer and name != answer:
            named.remove(name)
    return 1 / len(named) if answer in named else 0.0


PAIRWISE = {metric.__name__: metric for metric in (qa_f1, rouge_l, rouge_l_longbench)}


def _normal(text: str) -> str:
    kept = "".join(c for c in text.lower() if c not in set(string.punctuation))
    return " ".join(_ARTICLES.sub(" ", kept).split())


def _f1(prediction: list[str], answer: list[str]) -> float:
    same = sum((Counter(prediction) & Counter(answer)).values())
    if not same:
        return 0.0
    precision, recall = same / len(prediction), same / len(answer)
    return 2 * precision * recall / (precision + recall)


@cache
def _lcs_scorer() -> Any:
    scorer = required("rouge_score.rouge_scorer", "evaluate", "rouge-score")
    return scorer.RougeScorer(["rougeL"], tokenizer=SimpleNamespace(tokenize=str.split))
