"""Where benchmark texts come from: a local folder, the package, or the hub.

Questions about documents are read from SQuAD's and HotpotQA's files, prompt strings from the
package's own data.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, NamedTuple

from gracekv.errors import TaskError, required

BUILT_IN = "alice_chapter_1.txt"
_FOUND_IN = {"squad": "qa/squad*.json", "hotpotqa": "qa/hotpot*.json"}
_WHERE_FROM = {
    "squad": "SQuAD v2's dev-v2.0.json (rajpurkar.github.io/SQuAD-explorer)",
    "hotpotqa": "HotpotQA's hotpot_dev_distractor_v1.json (hotpotqa.github.io)",
}
_LONGBENCH = "THUDM/LongBench"


@dataclass(frozen=True, slots=True)
class Question:
    """One question of SQuAD or HotpotQA.

    Attributes:
        text: the question.
        answers: all annotators' answers.
        gold: documents that hold the answer; always shown.
        near: distractors that are shown before any other: the same article's, or the question's.
    """

    text: str
    answers: tuple[str, ...]
    gold: tuple[str, ...]
    near: tuple[str, ...]


class Passage(NamedTuple):
    """One paragraph of a SQuAD article.

    Attributes:
        text: the paragraph.
        questions: those that it answers, each with all annotators' answers.
    """

    text: str
    questions: tuple[tuple[str, tuple[str, ...]], ...]


class Sources:
    """Benchmark data under one folder, read when they are first asked for.

    Looks for `essays/PaulGrahamEssays.json`, `qa/squad*.json`, `qa/hotpot*.json`,
    `longbench/NAME*.jsonl` and `longproc/NAME_0.5k*.json`. Without essays the haystack is the
    public-domain chapter that comes with gracekv, repeated; LongBench then comes from the hub.

    Args:
        folder: the folder, or None. Raises `TaskError` if it does not exist.
    """

    def __init__(self, folder: Path | None = None) -> None:
        if folder is not None and not folder.is_dir():
            raise TaskError(f"The data folder {folder} does not exist. Give an existing one.")
        self.folder = folder
        self._digests: dict[str, str] = {}
        self._questions: dict[str, tuple[list[Question], list[str]]] = {}
        self._records: dict[str, list[dict[str, Any]]] = {}

    @cached_property
    def essay(self) -> list[str]:
        """The haystack of RULER's essay tasks, as words."""
        path = None if self.folder is None else self.folder / "essays" / "PaulGrahamEssays.json"
        if path is None or not path.is_file():
            text = (files("gracekv") / "data" / BUILT_IN).read_text(encoding="utf-8")
            self._digests["essay"] = f"{BUILT_IN} {_digest(text.encode())}"
            return text.split()
        raw = path.read_bytes()
        self._digests["essay"] = f"{path.name} {_digest(raw)}"
        data = json.loads(raw)
        records = data if isinstance(data, list) else [data]
        return " ".join(record["text"] for record in records).split()

    def questions(self, dataset: Literal["squad", "hotpotqa"]) -> tuple[list[Question], list[str]]:
        """Questions in file order, and every document; `TaskError` if there is no file."""
        if dataset not in self._questions:
            data = self._question_file(dataset)
            self._questions[dataset] = squad(data) if dataset == "squad" else hotpot(data)
        return self._questions[dataset]

    @cached_property
    def articles(self) -> list[list[Passage]]:
        """SQuAD's articles in file order, by paragraphs; `TaskError` if there is no file."""
        return squad_articles(self._question_file("squad"))

    def _question_file(self, dataset: str) -> Any:
        found = sorted(self.folder.glob(_FOUND_IN[dataset])) if self.folder else []
        if not found:
            raise TaskError(
                f"Tasks of {dataset} need questions and find none under "
                f"{self.folder or 'the data folder, which is not set'}. Put "
                f"{_WHERE_FROM[dataset]} there as {_FOUND_IN[dataset]} and give the folder as "
                f"--data."
            )
        raw = found[0].read_bytes()
        self._digests[dataset] = f"{found[0].name} {_digest(raw)}"
        return json.loads(raw)

    def longproc(self, name: str) -> tuple[list[dict[str, Any]], str]:
        """The records of a LongProc task at 0.5K, in file order, and its prompt.

        Raises `TaskError` if they are not in the folder.
        """
        import yaml

        folder = (self.folder or Path()) / "longproc"
        found = sorted(folder.glob(f"{name}_0.5k*.json"))
        prompt = folder / f"{name}.prompts.yaml"
        if self.folder is None or not found or not prompt.is_file():
            raise TaskError(
                f"long_output:{name} needs longproc/{name}_0.5k*.json and {prompt.name} of "
                f"princeton-pli/LongProc in the data folder. Give it as --data."
            )
        raw = found[0].read_bytes()
        self._digests[f"longproc:{name}"] = f"{found[0].name} {_digest(raw)}"
        return json.loads(raw), yaml.safe_load(prompt.read_text(encoding="utf-8"))["USER_PROMPT"]

    def longbench(self, name: str) -> list[dict[str, Any]]:
        """The records of a LongBench data set, in file order.

        Raises `TaskError` if they are neither in the folder nor on the hub.
        """
        if name not in self._records:
            folder = self.folder / "longbench" if self.folder else None
            # The dot keeps "hotpotqa" from finding "hotpotqa_e.jsonl".
            found = sorted(folder.glob(f"{name}.*jsonl")) if folder else []
            if found:
                label, raw = found[0].name, found[0].read_bytes()
            else:
                label, raw = f"{_LONGBENCH}/{name}.jsonl", self._download(name)
            self._digests[f"longbench:{name}"] = f"{label} {_digest(raw)}"
            # Not splitlines(): it would also cut at separators that JSON leaves inside strings.
            lines = raw.decode("utf-8").split("\n")
            self._records[name] = [json.loads(line) for line in lines if line.strip()]
        return self._records[name]

    def digest(self, part: str) -> str:
        """File name and hash of a part: "essay", "squad", "hotpotqa", or the name of a task.

        Tasks are "longproc:NAME" and "longbench:NAME".
        """
        if part == "essay":
            _ = self.essay
        elif part in ("squad", "hotpotqa"):
            self.questions(part)  # type: ignore[arg-type]
        elif part.startswith("longproc:"):
            self.longproc(part.removeprefix("longproc:"))
        else:
            self.longbench(part.removeprefix("longbench:"))
        return self._digests[part]

    def _download(self, name: str) -> bytes:
        hub = required("huggingface_hub", "evaluate")
        # The hub's copy is a loading script, which current `datasets` refuse to run, around one
        # archive: reading the archive runs no code of others.
        try:
            archive = hub.hf_hub_download(_LONGBENCH, "data.zip", repo_type="dataset")
            with zipfile.ZipFile(archive) as opened:
                return opened.read(f"data/{name}.jsonl")
        except Exception as error:
            raise TaskError(
                f"LongBench's {name} could not be read from {_LONGBENCH}: {error}. Put the file "
                f"in a folder as longbench/{name}.jsonl and give the folder as --data."
            ) from error


