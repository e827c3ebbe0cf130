"""A few elements of each weight, wherever they lie, to tell models apart."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gracekv.distributed.sharding import head_shard


def sampled_weights(model: Any, count: int) -> dict[str, Tensor]:
    """Evenly spread elements of each weight, as bytes: name to uint8 [at most count, itemsize].

    The same for a whole and for a sharded model, all of whose processes call this together. Weights
    that cannot be read, because they are offloaded or of a quantising class, are left out.

    Args:
        model: a transformers model.
        count: most elements of a weight.
    """
    shard = head_shard(model)
    found: dict[str, Tensor] = {}
    apart = []
    for name, weight in model.named_parameters():
        data = weight.detach()
        sharded = shard is not None and hasattr(data, "placements")
        # Quantised tensors of their own class cannot be relied on to be sliced.
        if (not sharded and type(data) is not Tensor) or data.device.type == "meta":
            continue
        if not data.numel():
            continue
        picked = min(count, data.numel())
        at = torch.arange(picked) * (data.numel() // picked)
        if sharded:
            apart.append(name)
            found[name] = _own_elements(data, at)
        else:
            found[name] = _bytes(data.reshape(-1)[at.to(data.device)])
    if shard is not None and apart:
        # Each element lies in one process; the others give zeros.
        flat = shard.maximum(torch.cat([found[name].flatten() for name in apart]))
        sizes = [found[name].numel() for name in apart]
        for name, part in zip(apart, flat.split(sizes), strict=True):
            found[name] = part.view_as(found[name])
    return found


def _own_elements(weight: Any, at: Tensor) -> Tensor:
    """uint8 [n, itemsize]: elements `at` (flat) of a DTensor on a 1-D mesh; 0 where elsewhere."""
    local, placement = weight.to_local(), weight.placements[0]
    mesh, rank = weight.device_mesh, weight.device_mesh.get_local_rank()
    place = list(torch.unravel_index(at, weight.shape))
    own = torch.full_like(at, rank == 0, dtype=torch.bool)
    if not placement.is_replicate():
        dim = placement.dim % weight.ndim
        # Packed weights are split block by block, others as one block; each as torch.chunk cuts.
        blocks = getattr(placement, "split_factor", 1)
        size = weight.shape[dim] // blocks
        chunk = math.ceil(size / mesh.size())
        block, within = place[dim] // size, place[dim] % size
        own = within // chunk == rank
        place[dim] = block * (local.shape[dim] // blocks) + within % chunk
    result = torch.zeros(len(at), weight.element_size(), dtype=torch.uint8)
    inside = tuple(x[own].to(local.device) for x in place)
    result[own] = _bytes(local[inside])
    return result


def _bytes(elements: Tensor) -> Tensor:
    """uint8 [n, itemsize] of `elements` [n], on the CPU."""
    return (
        elements.contiguous().cpu().view(torch.uint8).view(len(elements), elements.element_size())
    )
