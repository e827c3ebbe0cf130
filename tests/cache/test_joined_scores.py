"""Scores of entries after a passage was appended."""

import pytest
import torch

import gracekv
from gracekv import Limit
from gracekv.decode.cut import entries_within
from gracekv.testing.models import tiny_llama
from support.prompts import BOOK, book_prompt


@pytest.fixture(scope="module")
def book():
    return gracekv.compress(tiny_llama(layers=3, vocabulary=97), book_prompt(), ratio=3)


def by_head(result):
    """Scores of the entries of each head, layer by layer."""
    run = result.runs[0]
    for own, layer in zip(run.entry_scores(), run.cache.layers, strict=True):
        yield from own.split(layer.lengths.tolist())


def test_entries_that_a_passage_reads_rise_to_its_scores_and_none_falls(book):
    longer = book.extend(BOOK[90:170], ratio=4)
    rose, stayed = 0, 0
    for old, new in zip(by_head(book), by_head(longer), strict=True):
        new = new[: len(old)]
        assert bool((new >= old).all())
        assert torch.equal(new.isinf(), old.isinf())
        rose += int((new > old).sum())
        stayed += int((new == old).sum())
    assert rose > 0
    assert stayed > 0


def test_a_passage_that_stays_whole_leaves_scores_as_they_are(book):
    longer = book.extend(BOOK[90:130], ratio=1)
    for old, new in zip(by_head(book), by_head(longer), strict=True):
        assert torch.equal(new[: len(old)], old)
        assert bool(new[len(old) :].isinf().all())


def test_a_passage_whose_tokens_all_fit_in_fewer_bits_has_scores(book):
    prompt, recipe = book.prompt, "gracekv-agnostic-allocated"
    begun = gracekv.compress(book.model, prompt, ratio=3, pipeline=recipe)
    longer = begun.extend(BOOK[90:170], ratio=1.2)
    assert all(bool(own[-80:].isfinite().all()) for own in by_head(longer))


def test_no_head_keeps_more_than_it_may(book):
    cache, scores = book.runs[0].cache, book.runs[0].entry_scores()
    most = []
    # Also if all entries together fit.
    for known, size in ((None, 20), (12, 20), (12, 400)):
        masks = entries_within(Limit(entries_per_head=size, window=4), cache, scores, known=known)
        counts = []
        for layer, own, mask in zip(cache.layers, scores, masks, strict=True):
            assert bool(mask[own.isinf()].all())
            counts += [int(x.sum()) for x in (mask & own.isfinite()).split(layer.lengths.tolist())]
        most.append(max(counts))
    assert most[0] > 6
    assert most[1:] == [6, 6]
