"""Tasks whose answers are long traces: four of LongProc.

The reference trace is fed after the prompt, an interval at a time, over a cache with a limit.

Source: LongProc (Ye et al. 2025, arXiv:2501.05414), its prompts and records at 0.5K.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gracekv.allocate import Budget
from gracekv.decode import Limit
from gracekv.errors import TaskError
from gracekv.evaluate.sample import Rendered, Sample
from gracekv.evaluate.sources import Sources
from gracekv.pipeline import Pipeline

EVERY = 64
"""Tokens between cuts; these answers have about 500 tokens."""


# The text with which the question begins in LongProc's prompt.
TASKS = {
    "path_traversal": "\n\nNow find the route",
    "countdown": "\n\n[Problem]",
    "tom_tracking": "\n\n[QUESTION]",
    "pseudo_to_code": "\n\n[CODE]",
}


FORMS: dict[str, dict[str, Any]] = {
    x: {"group": "long_output", "max_new_tokens": 1024, "part": f"longproc:{x}"} for x in TASKS
}
"""The fixed facts of each task."""


def record_sample(name: str, index: int, sources: Sources) -> Sample:
    """Sample `index` of the task; raises `TaskError` if there is none, or an unusable one."""
    records, template = sources.records(f"longproc:{name}"), sources.longproc_prompt(name)
    try:
        text, answer = _fields(name, records[index], records[index - 1], template)
    except (LookupError, TypeError, ValueError) as error:
        told = f"Record {index} of {name!r} does not fit its prompt: {error!r}. Get both again."
        raise TaskError(told) from error
    context, mark, question = text.rpartition(TASKS[name])
    task = f"long_output:{name}"
    return Sample(task, index, "", context, mark + question, "", (answer,), "rouge_l", whole=True)


def _fields(
    name: str, record: Mapping[str, Any], other: Mapping[str, Any], template: str
) -> tuple[str, str]:
    """The prompt's text and the gold trace."""
    if name == "path_traversal":
        source, target = record["question_repr"]
        places = {"city_context": record["context_nl"], "src_city": source, "dst_city": target}
        return template.format(**places), f"<Route>\n{record['answer_nl']}\n</Route>"
    if name == "countdown":
        # LongProc shows demonstrations of other problems.
        asked = {**record, "demonstration": other["demonstration"]}
        return template.format(**asked), record["demonstration"]
    if name == "tom_tracking":
        return template.format(**record), record["solution"]
    code = "\n".join(record["code_lines"])
    return template.format(pseudocode="\n".join(record["pseudocode_lines"])), f"```cpp\n{code}\n```"


def within(budget: Budget, rendered: Rendered, pipeline: Pipeline) -> tuple[Budget, Limit]:
    """The context's budget and the limit of prompt and answer, if `budget` is for both.

    The rest of the prompt and the last tokens are kept first; context and answer share the
    remaining limit equally, whatever the strategy (ours).
    """
    prompt, context = len(rendered.prompt.ids), rendered.prompt.spans.context_length
    window, exact = 16, budget.kind == "entries_per_head"
    length = prompt + len(rendered.answer_ids)
    entries = int(budget.amount) if exact else int(length / budget.amount)
    limit = Limit(entries_per_head=entries, every=EVERY, window=window, strategy=pipeline.decode)
    left = max(pipeline.window.minimum, (entries - window - (prompt - context)) // 2)
    return Budget.entries_per_head(min(left, context)), limit
