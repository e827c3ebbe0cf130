"""Broken versions of valid files: bytes, lengths, headers, shapes, sizes, values."""

import hashlib
import json
import struct
from random import Random

import torch
from safetensors.torch import load, save

from gracekv.cache import serialization

# Replacements for a value of plain data.
JUNK = (
    None, True, False, 0, -1, 1, 2, 3.5, float("nan"), float("inf"), -0.0, 1 << 31, 1 << 62,
    1 << 70, 10**400, 1e308, "", "x", "greedy", "-1", "\ud7ff\x00", [], {}, [[]],
    {"name": "greedy"}, {"name": 3}, [0], ["a", 1], list(range(50)), [1 << 62] * 3, "DEEP", "HUGE",
)  # fmt: skip
# Valid JSON that json.dumps cannot write, by the text that stands for it.
UNWRITABLE = {'"DEEP"': "[" * 100_000 + "]" * 100_000, '"HUGE"': "1e999"}
# Texts that are not a header, whatever their checksum.
NESTED = ("[" * 100_000, '{"x":' * 100_000)
NO_HEADERS = ("", "{", *NESTED, "1e999", "NaN", "9" * 5000, '"x"', "[]", "{}")


def mutated_bytes(data: bytes, rng: Random) -> tuple[str, bytes]:
    """A kind, and `data` with some bytes changed, cut off, added or moved."""
    broken = bytearray(data)
    kind = rng.choice(["flip", "cut", "grow", "zero", "swap", "empty", "repeat"])
    at = rng.randrange(len(broken))
    # Half of all damage goes to the structure.
    if rng.random() < 0.5:
        at = min(at, rng.randrange(2000))
    if kind == "flip":
        for _ in range(rng.randint(1, 8)):
            broken[(at + rng.randrange(64)) % len(broken)] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del broken[at:]
    elif kind == "grow":
        broken[at:at] = rng.randbytes(rng.choice([1, 8, 1000]))
    elif kind == "zero":
        end = min(len(broken), at + rng.choice([1, 8, 512]))
        broken[at:end] = bytes(end - at)
    elif kind == "swap":
        broken[at : at + 16], broken[:16] = broken[:16], broken[at : at + 16]
    elif kind == "empty":
        del broken[rng.choice([0, 4, 8, 9]) :]
    else:
        broken += bytes(broken)
    return f"bytes: {kind}", bytes(broken)


def mutated_layout(data: bytes, rng: Random) -> tuple[str, bytes]:
    """A safetensors file whose own header has wrong lengths, shapes, types or offsets."""
    size = struct.unpack("<Q", data[:8])[0]
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    kind = rng.choice(["length", "shape", "dtype", "offsets", "drop", "add", "rename", "metadata"])
    if kind == "length":
        wrong = rng.choice([0, 1, size - 1, size + 1, len(data), 1 << 27, 1 << 40, (1 << 64) - 1])
        return "layout: length", struct.pack("<Q", wrong) + data[8:]
    name = rng.choice([name for name in header if name != "__metadata__"])
    tensor = header[name]
    if kind == "shape":
        tensor["shape"] = rng.choice([[], [1 << 40], [1 << 31, 1 << 31], [-1], [0], ["x"], None])
    elif kind == "dtype":
        tensor["dtype"] = rng.choice(["F64", "BF16", "I64", "BOOL", "U8", "F8_E4M3", "x", 3])
    elif kind == "offsets":
        tensor["data_offsets"] = rng.choice(
            [[0, 1 << 50], [5, 1], [-8, 0], [0], [len(body), 2 * len(body)], None]
        )
    elif kind == "drop":
        del header[name]
    elif kind == "add":
        header["extra"] = tensor
    elif kind == "rename":
        header[f"{name}x"] = header.pop(name)
    else:
        metadata = header["__metadata__"]
        field = rng.choice(sorted(metadata))
        metadata[field] = rng.choice(["", "x", "2", "{}", metadata[field][:-1], "9" * 5000])
    text = json.dumps(header).encode()
    return f"layout: {kind}", struct.pack("<Q", len(text)) + text + body


def mutated_content(data: bytes, rng: Random) -> tuple[str, bytes]:
    """A file with changed header or tensors, and valid checksums."""
    metadata = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])["__metadata__"]
    header, tensors = json.loads(metadata["gracekv"]), load(data)
    if rng.random() < 0.6:
        kind = _mutate_plain(header, rng)
    else:
        name = rng.choice(sorted(tensors))
        kind = name.rpartition(".")[2]
        tensors[name] = _mutated_tensor(tensors[name], rng)
        header["sha256"][name] = serialization._digest(tensors[name])
    text = json.dumps(header, sort_keys=True)
    for stand_in, written in UNWRITABLE.items():
        text = text.replace(stand_in, written)
    if rng.random() < 0.1:
        kind, text = "no header", rng.choice(NO_HEADERS)
    metadata["gracekv"] = text
    metadata["gracekv_sha256"] = hashlib.sha256(text.encode()).hexdigest()
    return f"content: {kind}", save(tensors, metadata)


def mutated_data(data: dict, rng: Random) -> tuple[str, dict]:
    """Plain data with one value, key or branch changed."""
    changed = json.loads(json.dumps(data))
    return _mutate_plain(changed, rng), changed


def _mutate_plain(data: dict | list, rng: Random) -> str:
    """Change one place in nested plain data; returns its topmost key."""
    place, top = data, ""
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            break
        key = rng.choice(keys)
        top = top or str(key)
        inner = place[key]
        if isinstance(inner, dict | list) and inner and rng.random() < 0.85:
            place = inner
            continue
        action = rng.random()
        if action < 0.15:
            del place[key]
        elif action < 0.25 and isinstance(place, dict):
            place[rng.choice(["x", "name", f"{key}x", ""])] = inner
        elif action < 0.4 and type(inner) in (int, float):
            place[key] = rng.choice([-inner, inner + 1, inner - 1, inner * 1000, inner / 3])
        else:
            place[key] = rng.choice(JUNK)
        break
    return top


def _mutated_tensor(tensor: torch.Tensor, rng: Random) -> torch.Tensor:
    kinds = ["shorter", "longer", "dtype", "shape", "values", "nan", "order", "empty", "flat"]
    kind = rng.choice(kinds)
    flat = tensor.clone()
    if kind == "shorter":
        flat = flat[:-1]
    elif kind == "longer":
        flat = torch.cat([flat, flat[:1]])
    elif kind == "dtype":
        flat = flat.to(rng.choice([torch.float16, torch.float64, torch.int32, torch.int64]))
    elif kind == "shape":
        flat = flat[None] if rng.random() < 0.5 else flat.flatten()
    elif kind == "values":
        flat.view(-1)[rng.randrange(flat.numel())] = rng.choice([-1, 1 << 30, 7])
    elif kind == "nan" and flat.is_floating_point():
        flat.view(-1)[rng.randrange(flat.numel())] = float(rng.choice(["nan", "inf", "-inf"]))
    elif kind == "flat":
        flat = flat.new_empty(rng.choice([(len(flat), 0), (len(flat), 1, 1), (0, 7), ()]))
        flat.zero_()
    elif kind == "order":
        flat = flat.flip(0)
    else:
        flat = flat[:0]
    return flat.contiguous()