@cache
def ruler_forms() -> Mapping[str, Any]:
    """RULER's prompt strings: the needle and noise lines, and under "tasks" one entry per task."""
    return _packaged("ruler.json")


@cache
def longbench_forms() -> Mapping[str, Any]:
    """LongBench's prompt strings, one entry per data set."""
    forms: Mapping[str, Any] = _packaged("longbench.json")["datasets"]
    return forms


def squad_articles(data: Mapping[str, Any]) -> list[list[Passage]]:
    """The articles of a SQuAD v2 file in file order, paragraph by paragraph."""
    return [
        [
            Passage(
                paragraph["context"],
                tuple(
                    (qa["question"].strip(), tuple(answer["text"] for answer in qa["answers"]))
                    for qa in paragraph["qas"]
                    if not qa.get("is_impossible")
                ),
            )
            for paragraph in article["paragraphs"]
        ]
        for article in data["data"]
    ]


def squad(data: Mapping[str, Any]) -> tuple[list[Question], list[str]]:
    """Answerable questions of a SQuAD v2 file in file order, and all its paragraphs."""
    questions, corpus = [], []
    for article in squad_articles(data):
        texts = [passage.text for passage in article]
        corpus += texts
        for passage in article:
            others = tuple(text for text in texts if text != passage.text)
            questions += [
                Question(text, answers, (passage.text,), others)
                for text, answers in passage.questions
            ]
    return questions, list(dict.fromkeys(corpus))


def hotpot(data: Sequence[Mapping[str, Any]]) -> tuple[list[Question], list[str]]:
    """Questions of a HotpotQA distractor file in file order, and all its documents.

    The documents with supporting facts are the gold ones; at short lengths the question's other
    documents are left out first (RULER shows all ten, which fit from about 2,000 tokens on).
    """
    questions: list[Question] = []
    corpus: list[str] = []
    for record in data:
        texts = {title: f"{title}\n{''.join(lines)}" for title, lines in record["context"]}
        corpus += texts.values()
        needed = dict.fromkeys(title for title, _ in record["supporting_facts"])
        gold = tuple(texts[title] for title in needed if title in texts)
        near = tuple(text for title, text in texts.items() if title not in needed)
        questions.append(Question(record["question"], (record["answer"],), gold, near))
    return questions, list(dict.fromkeys(corpus))


def _packaged(name: str) -> Mapping[str, Any]:
    text = (files("gracekv.evaluate") / "data" / name).read_text(encoding="utf-8")
    data: Mapping[str, Any] = json.loads(text)
    return data


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
