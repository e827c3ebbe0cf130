"""`HeadShard`: which KV heads a process holds; and whether and how a model is sharded."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, distributed

from gracekv.distributed.exchange import GlooExchange
from gracekv.errors import ConfigError, RankError, UnsupportedModelError
from gracekv.registry import Configurable, Strategy
from gracekv.registry.hyperparameter import parts_of

TIMEOUT = 300.0
"""In seconds. Processes of one model do the same work, so they are rarely far apart."""

# transformers' sharding styles that replicate the norms of queries and keys.
_WHOLE_STYLES = ("replicate", "replicated_with_grad_allreduce")

# Supported sharding styles of a model's parts.
_STYLES = {
    # Other styles gather outputs, so every process attends with all heads.
    ".self_attn.": ("colwise", "rowwise", *_WHOLE_STYLES),
    # Linear layers hold the states of all heads in every process, which get complete outputs.
    ".linear_attn.": ("colwise_gather_output", "colwise_rep", *_WHOLE_STYLES),
}


@dataclass(frozen=True, slots=True, eq=False)
class HeadShard:
    """The part of a model's KV heads that this process holds.

    Process r of R holds the KV heads r G .. (r + 1) G - 1 of every layer. Tensors of all processes
    are gathered and then combined in rank order, so every process gets the same bits.

    Attributes:
        rank: r, from 0.
        ranks: R.
        exchange: communicates with the other processes; None (the default) if there are none.
    """

    rank: int = 0
    ranks: int = 1
    exchange: GlooExchange | None = None

    def gather(self, tensor: Tensor) -> Tensor:
        """[R, ...]: `tensor` [...] of every process, on its device."""
        if self.exchange is None:
            return tensor[None]
        return torch.stack(self.exchange(tensor.detach().cpu().contiguous())).to(tensor.device)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over processes, same shape as `tensor` [...]."""
        return self.gather(tensor).sum(dim=0)

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean over processes, same shape as `tensor` [...]."""
        return tensor if self.exchange is None else self.sum(tensor) / self.ranks

    def total(self, count: int) -> int:
        """The sum of an integer over processes."""
        return int(self.sum(torch.tensor(count)))

    def maximum(self, tensor: Tensor) -> Tensor:
        """The maximum over processes, same shape as `tensor` [...]."""
        return tensor if self.exchange is None else self.gather(tensor).amax(dim=0)

    def from_first(self, tensor: Tensor) -> Tensor:
        """The tensor [...] of process 0, of any shape; others pass the same dtype and rank."""
        if self.exchange is None:
            return tensor
        shape = self.gather(torch.tensor(tensor.shape))[0].tolist()
        return self.gather(tensor if self.rank == 0 else tensor.new_zeros(shape))[0]

    def all_heads(self, tensor: Tensor, dim: int) -> Tensor:
        """[.., R G, ..]: the heads of all processes along `dim` of their `tensor` [.., G, ..]."""
        return torch.cat(self.gather(tensor).unbind(), dim=dim)

    def own_heads(self, tensor: Tensor, dim: int) -> Tensor:
        """[.., G, ..]: this process's part of `tensor` [.., R G, ..], all heads along `dim`."""
        heads = tensor.shape[dim] // self.ranks
        return tensor.narrow(dim, self.rank * heads, heads)

    def among_all(self, places: Tensor, size: int) -> Tensor:
        """int64 [n]: the numbers of `places` [n] among those of all processes, layer by layer.

        `size` is the number of places in a layer here: with n places in each head, (layer * G +
        head) * n + i becomes (layer * R G + head in the whole model) * n + i.
        """
        return (places // size * self.ranks + self.rank) * size + places % size

    def agree(self, **facts: object) -> None:
        """Raise `RankError` on every process unless all pass `facts` with the same `repr`."""
        if self.exchange is None:
            return
        digests = [hashlib.sha256(repr(fact).encode()).digest() for fact in facts.values()]
        rows = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8)
        every = self.gather(rows.view(len(facts), -1))
        same = (every == every[0]).all(dim=2)
        for number, name in enumerate(facts):
            if not bool(same[:, number].all()):
                others = (~same[:, number]).nonzero().flatten().tolist()
                raise RankError(
                    f"The processes of a sharded model must make the same call; {name} of process "
                    f"{', '.join(map(str, others))} is not that of process 0. Give every process "
                    f"the same arguments."
                )


WHOLE = HeadShard()
"""All KV heads, of a model in one process."""

_shards: WeakKeyDictionary[Any, HeadShard] = WeakKeyDictionary()


def is_sharded(model: Any) -> bool:
    """Whether each process holds only a part of the model's weights.

    True for transformers' `tp_plan` (`DistributedConfig(tp_size=..., pp_size=...)`), for FSDP, and
    for linear layers whose weight is smaller than their declared size. A `device_map` does not
    shard.
    """
    if not isinstance(model, torch.nn.Module):
        return False
    if (getattr(model, "_tp_size", None) or 1) > 1 or hasattr(model, "_pp_stage"):
        return True
    every = [model]
    for module in every:  # faster than modules(), which makes names
        every += [x for x in module._modules.values() if x is not None]
    return any(_is_distributed(x) for module in every for x in module._parameters.values()) or any(
        type(module) is torch.nn.Linear
        and type(getattr(module, "weight", None)) is torch.nn.Parameter
        and module.weight.is_floating_point()
        and module.weight.numel() not in (0, module.out_features * module.in_features)
        for module in every
    )


