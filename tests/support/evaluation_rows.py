"""Rows of an evaluation that was never run, and folders of them."""

import json


def row(method, column, index, score, task="ruler:cwe", **fields):
    return {
        "key": f"{method}|{column}|{task}|{index}|{fields.get('settings', '')}",
        "sample": f"{task}|{index}", "prompt_hash": f"{task}|{index}", "model": "tiny",
        "dtype": "float32", "marks": {"weights": "first"}, "task": task, "length": 1024,
        "seed": 42, "index": index, "settings": {"protocol": "query_aware", "max_new_tokens": 4},
        "group": "aggregation", "metric": "set_recall", "method": method, "column": column,
        "versions": {"gracekv": "0.1.0"}, "source": "generated", "error": None, "score": score,
        "fidelity": {"kl": 1 - score, "dnll": 0.0, "top1": score, "aoe": 0.5}, **fields,
    }  # fmt: skip


def grid(scores):
    """Rows of one task from {(method, column): [scores]}."""
    return [row(m, c, i, s) for (m, c), values in scores.items() for i, s in enumerate(values)]


def written(folder, rows, name="main"):
    """The folder with `rows` in it, as a run leaves them."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / f"rows-{name}.jsonl").write_text(text, encoding="utf-8")
    return folder
