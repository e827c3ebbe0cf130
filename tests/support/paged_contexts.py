"""Random steps of an inference engine: contexts of ragged heads, and requests with pages."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor

from gracekv.kernels import ragged
from gracekv.testing.attention import TOLERANCES, relative_error
from gracekv.vllm.context_attention import Asking
from gracekv.vllm.context_batch import last_pages
from gracekv.vllm.stored_context import StoredContext
from support import paged_reference as reference
from support.quantised_layers import layer_of

LAYOUTS = ("heads first", "tokens first", "layers inside")
"""Of a block in memory: [G, block, 2d], [block, G, 2d], or the first with gaps between blocks."""


@dataclass(frozen=True, slots=True, eq=False)
class PagedStep:
    """One step over R requests.

    Attributes:
        contexts: by name; the last of their two layers is attended to.
        requests: (context's name or None, tokens of the sequence, how many of them are new).
        metadata: as vLLM's, with `query_start_loc`, `seq_lens`, `block_table`, `max_seq_len` and
            `num_actual_tokens`; padded with rows without tokens.
        query: [all tokens, H, d].
        tails: keys and values [2, S, G, d] of each request.
        pages: [blocks, G, block, 2d]; places that no request has written are NaN.
        group: query heads per KV head.
    """

    contexts: Mapping[str, StoredContext]
    requests: Sequence[tuple[str | None, int, int]]
    metadata: SimpleNamespace
    query: Tensor
    tails: Sequence[Tensor]
    pages: Tensor
    group: int

    @property
    def asking(self) -> dict[int, Asking]:
        """Requests that have a context, by the last block of their pages."""
        pages = last_pages(self.metadata, self.pages.shape[2]).tolist()
        return {
            pages[row]: Asking(self.contexts[name], new)
            for row, (name, _, new) in enumerate(self.requests)
            if name
        }


def paged_step(
    seed: int, contexts: Mapping[str, Sequence[int]],
    requests: Sequence[tuple[str | None, int, int]], *, group: int, dim: int = 16, block: int = 16,
    dtype: torch.dtype = torch.float32, layout: str = LAYOUTS[0], device: str = "cpu",
) -> PagedStep:  # fmt: skip
    """A random step.

    Args:
        seed: seed of all numbers.
        contexts: entries of each head, by the context's name.
        requests: see `PagedStep`.
        group: query heads per KV head.
        dim: d.
        block: tokens per page.
        dtype: dtype of queries, keys and values.
        layout: layout of `LAYOUTS`.
        device: device of all tensors.
    """
    rng = torch.Generator().manual_seed(seed)
    heads = len(next(iter(contexts.values())))
    entries = partial(layer_of, rng, dim=dim, dtype=dtype, device=device)
    stored = {
        name: StoredContext.of(
            SimpleNamespace(digest=name),  # type: ignore[arg-type]
            (entries([1] * heads), entries(list(lengths))),
        )
        for name, lengths in contexts.items()
    }
    needed = [-(-length // block) for _, length, _ in requests]
    # Block 0 belongs to no request, as in vLLM; two more rows pad the step.
    free = 1 + torch.randperm(sum(needed), generator=rng).int()
    table = torch.zeros(len(requests) + 2, max(needed), dtype=torch.int32)
    shape, view = _storage(layout, len(free) + 1, heads, block, 2 * dim)
    stored_pages = torch.full(shape, torch.nan, dtype=dtype)
    pages = view(stored_pages)
    tails, begun = list[Tensor](), None
    for row, (_, length, _) in enumerate(requests):
        mine = free[sum(needed[:row]) :][: needed[row]]
        tail = torch.randn(2, length, heads, dim, generator=rng).to(dtype)
        if length > block:  # they begin alike, and vLLM keeps a common first page once
            begun = begun or (mine[:1], tail[:, :block])
            mine[:1], tail[:, :block] = begun
        table[row, : needed[row]] = mine
        at = torch.arange(length)
        pages[mine[at // block].long(), :, at % block] = torch.cat([*tail], dim=-1)
        tails.append(tail.to(device))
    new = torch.tensor([new for _, _, new in requests] + [0, 0])
    starts = ragged.offsets(new)
    # Steps are padded to even sizes, for CUDA graphs.
    tokens = int(starts[-1]) + int(starts[-1]) % 2
    metadata = SimpleNamespace(
        query_start_loc=starts.int().to(device),
        seq_lens=torch.tensor([length for _, length, _ in requests] + [0, 0]).int().to(device),
        block_table=table.to(device),
        max_seq_len=max(length for _, length, _ in requests),
        num_actual_tokens=tokens,
    )
    query = torch.randn(tokens, heads * group, dim, generator=rng).to(device, dtype)
    pages = view(stored_pages.to(device))
    return PagedStep(stored, requests, metadata, query, tails, pages, group)


def _storage(
    layout: str, blocks: int, heads: int, block: int, width: int
) -> tuple[tuple[int, ...], Callable[[Tensor], Tensor]]:
    """A shape in memory, and the pages [blocks, heads, block, width] in it."""
    if layout == "tokens first":
        return (blocks, block, heads, width), lambda x: x.transpose(1, 2)
    if layout == "layers inside":
        return (blocks, 3, heads, block, width), lambda x: x[:, 1]
    return (blocks, heads, block, width), lambda x: x


def step_attention(step: PagedStep) -> Callable[[], Tensor]:
    """Attention of one layer in the step: [all tokens, H, d], with 7 in other rows."""
    from gracekv.vllm.context_attention import LayerCall
    from gracekv.vllm.triton_attention import attend, plan_gpu_batch

    batch = plan_gpu_batch(step.asking, step.metadata, step.group, step.pages)
    output = torch.full_like(step.query, 7)
    scale = step.query.shape[-1] ** -0.5

    def run() -> Tensor:
        attend(batch, 1, LayerCall(None, step.query, step.pages, step.metadata, output), scale)
        return output

    return run


def check_step(step: PagedStep, bound: float | None = None) -> None:
    """Raise `AssertionError` unless the kernels equal the loops in float64, request by request.

    Args:
        step: from `paged_step`.
        bound: bound of the relative error, or None for the dtype's in `TOLERANCES`.
    """
    output = step_attention(step)()
    bound = TOLERANCES[output.dtype] if bound is None else bound
    starts = step.metadata.query_start_loc.tolist()
    scale = step.query.shape[-1] ** -0.5
    assert bool((output[starts[-1] :] == 7).all())
    for row, (name, _, _) in enumerate(step.requests):
        got = output[starts[row] : starts[row + 1]]
        if name is None:
            assert bool((got == 7).all()), f"the kernels wrote to request {row}"
            continue
        queries = step.query[starts[row] : starts[row + 1]]
        layer = step.contexts[name].layers[1]
        keys, values = step.tails[row]
        error = relative_error(got.cpu(), reference.attend(queries, layer, keys, values, scale))
        assert error <= bound, f"request {row}: error {error:.2e} above {bound:.0e}"
