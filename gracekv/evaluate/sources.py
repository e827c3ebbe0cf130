"""Sources of benchmark texts: a local folder or the package.

Questions about documents are read from SQuAD's and HotpotQA's files, prompt strings from the
package's own data.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from gracekv.errors import TaskError

BUILT_IN = "alice_chapter_1.txt"
# Files of each part in the folder; the part "longbench:NAME" is looked up by its first word.
_FILES = {
    "essay": "essays/PaulGrahamEssays.json",
    "squad": "qa/squad*.json",
    "hotpotqa": "qa/hotpot*.json",
    # The dot keeps "hotpotqa" from finding "hotpotqa_e.jsonl".
    "longbench": "longbench/NAME.*jsonl",
    "longproc": "longproc/NAME_0.5k*.json",
    "longproc_prompt": "longproc/NAME.prompts.yaml",
}
_LONGPROC = "its records at 0.5K and its prompts.yaml (princeton-pli/LongProc)"
_WHERE_FROM = {
    "longbench": "the file of LongBench's data.zip (huggingface.co/datasets/THUDM/LongBench)",
    "squad": "SQuAD v2's dev-v2.0.json (rajpurkar.github.io/SQuAD-explorer)",
    "hotpotqa": "HotpotQA's hotpot_dev_distractor_v1.json (hotpotqa.github.io)",
    "longproc": _LONGPROC,
    "longproc_prompt": _LONGPROC,
}


@dataclass(frozen=True, slots=True)
class Question:
    """One question of SQuAD or HotpotQA.

    Attributes:
        text: the question.
        answers: all annotators' answers.
        gold: documents that contain the answer; always shown.
        near: distractors shown before all others: from the same article, or the question's own.
    """

    text: str
    answers: tuple[str, ...]
    gold: tuple[str, ...]
    near: tuple[str, ...]


class Passage(NamedTuple):
    """One paragraph of a SQuAD article.

    Attributes:
        text: the paragraph.
        questions: the questions that it answers, each with all annotators' answers.
    """

    text: str
    questions: tuple[tuple[str, tuple[str, ...]], ...]


class Sources:
    """Benchmark data under one folder, read on first use.

    Looks for `essays/PaulGrahamEssays.json`, `qa/squad*.json`, `qa/hotpot*.json`,
    `longbench/NAME.*jsonl`, `longproc/NAME_0.5k*.json` and `longproc/NAME.prompts.yaml`. Without
    essays, the haystack is the public-domain chapter that comes with gracekv, repeated.

    Parts are "essay", "squad", "hotpotqa", "longbench:NAME" and "longproc:NAME".

    Args:
        folder: the folder, or None. Raises `TaskError` if it does not exist.
    """

    def __init__(self, folder: Path | None = None) -> None:
        if folder is not None and not os.path.isdir(folder):
            raise TaskError(f"The data folder {folder} does not exist. Give an existing one.")
        self.folder = folder
        self._digests: dict[str, str] = {}
        self._parsed: dict[tuple[str, Callable[[bytes], Any]], Any] = {}

    @property
    def essay(self) -> list[str]:
        """The haystack of RULER's essay tasks, as words."""
        words: list[str] = self._once("essay", _words)
        return words

    def questions(self, dataset: str) -> tuple[list[Question], list[str]]:
        """Questions of "squad" or "hotpotqa" in file order, and every document.

        Raises `TaskError` if there is no file.
        """
        questions, corpus = self._once(dataset, squad if dataset == "squad" else hotpot)
        return questions, corpus

    @property
    def articles(self) -> list[list[Passage]]:
        """SQuAD's articles in file order, by paragraphs; `TaskError` if there is no file."""
        return list(self._once("squad", squad_articles))

    def records(self, part: str) -> list[dict[str, Any]]:
        """The records of "longbench:NAME" or, at 0.5K, "longproc:NAME", in file order.

        Raises `TaskError` if they are not in the folder.
        """
        return list(self._once(part, json.loads if part.startswith("longproc") else _asked))

    def longproc_prompt(self, name: str) -> str:
        """The prompt of a LongProc task; raises `TaskError` if it is not in the folder."""
        return str(self._once(f"longproc_prompt:{name}", _user_prompt))

    def digest(self, part: str) -> str:
        """File name and hash of a part; raises `TaskError` if there is none."""
        if part not in self._digests:
            self._read(part)
        kind, _, name = part.partition(":")
        others = [self.digest(f"longproc_prompt:{name}")] if kind == "longproc" else []
        return " ".join([self._digests[part], *others])

    def _once(self, part: str, parse: Callable[[bytes], Any]) -> Any:
        """The part's file, parsed on the first call; `TaskError` if it has another format."""
        if (part, parse) not in self._parsed:
            label, raw = self._read(part)
            try:
                self._parsed[part, parse] = parse(raw)
            except (ValueError, TypeError, LookupError, AttributeError, yaml.YAMLError) as error:
                raise TaskError(f"{label} is no {part} file: {error!r}. Get it again.") from error
        return self._parsed[part, parse]

    def _read(self, part: str) -> tuple[str, bytes]:
        """Name and bytes of the part's first file, or of its substitute."""
        kind, _, name = part.partition(":")
        pattern = _FILES[kind].replace("NAME", name)
        paths = sorted(self.folder.glob(pattern)) if self.folder else []
        if paths:
            label, raw = paths[0].name, paths[0].read_bytes()
        elif kind == "essay":
            label, raw = BUILT_IN, _built_in()
        else:
            raise TaskError(
                f"Tasks of {part} need {pattern}, and there is none under "
                f"{self.folder or 'the data folder, which is not set'}. Put {_WHERE_FROM[kind]} "
                f"there and give the folder as --data."
            )
        self._digests[part] = f"{label} {hashlib.sha256(raw).hexdigest()[:16]}"
        return label, raw


