"""The two halves of the local suite, by protocol, and what is reported of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gracekv.errors import ConfigError
from gracekv.evaluate.row_files import Row


@dataclass(frozen=True)
class Half:
    """What is reported of one protocol.

    Attributes:
        name: of the results.
        title: of the page.
        ours: the method whose place is told.
        placed: what competes for a place. Ablations, trees over the same worth and the draft, which
            leaves the single pass, are shown and not placed.
        last: the column that every group of a mean must have.
        config: what is run.
        tuned: what its recipe was tuned on.
    """

    name: str
    title: str
    ours: str
    placed: tuple[str, ...]
    last: str
    config: str
    tuned: str


HALVES = {
    "query_aware": Half(
        "smollm2",
        "SmolLM2 on RULER and LongBench",
        "gracekv-plus",
        (
            "gracekv-plus", "gracekv", "streaming-llm", "h2o", "snapkv", "ada-snapkv", "pyramidkv",
            "chunkkv", "cam", "d2o",
        ),
        "64x",
        "benchmarks/smollm2_suite.yaml",
        "`gracekv-plus` was tuned on other tasks and another seed; see the suite's head",
    ),
    "query_agnostic": Half(
        "smollm2-agnostic",
        "SmolLM2, the question not seen",
        "gracekv-agnostic",
        (
            "gracekv-agnostic", "kvzip-two-pass", "expected-attention", "compactor", "keydiff",
            "knorm", "lagkv", "tova", "critical-snapkv", "critical-expected-attention", "h2o",
            "snapkv", "streaming-llm", "gracekv-plus",
        ),
        "16x",
        "benchmarks/smollm2_agnostic.yaml",
        "`gracekv-agnostic` was tuned on `benchmarks/smollm2_agnostic_tuning.yaml`",
    ),
}  # fmt: skip
NEEDLES = ("single_retrieval", "retrieval", "shared_lookup")
TEXTS = (
    "single_doc_qa", "multi_doc_qa", "summarization", "few_shot", "ruler_qa", "shared_qa",
)  # fmt: skip


def half_of(rows: Sequence[Row]) -> Half:
    """The half of the suite that the rows are of; `ConfigError` if they are of both, or of none."""
    protocols = sorted({row["settings"]["protocol"] for row in rows})
    if len(protocols) != 1:
        raise ConfigError(
            f"The folder must hold rows of one protocol, {' or '.join(HALVES)}; it holds "
            f"{' and '.join(protocols) or 'none'}. Run each half in a folder of its own."
        )
    return HALVES[protocols[0]]
