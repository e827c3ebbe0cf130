"""Rows of an evaluation that was never run, and folders of them."""

import json


def row(method, column, index, score, task="ruler:cwe", **fields):
    case, settings = f"{task}|{index}", {"protocol": "query_aware", "max_new_tokens": 4}
    key = f"{method}|{column}|{case}|{fields.get('settings', '')}"
    cell = {"key": key, "method": method, "column": column, "settings": settings}
    model = {"model": "tiny", "dtype": "float32", "marks": {"weights": "first"}}
    sample = {"sample": case, "prompt_hash": case, "length": 1024, "seed": 42, "index": index}
    what = {"task": task, "source": "generated", "group": "aggregation", "metric": "set_recall"}
    fidelity = {"kl": 1 - score, "dnll": 0.0, "top1": score, "aoe": 0.5}
    found = {"error": None, "score": score, "fidelity": fidelity}
    versions = {"versions": {"gracekv": "0.1.0"}}
    return cell | model | sample | what | found | versions | fields


def grid(scores):
    """Rows of one task from {(method, column): [scores]}."""
    return [row(m, c, i, s) for (m, c), values in scores.items() for i, s in enumerate(values)]


def written(folder, rows, name="main"):
    """The folder with `rows` in it, as a run leaves them."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / f"rows-{name}.jsonl").write_text(text, encoding="utf-8")
    return folder