def head_shard(model: Any) -> HeadShard:
    """Which KV heads this process holds: all if the model is not sharded.

    The first call connects the processes, see `connect`. Raises `UnsupportedModelError` like
    `check_sharding`.
    """
    return (_shards.get(model) or connect(model)) if is_sharded(model) else WHOLE


def connect(model: Any, *, timeout: float = TIMEOUT) -> HeadShard:
    """Connect the processes of a sharded model; all of them call this, or `gracekv.compress`.

    Does nothing for a model that is not sharded.

    Args:
        model: sharded by transformers' tensor parallelism.
        timeout: seconds to wait for another process before raising an error.

    Raises:
        UnsupportedModelError: see `check_sharding`.
        ConfigError: the timeout is not positive.
        RankError: a process does not answer.
    """
    if not isinstance(timeout, int | float) or not 0 < timeout < float("inf"):
        raise ConfigError(f"timeout must be a positive number of seconds; got {timeout!r}.")
    if not is_sharded(model):
        return WHOLE
    check_sharding(model)
    attending = (layer for layer in model.get_decoder().layers if hasattr(layer, "self_attn"))
    mesh = next(attending).self_attn.k_proj.weight.device_mesh
    ranks = sorted(distributed.get_process_group_ranks(mesh.get_group()))
    _shards[model] = HeadShard(mesh.get_local_rank(), len(ranks), GlooExchange(ranks, timeout))
    return _shards[model]


def check_sharding(model: Any) -> None:
    """Raise `UnsupportedModelError` unless `model` is whole, or sharded by attention heads.

    Sharded by heads: in every layer the projections of queries, keys and values are split by rows
    and the output projection by columns, into equal parts of whole KV heads, as transformers'
    `tp_plan` does for most models.
    """
    if is_sharded(model) and (problem := _problem(model)) is not None:
        raise UnsupportedModelError(
            f"The weights of this {type(model).__name__} are sharded over processes, and "
            f"{problem}. A budget over all heads needs a model sharded by transformers' tensor "
            f"parallelism into whole KV heads, and by nothing else. Load it that way or unsharded: "
            f"device_map='auto' puts whole layers on several GPUs."
        )


def check_whole(model: Any, call: str) -> None:
    """Raise `UnsupportedModelError` if `model` is sharded; `call` is what needs all heads."""
    if is_sharded(model):
        raise UnsupportedModelError(
            f"{call} needs all attention heads in one process, but those of this model are sharded "
            f"over several. Save the result, load it with the whole model in one process, and call "
            f"{call} there."
        )


def check_works_sharded(pipeline: Configurable, shard: HeadShard) -> None:
    """Raise `ConfigError` if a strategy of `pipeline` needs all heads but `shard` holds a part."""
    if shard.ranks == 1:
        return
    parts = [x for x in parts_of(pipeline) if isinstance(x, Strategy) and not x.works_sharded]
    names = [f"{x.registry.stage} {x.name!r}" for x in parts]
    if getattr(pipeline, "certify", False):
        names.append("certify=True")
    if names:
        raise ConfigError(
            f"This model's attention heads are spread over processes, but {', '.join(names)} "
            f"would need all of them in one. Use a recipe that works on such models, such as "
            f"'gracekv-plus', 'gracekv-agnostic', 'gracekv' or 'snapkv', or load the model with "
            f"device_map in one process."
        )


def own_columns(projection: Any) -> Tensor | None:
    """[out, n]: this process's input columns of a row-parallel linear layer; None if it is whole.

    Calling such a layer sums the products of all processes.
    """
    weight: Any = getattr(projection, "weight", None)
    return weight.to_local().detach() if _is_distributed(weight) else None


def _problem(model: Any) -> str | None:
    """Why this sharding is not supported; None if it is."""
    config, size = model.config.get_text_config(decoder=True), getattr(model, "_tp_size", None) or 1
    plan = getattr(model.config, "distributed_config", None)
    for name in ("fsdp_size", "dp_replicate_size", "pp_size", "ep_size"):
        if (getattr(plan, name, None) or 1) > 1:
            return f"{name} is {getattr(plan, name)}"
    if size == 1:
        return "not by transformers' tensor parallelism"
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if heads % size:
        return f"{heads} KV heads cannot be divided by {size} processes"
    for place, style in (getattr(model, "_tp_plan", None) or {}).items():
        for module, styles in _STYLES.items():
            if module in place and style not in styles:
                return f"{place} is sharded as {style!r}"
    for number, layer in enumerate(model.get_decoder().layers):
        if (attention := getattr(layer, "self_attn", None)) is None:
            if hasattr(layer, "linear_attn"):
                continue
            return f"layer {number} has no attention heads to divide"
        for name, dim in (("q_proj", 0), ("k_proj", 0), ("v_proj", 0), ("o_proj", 1)):
            weight: Any = getattr(getattr(attention, name, None), "weight", None)
            if (
                not _is_distributed(weight)
                or weight.device_mesh.ndim != 1
                or weight.device_mesh.size() != size
                or not weight.placements[0].is_shard(dim)
            ):
                return f"{name} of layer {number} is not split by heads"
    return None


def _is_distributed(weight: Any) -> bool:
    """Whether `weight` is a DTensor; there is none unless its module has been imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(weight, module.DTensor)
