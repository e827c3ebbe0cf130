"""The parts of `make results`: their commands, files and minutes."""

from __future__ import annotations

from dataclasses import dataclass

MOST_MINUTES = 210
"""Of all parts together."""

OUTSIDE = {
    "gpu": "`make gpu`, on a GPU that the machine of the other results does not have",
    "gpu-compression": "the steps of `gpu.py --parts compress`, on another GPU",
    "fuzz": "`make test-long`, a test",
    "conversation": "`python benchmarks/conversation.py`, half an hour on a core",
    "vllm_memory": "`.venv-vllm/bin/python benchmarks/vllm_memory.py`, ten minutes on a core",
}
"""Files that are shown but not made by `make results`, and how they are made."""


@dataclass(frozen=True)
class Part:
    """A measurement that runs on its own.

    In commands, `{data}` is the folder of essays, questions and data sets, `{rows}` the part's own
    folder of rows; `python`, `gracekv` and `vllm-python` are those of the environments.

    Attributes:
        name: name of the part.
        question: the question that it answers.
        minutes: time limit.
        commands: run in parallel; with one thread each if there are several. A part that shares
            the machine has two; timings have one, and run alone.
        outputs: names of the pages that it writes to `benchmarks/results`.
        pages: commands that make pages of the rows, run in sequence after `commands`.
        threads: threads of a single command.
        balanced: whether the rows present at the time limit can be published, since only complete
            samples count. Otherwise the part has failed.
        resumes: whether an interrupted part resumes from its rows.
    """

    name: str
    question: str
    minutes: int
    commands: tuple[str, ...]
    outputs: tuple[str, ...]
    pages: tuple[str, ...] = ()
    threads: int = 2
    balanced: bool = False
    resumes: bool = False

    @property
    def is_vllm(self) -> bool:
        """Whether it runs in vLLM's environment."""
        return any(command.startswith("vllm-python ") for command in self.commands)


def _evaluation(
    name: str, question: str, minutes: int, config: str, *pages: str, outputs: tuple[str, ...] = ()
) -> Part:
    """A part: two single-threaded processes write rows; `suite.py` makes the page `name`."""
    run = f"gracekv evaluate --config benchmarks/{config}.yaml --data {{data}} --out {{rows}}"
    shards = tuple(f"{run} --shard {shard}/2" for shard in range(2))
    names = outputs or (name,)
    own = (f"python benchmarks/suite.py {{rows}} --name {name}",) if name in names else ()
    return Part(
        name, question, minutes, shards, names, (*own, *pages), threads=1, balanced=True,
        resumes=True,
    )  # fmt: skip


def _compared(name: str, title: str, before: str, *after: str, by: str = "") -> str:
    methods = " ".join(f'"{{rows}}:{method}"' for method in (before, *after))
    return f'python benchmarks/compare_runs.py {methods} --title "{title}" --out {name}{by}'


_BITS = "gracekv-plus[precision=uniform;precision.bits={}]"
_MEMORY = "python benchmarks/memory.py --models smollm2 --log {rows}/memory.jsonl --rows"

