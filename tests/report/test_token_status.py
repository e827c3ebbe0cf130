"""`token_statuses`: the entry that holds a token, head by head."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gracekv.errors import ReportError
from gracekv.report import token_statuses
from gracekv.report.entries import result_entries


@pytest.mark.parametrize("recipe", ["gracekv", "gracekv-plus-allocated", "d2o", "fullkv"])
@settings(max_examples=8)
@given(seed=st.integers(0, 99), data=st.data())
def test_rows_are_the_entries(make, recipe, seed, data):
    result = make(recipe, 3, seed=seed)
    spans = result.prompt.spans
    position = data.draw(st.integers(0, spans.length - 1))
    statuses = token_statuses(result, position)
    assert [(row.layer, row.head) for row in statuses] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert sum(statuses.count(state) for state in ("exact", "merged", "dropped")) == len(statuses)
    entries = result_entries(result)
    for unit, row in enumerate(statuses):
        at = range(int(entries.offsets[unit]), int(entries.offsets[unit + 1]))
        held = [e for e in at if entries.start[e] <= position < entries.end[e]]
        if not spans.context_start <= position < spans.context_end:
            assert (row.state, row.start, row.end) == ("exact", position, position + 1)
        elif not held:
            assert (row.state, row.start, row.end, row.multiplicity) == ("dropped", -1, -1, 0.0)
        else:
            (e,) = held
            assert (row.start, row.end) == (int(entries.start[e]), int(entries.end[e]))
            assert row.multiplicity == float(entries.multiplicity[e])
            assert row.bits == (None if entries.bits is None else int(entries.bits[e]))
            assert row.state == ("merged" if row.end - row.start > 1 else "exact")
        relevance = result.run.relevance
        if relevance is not None and row.relevance is not None:
            at = position - spans.context_start
            scores = relevance.scores[row.layer, row.head]
            # Within 4 %, or 0 if it is small relative to the largest.
            assert row.relevance == pytest.approx(float(scores[at]), rel=0.04, abs=1e-5)


def test_prints_as_a_table(make):
    result = make("gracekv", 4)
    tables = [str(token_statuses(result, p)) for p in range(result.prompt.spans.length)]
    assert all(len(table.splitlines()) == 2 + 4 for table in tables)
    assert len({len(line) for table in tables for line in table.splitlines()[1:]}) == 1
    assert any("merged" in table.splitlines()[2] for table in tables)


def test_positions_count_from_the_end_too(make):
    result = make("gracekv", 3)
    length = result.prompt.spans.length
    assert token_statuses(result, -20).rows == token_statuses(result, length - 20).rows


@pytest.mark.parametrize("position", [10**6, -(10**6), "9"])
def test_a_token_that_is_not_there(make, position):
    result = make("gracekv", 3)
    with pytest.raises(ReportError, match=rf"tokens 0 to 110; got {position}\.|number; got str"):
        token_statuses(result, position)
    with pytest.raises(ReportError, match="one of exact, merged, dropped; got 'kept'"):
        token_statuses(result, 9).count("kept")
