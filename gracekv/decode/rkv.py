"""`rkv`: R-KV, attention minus redundancy."""

from __future__ import annotations

import torch
from torch import Tensor

from gracekv.decode.base import DECODERS, Decoder, HeldLayer
from gracekv.registry import bounded


@DECODERS.register("rkv")
class RKV(Decoder):
    """Score entries by attention of the last few queries minus key similarity, head by head.

    Source: R-KV, arXiv:2505.24133, and its public code (Zefan-Cai/R-KV, rkv/compression/r1_kv.py):
    the logits' maximum over the query heads of a KV head, a softmax over all but the window, the
    mean over queries, max-pooling; a key's redundancy is a softmax of its mean similarity to all
    keys of the head, including the window's, except the last of several similar keys. Ours:
    everything is computed in float32 in any model dtype; multiplicities, logit softcaps and sinks
    are ignored, since the authors' models have none. A cut keeps the last `window` tokens of its
    limit, theirs the last `queries`: they run Limit(every=128, window=8).

    Cost: the similarity of all pairs of keys of a head, at each cut.

    Attributes:
        queries: number of last queries, whose tokens are the window.
        share: weight of attention in the score; the rest is redundancy.
        kernel: size of the max-pooling over neighbours.
        threshold: cosine similarity above which two keys count as similar.
        keep_prompt: whether the prompt's entries stay; the authors let them compete.
    """

    per_head = True

    queries: int = bounded(8, at_least=1)
    share: float = bounded(0.1, at_least=0, at_most=1)
    kernel: int = bounded(7, at_least=1, odd=True)
    threshold: float = 0.5
    keep_prompt: bool = False

    def scores(self, held: HeldLayer) -> Tensor:
        return torch.stack([self._head(held, g) for g in range(len(held.keys))])

    def _head(self, held: HeldLayer, g: int) -> Tensor:
        """float64 [N]: the score of one head's entries."""
        used = held.used[g].nonzero()[:, 0]
        keys, window = held.keys[g, used].float(), min(self.queries, len(used) - 1)
        logits = (held.asked[g] @ keys.T).amax(dim=0)
        seen = logits[-window:, : len(used) - window].softmax(-1).mean(dim=0)
        pooled = torch.nn.functional.max_pool1d(seen[None], self.kernel, 1, self.kernel // 2)[0]
        unit = keys / (keys.norm(dim=-1, keepdim=True) + 1e-8)
        alike = (unit @ unit.T).fill_diagonal_(0.0)
        place = torch.arange(len(used), device=keys.device)
        alike[place, torch.where(alike > self.threshold, place, 0).amax(dim=-1)] = 0.0
        redundancy = alike.mean(dim=0).softmax(-1)
        scores = held.keys.new_zeros(held.keys.shape[1], dtype=torch.float64)
        scores[used] = -(1 - self.share) * redundancy.double()
        scores[used[: len(pooled)]] += self.share * pooled.double()
        # The window stays.
        scores[used[len(pooled) :]] = 1.0
        return scores
