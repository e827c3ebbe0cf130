"""The benchmarks' official metrics, each from 0 to 1.

Sources: RULER's `string_match_all` and `string_match_part`, LongBench's `metrics.py`. `rouge_l` is
the paper's word-level Rouge-L: F1 of the longest common subsequence of whitespace-separated words,
exact and case-sensitive, over the whole text, by the package rouge-score with a tokenizer that only
splits at whitespace, without stemming. LongBench's own, on sets of words, has another scale.
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


def score(sample: Sample, prediction: str) -> float:
    """The sample's metric of a prediction against its references."""
    if sample.metric in ("set_recall", "set_any"):
        text = clean(prediction).lower()
        hits = [answer.lower() in text for answer in sample.answers]
        return float(any(hits)) if sample.metric == "set_any" else sum(hits) / len(hits)
    if sample.first_line:
        prediction = prediction.lstrip("\n").split("\n")[0]
    if sample.metric == "classification":
        return max(class_accuracy(prediction, answer, sample.classes) for answer in sample.answers)
    return max(PAIRWISE[sample.metric](prediction, answer) for answer in sample.answers)


def clean(prediction: str) -> str:
    """RULER's post-processing: control characters become newlines."""
    return _CONTROL.sub("\n", prediction.strip()).strip()


def qa_f1(prediction: str, answer: str) -> float:
    """Token F1 after lower-casing and removing ASCII punctuation and English articles."""
    predicted, target = _normal(prediction).split(), _normal(answer).split()
    if not (same := sum((Counter(predicted) & Counter(target)).values())):
        return 0.0
    precision, recall = same / len(predicted), same / len(target)
    return 2 * precision * recall / (precision + recall)


def rouge_l(prediction: str, answer: str) -> float:
    """F1 of the longest common subsequence of whitespace-separated words."""
    return float(_lcs_scorer().score(answer, prediction)["rougeL"].fmeasure)


def class_accuracy(prediction: str, answer: str, classes: Sequence[str]) -> float:
    """1 over the number of class names in the prediction, if the correct one is among them.

    Names contained in the correct one do not count. The official loop deletes from the list that it
    iterates over, which can skip a name; that is part of the metric.
    """
    named = [name for name in classes if name in prediction]
    for name in named:
        if name in answer and name != answer:
            named.remove(name)
    return 1 / len(named) if answer in named else 0.0


PAIRWISE = {metric.__name__: metric for metric in (qa_f1, rouge_l)}


def _normal(text: str) -> str:
    kept = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(_ARTICLES.sub(" ", kept).split())


@cache
def _lcs_scorer() -> Any:
    scorer = required("rouge_score.rouge_scorer", "evaluate", "rouge-score")
    return scorer.RougeScorer(["rougeL"], tokenizer=SimpleNamespace(tokenize=str.split))
