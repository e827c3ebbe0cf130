"""What must agree between the model that made a context and the model that vLLM serves."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Elements of each weight that identify it, evenly spread. Source: ours.
_SAMPLES = 64
_PROJECTION = re.compile(r".*?(layers\.(\d+)\.self_attn\.\w*proj\.weight)$")
_SIZES = {
    "hidden_size": "hidden_size",
    "layers": "num_hidden_layers",
    "query_heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "vocabulary": "vocab_size",
}


def config_facts(config: Any, dtype: torch.dtype) -> dict[str, Any]:
    """Family, sizes, RoPE and dtype of a transformers config, as plain data.

    vLLM reads the same configs, so these can be compared without either engine's model.
    """
    sizes = {name: getattr(config, field, None) for name, field in _SIZES.items()}
    sizes["kv_heads"] = sizes["kv_heads"] or sizes["query_heads"]
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    return {
        "family": config.model_type,
        **sizes,
        "head_dim": dim,
        "rope": {name: value for name, value in sorted(rope.items()) if value is not None},
        "dtype": str(dtype).removeprefix("torch."),
    }


def model_facts(model: Any) -> dict[str, Any]:
    """`config_facts` of a transformers model, with a digest of its attention's weights."""
    facts = config_facts(model.config.get_text_config(), model.dtype)
    plain = getattr(model, "hf_quantizer", None) is None
    facts["weights"] = _digest(model.named_parameters(), model.dtype, facts) if plain else None
    return facts


def checkpoint_digest(folder: Path, dtype: torch.dtype, facts: Mapping[str, Any]) -> str | None:
    """The digest of `model_facts` from a folder of safetensors files; None if it cannot be made."""
    from safetensors import SafetensorError, safe_open

    try:
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        else:
            path = folder / "model.safetensors"
            with safe_open(path, "pt") as file:
                files = dict.fromkeys(file.keys(), path.name)
        wanted = {name: file for name, file in files.items() if _place(name, facts)}
        weights = []
        for name, home in wanted.items():
            with safe_open(folder / home, "pt") as file:
                weights.append((name, file.get_tensor(name)))
    except (OSError, SafetensorError, ValueError, KeyError, TypeError):
        return None
    return _digest(weights, dtype, facts)


def differences(made: Mapping[str, Any], served: Mapping[str, Any]) -> list[str]:
    """Names of the facts of `made` that `served` contradicts; what it does not know is left out."""
    found = []
    for name, value in made.items():
        other = served.get(name)
        if value is None or other is None:
            continue
        if name == "rope":
            same = all(other.get(key) in (None, mine) for key, mine in value.items())
        else:
            same = value == other
        if not same:
            found.append(name)
    return found


def _place(name: str, facts: Mapping[str, Any]) -> str | None:
    """Where a projection of the first or last layer's attention lies; None for other weights."""
    found = _PROJECTION.match(name)
    if found is None or int(found[2]) not in (0, facts["layers"] - 1):
        return None
    return found[1]


def _digest(
    weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, facts: Mapping[str, Any]
) -> str | None:
    """Of places, shapes and a few elements in `dtype`; None if there are no such weights."""
    marks = []
    for name, weight in weights:
        place = _place(name, facts)
        if place is None or weight.device.type == "meta":
            continue
        flat = weight.detach().reshape(-1)
        count = min(_SAMPLES, len(flat))
        at = torch.arange(count, device=flat.device) * (len(flat) // count)
        few = flat[at].to(dtype).cpu().contiguous().view(torch.uint8).numpy().tobytes()
        marks.append((f"{place} {list(weight.shape)} ", few))
    if not marks:
        return None
    digest = hashlib.sha256()
    for mark, few in sorted(marks):
        digest.update(mark.encode() + few)
    return digest.hexdigest()[:16]