def ruler_forms() -> Any:
    """RULER's prompt strings: the needle and noise lines, and under "tasks" one entry per task."""
    return _packaged("ruler.json")


def longbench_forms() -> Any:
    """LongBench's prompt strings, one entry per dataset."""
    return _packaged("longbench.json")["datasets"]


def _built_in() -> bytes:
    return (files("gracekv") / "data" / BUILT_IN).read_bytes()


def _words(raw: bytes) -> list[str]:
    text = raw.decode("utf-8-sig")
    if raw != _built_in():  # which is plain text
        data = json.loads(text)
        text = " ".join(x["text"] for x in (data if isinstance(data, list) else [data]))
    return text.split()


def _asked(raw: bytes) -> list[dict[str, Any]]:
    # Not splitlines(), which would also split at separators that JSON allows inside strings.
    records = [json.loads(line) for line in raw.decode("utf-8-sig").split("\n") if line.strip()]
    for number, record in enumerate(records):
        for field, kind in {"context": str, "input": str, "answers": list}.items():
            if not isinstance(record[field], kind):
                raise TypeError(f"{field} of record {number} must be a {kind.__name__}")
    return records


def _user_prompt(raw: bytes) -> str:
    return str(yaml.safe_load(raw)["USER_PROMPT"])


def squad_articles(raw: bytes) -> list[list[Passage]]:
    """The articles of a SQuAD v2 file in file order, paragraph by paragraph."""
    articles = json.loads(raw)["data"]
    return [[_passage(paragraph) for paragraph in one["paragraphs"]] for one in articles]


def _passage(paragraph: Mapping[str, Any]) -> Passage:
    asked = [qa for qa in paragraph["qas"] if not qa.get("is_impossible")]
    questions = ((qa["question"].strip(), tuple(x["text"] for x in qa["answers"])) for qa in asked)
    return Passage(paragraph["context"], tuple(questions))


def squad(raw: bytes) -> tuple[list[Question], list[str]]:
    """Answerable questions of a SQuAD v2 file in file order, and all its paragraphs."""
    questions, corpus = [], []
    for article in squad_articles(raw):
        texts = [passage.text for passage in article]
        corpus += texts
        for passage in article:
            others = tuple(text for text in texts if text != passage.text)
            questions += [Question(*asked, (passage.text,), others) for asked in passage.questions]
    return questions, list(dict.fromkeys(corpus))


def hotpot(raw: bytes) -> tuple[list[Question], list[str]]:
    """Questions of a HotpotQA distractor file in file order, and all its documents.

    The documents with supporting facts are gold; at short lengths, the question's other documents
    are left out first (RULER shows all ten, which fit from about 2,000 tokens on).
    """
    questions, corpus = list[Question](), list[str]()
    for record in json.loads(raw):
        texts = {title: f"{title}\n{''.join(lines)}" for title, lines in record["context"]}
        corpus += texts.values()
        needed = dict.fromkeys(title for title, _ in record["supporting_facts"])
        gold = tuple(texts[title] for title in needed if title in texts)
        near = tuple(text for title, text in texts.items() if title not in needed)
        questions.append(Question(record["question"], (record["answer"],), gold, near))
    return questions, list(dict.fromkeys(corpus))


@cache
def _packaged(name: str) -> Any:
    return json.loads((files("gracekv.evaluate") / "data" / name).read_text(encoding="utf-8"))