PARTS = (
    _evaluation(
        "smollm2-default", "How close is the default, the question seen? And ten rivals?", 15,
        "smollm2_default",
    ),
    _evaluation(
        "smollm2-agnostic", "How close is it, the question not seen?", 26, "smollm2_agnostic",
        _compared(
            "agnostic-differences", "The question not seen, prompt by prompt", "kvzip-two-pass",
            "gracekv-agnostic", "gracekv-agnostic-two-pass", "gracekv-agnostic-allocated",
            "gracekv-agnostic-two-pass-allocated",
        ),
        outputs=("smollm2-agnostic", "agnostic-differences"),
    ),
    _evaluation("answers", "Which answers are kept, the question seen?", 11, "smollm2_answers"),
    _evaluation(
        "answers-agnostic", "Which answers are kept, the question not seen?", 13,
        "smollm2_agnostic_answers",
    ),
    _evaluation(
        "precision", "What do bits bring at equal bytes?", 8, "smollm2_bytes",
        _compared(
            "precision-differences", "Bits at equal bytes, prompt by prompt", "gracekv-plus",
            "gracekv-plus-allocated", _BITS.format(8), _BITS.format(4),
        ),
        outputs=("precision", "precision-differences"),
    ),
    _evaluation("compaction", "2x to 50x beside Attention Matching?", 13, "smollm2_compaction"),
    _evaluation(
        "ablations", "What does each part of the recipes bring?", 9, "smollm2_ablations",
    ),
    _evaluation(
        "fit-by-task", "Does the fit cost any task anything?", 30, "smollm2_fit",
        _compared(
            "fit", "What the fit brings", "gracekv-plus-no-fit", "gracekv-plus", by=" --tasks"
        ),
        _compared(
            "fit-agnostic", "What the fit brings, the question not seen",
            "gracekv-agnostic[fit=none]", "gracekv-agnostic", by=" --tasks",
        ),
        outputs=("fit", "fit-agnostic"),
    ),
    _evaluation(
        "long-outputs", "What does a limit lose in long answers?", 6, "smollm2_long_outputs"
    ),
    Part(
        "memory", "How much memory does a compression take?", 17,
        (
            f"{_MEMORY} prefill gracekv-plus --processes 3",
            f"{_MEMORY} gracekv-agnostic gracekv \"whole gracekv-plus\" snapkv",
        ),
        ("memory",),
        (
            f"{_MEMORY} prefill gracekv gracekv-plus-no-fit \"whole gracekv-plus-no-fit\" "
            "--lengths 2048 --allocator direct",
        ),
        threads=1, balanced=True, resumes=True,
    ),
    Part(
        "construction-cpu", "Which stage of the paper's method takes how long?", 4,
        (
            "python benchmarks/construction.py --lengths 1024 2048 4096 --repeats 3 "
            "--out benchmarks/results/construction-cpu.md",
        ),
        ("construction-cpu",),
    ),
    Part(
        "construction-plus", "What does compressing add to the prefill?", 9,
        ("python benchmarks/construction_plus.py",), ("construction-plus",), threads=1,
    ),
    Part(
        "construction-all", "And every other recipe?", 25,
        (
            "python benchmarks/construction_plus.py --recipes all --lengths 800 --rounds 3 "
            "--out benchmarks/results/construction-all.md",
        ),
        ("construction-all",), threads=1,
    ),
    Part(
        "decode", "How fast is decoding?", 2,
        ("python benchmarks/decode.py --skews 3,50 --bits \"\"",), ("decode",),
    ),
    Part(
        "decode-bits", "And with fewer bits?", 1,
        (
            "python benchmarks/decode.py --parts attention --dtype float32,bfloat16 --lengths 8192 "
            "--ratios 1,4,8 --rounds 21 --least --title \"Decoding with fewer bits\" "
            "--out benchmarks/results/decode-bits.md",
        ),
        ("decode-bits",), threads=1,
    ),
    Part(
        "limit-cost", "What do cuts cost beside decoding?", 3,
        ("python benchmarks/limit_cost.py --rounds 3",), ("limit-cost",),
    ),
    Part(
        "extend", "What does a text lose in passages?", 4,
        ("python benchmarks/extend.py",), ("extend",), threads=1,
    ),
    Part(
        "ten_questions", "Ten questions to one context, read once or ten times?", 3,
        ("python benchmarks/ten_questions.py --tokens 2048",), ("ten_questions",), threads=1,
    ),
    Part(
        "vllm", "What do contexts bring in vLLM?", 6,
        ("vllm-python benchmarks/vllm_serving.py --lengths 1024 4096 8192",), ("vllm",), threads=1,
    ),
    Part(
        "vllm-plugin", "What does the plugin cost plain requests?", 2,
        ("vllm-python benchmarks/vllm_plugin_cost.py --threes 250",), ("vllm-plugin",), threads=1,
    ),
    Part(
        "vllm_compress", "What does it cost that vLLM compresses?", 3,
        ("vllm-python benchmarks/vllm_compress.py --lengths 2048 4096",), ("vllm_compress",),
        threads=1,
    ),
)  # fmt: skip
"""In the order in which they run: quality first, then timings, each alone."""
