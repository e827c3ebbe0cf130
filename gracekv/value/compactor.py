r"""Compactor's score: leverage of keys, and attention of each chunk to itself without a mask.

The leverage of token t is the share that its key, before rotation and centred, has in the Gram
matrix of all keys, k_t^T (sum_s k_s k_s^T + ridge I)^-1 k_t: large where a key points where few
others do. Both scores are z-scores over a layer's heads and tokens; leverage has weight 0.5.
"""

from __future__ import annotations

import torch
from einops import rearrange, reduce
from torch import Tensor
from torch.nn import functional

from gracekv.prefill import LayerCapture, Needs, PromptSpans, Region
from gracekv.registry import bounded
from gracekv.value.base import SCORERS, Memory, Scorer


@SCORERS.register("compactor")
class Compactor(Scorer):
    """Leverage scores of keys, blended with non-causal attention in chunks of 256 (Compactor).

    Every query of a chunk sees the whole chunk, before and after itself; sums over queries are
    averaged over a KV head's group, multiplied by |v| and averaged over three neighbours. Nothing
    after the context is read.

    Source: Chari & Van Durme (2025), Compactor, arXiv:2507.08143, with the numbers of the authors'
    code in kvpress and compactor-vllm: logits are not scaled. Ours: leverage is exact instead of
    sketched by random projections, the last chunk has no padding, and the blend is the same at all
    ratios (kvpress takes the share removed).

    Cost: attention rows of a chunk for each token, O(L H N 256 d), and one Gram matrix per head,
    O(L G N d²); the queries of every position are needed.

    Attributes:
        blending: weight of the leverage relative to attention (compactor-vllm's 0.5).
        chunk_size: tokens that attend to each other (kvpress's 256).
        sinks: number of first prompt tokens, which score higher than all others (kvpress's 8).
        ridge: lower bound of the Gram matrix's eigenvalues, added to its diagonal (0.01).
    """

    blending: float = bounded(0.5, at_least=0, hint="The published weight is 0.5.")
    chunk_size: int = bounded(256, at_least=1, hint="The published size is 256.")
    sinks: int = bounded(8, at_least=0, hint="The published number is 8.")
    ridge: float = bounded(1e-2, above=0, hint="The published value is 0.01.")

    def needs(self) -> Needs:
        """Queries of all positions."""
        return Needs(later_queries=True)

    def layer(self, capture: LayerCapture, region: Region, memory: Memory) -> Tensor:
        """Blended z-scores [G, N], shifted to at least 1; sinks are 1 above the layer's maximum."""
        seen, values = self._probes(capture.spans, region), capture.values
        leverage = leverages(capture, seen, self.ridge)
        norms = values[:, seen.start : seen.stop].float().norm(dim=-1)
        drawn = self._attention(capture, seen)
        pooled = functional.avg_pool1d(drawn * norms, kernel_size=3, padding=1, stride=1)
        blend = self.blending * _standardised(leverage) + _standardised(pooled)
        blend = blend - blend.min() + 1
        whole = functional.pad(blend, (seen.start, 0), value=float(blend.max()) + 1)
        return whole[:, region.start : region.end]

    def _probes(self, spans: PromptSpans, region: Region) -> range:
        """The context without its sinks, but at least its last position."""
        return range(min(max(self.sinks, spans.past), spans.context_end - 1), spans.context_end)

    def _attention(self, capture: LayerCapture, seen: range) -> Tensor:
        """float32 [G, n]: sums over each chunk's queries, means over a group."""
        chunks = []
        for chunk in Region(seen.start, seen.stop).parts(self.chunk_size):
            keys = capture.keys[:, chunk.start : chunk.end].float()
            queries = capture.queries_at(range(chunk.start, chunk.end)).float()
            shared = rearrange(queries, "(g n) c d -> g (n c) d", g=capture.kv_heads)
            shares = torch.softmax(shared @ keys.transpose(1, 2), dim=-1)
            chunks.append(reduce(shares, "g (n c) t -> g t", "sum", c=chunk.length) / capture.group)
        return torch.cat(chunks, dim=-1)


def leverages(capture: LayerCapture, seen: range, ridge: float) -> Tensor:
    """Leverage of each key of `seen` before rotation, float32 [G, n], between 0 and 1.

    Args:
        capture: a layer of G KV heads.
        seen: the n tokens whose keys are centred and compared.
        ridge: added to the Gram matrix's diagonal.
    """
    keys = capture.keys[:, seen.start : seen.stop].float()
    plain = capture.rope.unrotate(keys, torch.tensor(seen)).double()
    plain = plain - plain.mean(dim=1, keepdim=True)
    gram = plain.transpose(1, 2) @ plain
    gram.diagonal(dim1=-2, dim2=-1).add_(ridge)
    solved = torch.linalg.solve(gram, plain.transpose(1, 2))
    scores: Tensor = (plain * solved.transpose(1, 2)).sum(dim=-1).clamp_min(0).float()
    return scores


def _standardised(scores: Tensor) -> Tensor:
    """Z-scores over all heads and tokens of a layer."""
    return (scores - scores.mean()) / scores.std(correction=0).clamp_min(1e-6)
