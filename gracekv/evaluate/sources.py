"""Where benchmark texts come from: a local folder, the package, or the hub."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import zipfile
from collections.abc import Callable, Sequence
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from gracekv.errors import MissingDependencyError, TaskError
from gracekv.evaluate.questions import Passage, Question, hotpot, squad, squad_articles

BUILT_IN = "alice_chapter_1.txt"
_FOUND_IN = {"squad": "qa/squad*.json", "hotpotqa": "qa/hotpot*.json"}
_WHERE_FROM = {
    "squad": "SQuAD v2's dev-v2.0.json (rajpurkar.github.io/SQuAD-explorer)",
    "hotpotqa": "HotpotQA's hotpot_dev_distractor_v1.json (hotpotqa.github.io)",
}
_LONGBENCH = "THUDM/LongBench"


class Sources:
    """Benchmark data under one folder, read when they are first asked for.

    Looks for `essays/PaulGrahamEssays.json`, `qa/squad*.json`, `qa/hotpot*.json` and
    `longbench/NAME*.jsonl`. Without essays the haystack is the public-domain chapter that comes
    with gracekv, repeated; LongBench then comes from the hub.

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

    def essay(self) -> Sequence[str]:
        """The haystack of RULER's essay tasks, as words."""
        return self._essay

    @cached_property
    def _essay(self) -> list[str]:
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
            read: Callable[[Any], tuple[list[Question], list[str]]]
            read = squad if dataset == "squad" else hotpot
            self._questions[dataset] = read(self._question_file(dataset))
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
        """File name and hash of what "essay", "squad", "hotpotqa" or "longbench:NAME" was."""
        if part == "essay":
            self.essay()
        elif part in ("squad", "hotpotqa"):
            self.questions(part)  # type: ignore[arg-type]
        else:
            self.longbench(part.removeprefix("longbench:"))
        return self._digests[part]

    def _download(self, name: str) -> bytes:
        if importlib.util.find_spec("huggingface_hub") is None:
            raise MissingDependencyError(
                "Downloading LongBench needs 'huggingface_hub'. Install it with: "
                "pip install 'gracekv[evaluate]'"
            )
        # The hub's copy is a loading script, which current `datasets` refuse to run, around one
        # archive: reading the archive runs no code of others.
        from huggingface_hub import hf_hub_download

        try:
            archive = hf_hub_download(_LONGBENCH, "data.zip", repo_type="dataset")
            with zipfile.ZipFile(archive) as opened:
                return opened.read(f"data/{name}.jsonl")
        except Exception as error:
            raise TaskError(
                f"LongBench's {name} could not be read from {_LONGBENCH}: {error}. Put the file "
                f"in a folder as longbench/{name}.jsonl and give the folder as --data."
            ) from error


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
