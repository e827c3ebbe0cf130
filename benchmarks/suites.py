"""The published evaluations, and what is reported for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gracekv.errors import ConfigError
from gracekv.evaluate.row_files import Row


@dataclass(frozen=True)
class Suite:
    """The report of one evaluation.

    Attributes:
        title: title of the page.
        protocol: protocol of its rows.
        config: its configuration file in benchmarks.
        ours: the method that is ranked, or that others are compared with.
        placed: methods that compete for a place; if empty, no standings and no plot.
        further: more of our recipes to rank, each in the place of `ours`.
        last: the column that every group of a mean must have.
        bases: further methods that the others are compared with.
        notes: further notes on the page.
        kinds: whether means over needles and over texts are separate.
        quantised: rivals with bits, which compete with our recipes `-allocated` alone.
    """

    title: str
    protocol: str
    config: str
    ours: str
    placed: tuple[str, ...] = ()
    further: tuple[str, ...] = ()
    last: str = "64x"
    bases: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    kinds: bool = False
    quantised: tuple[str, ...] = ()


_SEEN, _HIDDEN = "query_aware", "query_agnostic"
_PLUS = (
    "`gracekv-plus` was tuned on other tasks, and chains of names (vt), with another seed; see the "
    "config's head"
)
_AGNOSTIC = (
    "`gracekv-agnostic` was tuned on `benchmarks/smollm2_agnostic_tuning.yaml` and chains (vt); "
    "niah_single_3, niah_multikey_1, fwe, vt, qa_1, kv and squad are here, too, with other seeds "
    "or texts"
)
_FURTHER = (
    "gracekv-agnostic-allocated", "gracekv-agnostic-two-pass",
    "gracekv-agnostic-two-pass-allocated",
)  # fmt: skip
_EQUAL = (
    "A ratio of a recipe `-allocated` counts bytes against a full cache of 16-bit numbers: as many "
    "as the others, which keep 16 bits a number, have in such a model. Positions and "
    "multiplicities, 8 bytes an entry, are counted for none. Their bytes at 4x are shares of that "
    "16-bit cache; what lies outside the context stays in 32 bits"
)
_BYTES = (
    "A ratio counts bytes against a full cache of 16-bit numbers; entries that stay as they are "
    "count 16 bits a number where nothing is quantised, and what they take in a float32 model, "
    "twice that, where something is. Positions and multiplicities, 8 bytes an entry, are counted "
    "for none",
    "Column full: methods that keep every entry, at 1.8 (8 bits) and 3.2 (4 bits) times fewer "
    "bytes",
)
_LIMIT = (
    "Gold traces of LongProc, fed 64 tokens at a time; a ratio is a limit on prompt and answer "
    "together, of which, less question and last tokens, the context has half; `none` is "
    "never cut after that, so it holds more"
)

SUITES = {
    "smollm2-default": Suite(
        "SmolLM2: the default, the paper's method and ten rivals", _SEEN, "smollm2_default.yaml",
        "gracekv-plus",
        (
            "gracekv-plus", "gracekv", "streaming-llm", "h2o", "snapkv", "ada-snapkv", "pyramidkv",
            "chunkkv", "cam", "d2o", "layer-defensivekv", "kvzip-two-pass",
        ),
        notes=(_PLUS,),
    ),
    "smollm2-agnostic": Suite(
        "SmolLM2, the question not seen", _HIDDEN, "smollm2_agnostic.yaml", "gracekv-agnostic",
        ("gracekv-agnostic", "kvzip-two-pass", "expected-attention", "snapkv"),
        _FURTHER, "64x", notes=(_AGNOSTIC, _EQUAL), kinds=True,
        quantised=("kvzip-two-pass[precision=allocated]",),
    ),
    "answers": Suite("Answers kept", _SEEN, "smollm2_answers.yaml", "gracekv-plus"),
    "answers-agnostic": Suite(
        "Answers kept, the question not seen", _HIDDEN, "smollm2_agnostic_answers.yaml",
        "gracekv-agnostic",
    ),
    "precision": Suite(
        "Bits at equal bytes", _SEEN, "smollm2_bytes.yaml", "gracekv-plus", notes=_BYTES
    ),
    "compaction": Suite(
        "2x to 50x beside Attention Matching, the question not seen", _HIDDEN,
        "smollm2_compaction.yaml", "gracekv-agnostic",
        (
            "gracekv-agnostic", "kvzip-two-pass", "attention-matching",
            "attention-matching[quota=global]", "expected-attention",
        ),
        _FURTHER[:2], "50x", notes=(_AGNOSTIC, _EQUAL), kinds=True,
    ),
    "ablations": Suite(
        "What each part brings", _SEEN, "smollm2_ablations.yaml", "gracekv-plus",
        bases=("gracekv",), notes=(_PLUS,),
    ),
    "long-outputs": Suite(
        "Long answers under a limit", _SEEN, "smollm2_long_outputs.yaml",
        "gracekv-plus[decode=fitted]", last="8x", bases=("gracekv-plus[decode=none]",),
        notes=(_LIMIT,),
    ),
}  # fmt: skip
NEEDLES = ("single_retrieval", "retrieval", "shared_lookup")
TEXTS = (
    "single_doc_qa", "multi_doc_qa", "summarization", "few_shot", "ruler_qa", "shared_qa",
)  # fmt: skip


def with_ours(suite: Suite, recipe: str) -> Suite:
    """The same with `recipe` in place of `ours`."""
    quantised = suite.quantised if recipe.endswith("-allocated") else ()
    placed = (recipe, *(x for x in suite.placed if x != suite.ours), *quantised)
    return replace(suite, ours=recipe, placed=placed)


def suite_of(name: str, rows: Sequence[Row]) -> Suite:
    """The suite called `name`; `ConfigError` if rows have the other protocol, or both."""
    suite, found = SUITES[name], sorted({row["settings"]["protocol"] for row in rows})
    if found != [suite.protocol]:
        raise ConfigError(
            f"The folder must hold rows of {suite.protocol} for {name}; it holds rows of "
            f"{' and '.join(found) or 'none'}. Run each protocol in a folder of its own."
        )
    return suite
