"""Compares choices of two computed paths: they may differ only if scores are within a margin.

Another CPU rounds the last bits of a sum differently, which may decide between near ties. A test
that compares two ways to compute the same choice states what counts as a tie; any other difference
fails. Exact comparison is right if one computation runs twice, or if entries are copied.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Logits of two paths of a float32 model of a few layers differ by 2e-5 at most; those of the
# embedded model, of 30 layers, by 1e-3.
LOGITS = 2e-4
LOGITS_OF_30_LAYERS = 5e-3
# Scores are sums of float32 probabilities, compared relative to the larger one.
SCORES = 1e-5


def assert_same_order(got: Tensor, want: Tensor, scores: Tensor) -> None:
    """Two orders of the same items have equal scores at each place, up to `SCORES`.

    Args:
        got: int64 [..., k], distinct items from first to last.
        want: int64 [..., k].
        scores: [..., N] of the items.
    """
    assert got.shape == want.shape
    assert bool((got.sort(-1).values.diff() > 0).all()), "an item occurs twice"
    one, two = scores.double().gather(-1, got), scores.double().gather(-1, want)
    _assert_ties(one, two, got, want, SCORES)


def assert_same_choice(got: Tensor, want: Tensor, scores: Tensor, margin: float = SCORES) -> None:
    """Two choices out of the same items: exchanged ones have equal scores, up to the margin.

    Args:
        got: bool [..., N], the chosen items.
        want: bool [..., N].
        scores: [..., N] of the items.
        margin: relative to the largest exchanged score.
    """
    assert got.shape == want.shape == scores.shape
    for mine, other, score in zip(*(x.flatten(0, -2) for x in (got, want, scores)), strict=True):
        assert int(mine.sum()) == int(other.sum()), "not as many items"
        one = (mine & ~other).nonzero().flatten()
        two = (other & ~mine).nonzero().flatten()
        # The lowest of one side with the highest of the other is the widest pair.
        up, down = score.double()[one].sort().values, score.double()[two].sort().values.flip(0)
        _assert_ties(up, down, one, two, margin)


def _assert_ties(one: Tensor, two: Tensor, got: Tensor, want: Tensor, margin: float) -> None:
    wrong = (one - two).abs() > margin * torch.maximum(one.abs(), two.abs())
    assert not bool(wrong.any()), (
        f"{got[wrong].tolist()[:8]} in place of {want[wrong].tolist()[:8]}, with scores "
        f"{one[wrong].tolist()[:8]} and {two[wrong].tolist()[:8]}: no tie within {margin:g}"
    )


def indicator(kept: list[set[int]], length: int) -> Tensor:
    """bool [len(kept), length]: each set as a mask."""
    mask = torch.zeros(len(kept), length, dtype=torch.bool)
    for row, items in enumerate(kept):
        mask[row, list(items)] = True
    return mask


def assert_same_tokens(
    got: Tensor, want: Tensor, logits: Callable[[Tensor], Tensor], margin: float = LOGITS
) -> None:
    """Two greedy answers: at the first difference, the two tokens' logits are within the margin.

    Tokens after the first difference continue another text, and are not compared.

    Args:
        got: int64 [n], new tokens.
        want: int64 [m]; if one answer ends first, its end is the difference.
        logits: gives the next token's logits [V] after new tokens int64 [i], if choices differ.
        margin: absolute.
    """
    got, want = got.flatten(), want.flatten()
    short = min(len(got), len(want))
    differing = (got[:short] != want[:short]).nonzero().flatten()
    if not len(differing):
        assert len(got) == len(want), f"{got.tolist()} and {want.tolist()}: one is longer"
        return
    first = int(differing[0])
    scores = logits(want[:first]).double().flatten()
    one, two = float(scores[got[first]]), float(scores[want[first]])
    assert abs(one - two) <= margin, (
        f"new token {first} is {int(got[first])} in place of {int(want[first])}, with logits "
        f"{one:g} and {two:g}: no tie within {margin:g}"
    )
    assert max(one, two) >= float(scores.max()) - margin, f"new token {first} is not the likeliest"


def assert_same_steps(
    got: Tensor, got_logits: Tensor, want: Tensor, want_logits: Tensor, margin: float = LOGITS
) -> None:
    """Two greedy answers and the logits of each step, compared up to their first difference.

    Args:
        got: int64 [n], new tokens.
        got_logits: [n, V], the logits behind each choice.
        want: int64 [n].
        want_logits: [n, V].
        margin: absolute, of every logit and of the two tokens at a difference.
    """
    assert_same_tokens(got, want, lambda before: want_logits[len(before)], margin)
    differing = (got != want).nonzero().flatten()
    steps = int(differing[0]) + 1 if len(differing) else len(got)
    torch.testing.assert_close(got_logits[:steps], want_logits[:steps], rtol=0, atol=margin)


def logits_over(result: Any, said: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """The next token's logits after new tokens, over a fresh cache of a `CompressionResult`.

    `said`: int64 [s], tokens after the prompt and before the new ones.
    """

    @torch.no_grad()
    def logits(tokens: Tensor) -> Tensor:
        cache = result.new_cache()
        unread = result.prompt.ids[cache.packed_length :]
        fed = torch.cat([unread, *([] if said is None else [said]), tokens])
        return result.model(fed[None].to(result.model.device), past_key_values=cache).logits[0, -1]

    return logits


def assert_same_beams(got: Tensor, want: Tensor, result: Any) -> None:
    """Two sets of beams [rows, n]: sequences may differ only at equal sums of log-probabilities.

    The sums are over a fresh cache of a `CompressionResult`; `LOGITS` is the margin per token.
    """
    assert got.shape == want.shape
    for one, two in zip(got, want, strict=True):
        if not torch.equal(one, two):
            sums = [_log_probability(result, tokens) for tokens in (one, two)]
            assert abs(sums[0] - sums[1]) <= LOGITS * len(one), (one, two, sums)


@torch.no_grad()
def _log_probability(result: Any, tokens: Tensor) -> float:
    fed = torch.cat([result.prompt.ids[-1:], tokens[:-1]])[None].to(result.model.device)
    logits = result.model(fed, past_key_values=result.new_cache()).logits[0].double()
    return float(logits.log_softmax(-1).gather(-1, tokens[:, None]).sum())
