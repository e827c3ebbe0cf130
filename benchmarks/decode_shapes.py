"""Inputs of `decode.py`: layers, caches and models of given sizes, with random contents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin

from gracekv.backends import AttentionSpec, AttentionStep, Auto
from gracekv.cache import LayerEntries, RaggedCache, RaggedEntries
from gracekv.hf import GraceCache
from gracekv.hf.smollm2 import load_smollm2
from gracekv.precision import UniformPrecision
from gracekv.prefill import Region

TAIL = 64
# Most bytes of the copies of a layer, which defeat the CPU's caches.
WORKING_SET = {"cpu": 1 << 30, "cuda": 8 << 30}
Step = Callable[[], object]


@dataclass(frozen=True)
class Geometry:
    """Sizes of a model; `config` uses transformers' names, for a model with random weights."""

    layers: int
    heads: int
    kv_heads: int
    dim: int
    config: dict[str, Any] | None = None


QWEN = {
    "hidden_size": 3584, "intermediate_size": 18944, "vocab_size": 152064,
    "max_position_embeddings": 131072 + 1024, "rope_theta": 1e6, "tie_word_embeddings": False,
}  # fmt: skip
TINY = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 64}
GEOMETRIES = {
    "smollm2": Geometry(30, 9, 3, 64),
    "qwen2.5-7b": Geometry(28, 28, 4, 128, QWEN),
    # For trying out the script.
    "tiny": Geometry(2, 4, 2, 16, TINY),
}


def random(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.randn(shape, dtype=like.dtype, device=like.device)


def ragged(
    geometry: Geometry, batch: int, entries: int, skew: float, like: Tensor
) -> RaggedEntries:
    """`batch` sequences of `entries` per head on average; heads differ by a factor up to `skew`."""
    weight = 1 + torch.rand(batch, geometry.kv_heads) * (min(skew, 3) - 1)
    if skew > 3:
        weight[:] = 1
        weight[:, 0] = skew
    lengths = (weight / weight.sum(1, keepdim=True) * geometry.kv_heads * entries).long()
    lengths[:, -1] += geometry.kv_heads * entries - lengths.sum(1)
    total = int(lengths.sum())
    return RaggedEntries(
        keys=random((total, geometry.dim), like),
        values=random((total, geometry.dim), like),
        positions=torch.zeros(total, dtype=torch.int32, device=like.device),
        log_multiplicity=torch.rand(total, device=like.device),
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)]),
        sequences=batch,
    )


def quantised(layer: RaggedEntries, bits: int | None) -> LayerEntries:
    """All entries of `layer` at 8 or 4 bits, or unchanged if None."""
    if bits is None:
        return layer
    cache = RaggedCache((layer,), 1, (0,) * layer.sequences)
    precision = UniformPrecision(bits=bits, sinks=0)
    return precision(cache, [precision.widths(layer.positions, Region(0, 1))]).layers[0]


@dataclass
class Attention:
    """One layer's attention of one token per sequence; `copies` layers stand for a model's."""

    geometry: Geometry
    batch: int
    length: int
    skew: float
    like: Tensor

    def __post_init__(self) -> None:
        geometry, groups = self.geometry, (self.batch, self.geometry.kv_heads)
        self.position_bytes = 2 * groups[0] * groups[1] * geometry.dim * self.like.element_size()
        self.full_bytes = self.position_bytes * (self.length + TAIL)
        room = WORKING_SET[self.like.device.type] // self.full_bytes
        self.copies = max(1, min(geometry.layers, room))
        spec = AttentionSpec(self.like.device, self.like.dtype, geometry.dim)
        self.backend = Auto().resolve(spec)
        self.query = random((self.batch, geometry.heads, 1, geometry.dim), self.like)
        tail = (*groups, 2 * TAIL, geometry.dim)
        self.tails = [
            [random(tail, self.like)[:, :, :TAIL] for _ in "kv"] for _ in range(self.copies)
        ]

    def full(self) -> dict[str, Step]:
        geometry, sdpa = self.geometry, torch.nn.functional.scaled_dot_product_attention
        shape = (self.batch, geometry.kv_heads, self.length + TAIL, geometry.dim)
        full = [[random(shape, self.like) for _ in "kv"] for _ in range(self.copies)]
        folded = self.query.view(self.batch, geometry.kv_heads, -1, geometry.dim)
        return {
            "FullKV": lambda: [sdpa(self.query, k, v, enable_gqa=True) for k, v in full],
            "FullKV, heads folded": lambda: [sdpa(folded, k, v) for k, v in full],
        }

    def ours(self, ratio: int, bits: int | None = None) -> tuple[Step, int]:
        """The step, and the bytes that it reads: keys, values, and the backend's own tensors.

        `ratio` counts entries; `bits` are per number, or None for the dtype's.
        """
        entries = self.length // ratio
        made = [
            quantised(ragged(self.geometry, self.batch, entries, self.skew, self.like), bits)
            for _ in range(self.copies)
        ]
        stored = sum(layer.kv_bytes for layer in made) // self.copies
        layers = [self.backend.prepare(layer) for layer in made]
        for layer in layers:
            self.backend.warm_up(layer, self.geometry.heads)
        held = sum(map(self.backend.held_bytes, layers)) // self.copies
        scale = self.geometry.dim**-0.5

        def step() -> None:
            for layer, tail in zip(layers, self.tails, strict=True):
                self.backend(AttentionStep(self.query, layer, *tail, scale))

        return step, stored + self.position_bytes * TAIL + held


class Fixed(CacheLayerMixin):  # type: ignore[misc]
    """FullKV of fixed length: each step overwrites the last place, so it can be a CUDA graph."""

    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.keys[:, :, -1:], self.values[:, :, -1:] = keys, values
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.keys.shape[2] - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2], 0

    def get_max_length(self) -> int:
        return -1


def full_cache(geometry: Geometry, batch: int, length: int, like: Tensor) -> Cache:
    shape = (batch, geometry.kv_heads, length, geometry.dim)
    pairs = [[random(shape, like) for _ in "kv"] for _ in range(geometry.layers)]
    if like.device.type == "cuda":
        return Cache(layers=[Fixed(*pair) for pair in pairs])
    cache = DynamicCache()
    for number, pair in enumerate(pairs):
        cache.update(*pair, number)
    return cache


def compressed(geometry: Geometry, batch: int, length: int, ratio: int, like: Tensor) -> GraceCache:
    layers = tuple(
        ragged(geometry, batch, length // ratio, 3, like) for _ in range(geometry.layers)
    )
    return GraceCache(RaggedCache(layers, length, padding=(0,) * batch))


def model_of(geometry: Geometry, dtype: torch.dtype, device: str) -> Any:
    """SmolLM2 with its weights; other sizes with random weights."""
    if geometry.config is None:
        return load_smollm2(dtype)[0].to(device)
    config = AutoConfig.for_model(
        "qwen2", num_hidden_layers=geometry.layers, num_attention_heads=geometry.heads,
        num_key_value_heads=geometry.kv_heads, **geometry.config,
    )  # fmt: skip
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
