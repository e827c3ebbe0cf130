"""Which messages a conversation compresses, and when."""

import itertools

import pytest
from hypothesis import given

import gracekv
from gracekv.errors import ConfigError
from support.draws import ints, lists, some, tuples

TURNS = [("user", 40), ("assistant", 100), ("user", 50), ("assistant", 10)]


def test_older_messages_are_compressed_when_there_are_enough_tokens():
    policy = gracekv.Compaction(after=199, ratio=4, recent=2)
    assert policy.runs(TURNS, 0) == [(140, 4.0)]
    assert gracekv.Compaction(after=200, ratio=4).runs(TURNS, 0) == []
    assert gracekv.Compaction(after=100, recent=4).runs(TURNS, 0) == []
    assert gracekv.Compaction(after=100, ratio=4, recent=0).runs(TURNS, 0) == [(200, 4.0)]
    assert policy.runs([], 0) == []


@pytest.mark.parametrize(("keep", "first", "runs"), [
    (("user",), 0, [(40, 1.0), (100, 4.0), (50, 1.0)]),
    ((0,), 0, [(40, 1.0), (150, 4.0)]),
    # Messages are counted from the conversation's first one, compressed or not.
    ((0,), 6, [(190, 4.0)]),
    ((7,), 6, [(40, 4.0), (100, 1.0), (50, 4.0)]),
])  # fmt: skip
def test_messages_to_keep_are_named_by_role_or_index(keep, first, runs):
    assert gracekv.Compaction(after=100, ratio=4, recent=1, keep=keep).runs(TURNS, first) == runs


@pytest.mark.parametrize(("one", "message"), [
    ("usr", r"\(system, developer, user, assistant, tool\) and .*'usr'. Did you mean 'user'"),
    (-1, "indices of messages, from 0; got -1"), (True, "got True"), (1.0, "got 1.0"),
])  # fmt: skip
def test_what_names_no_message_is_refused(one, message):
    with pytest.raises(ConfigError, match=message):
        gracekv.Compaction(keep=("tool", 0, one))


def test_short_runs_stay_whole():
    turns = [("user", 50), ("assistant", 9), ("user", 60)]
    policy = gracekv.Compaction(after=100, ratio=4, recent=0, keep=("user",))
    assert policy.runs(turns, 0) == [(119, 1.0)]
    # The last one may still grow.
    assert policy.runs([*turns, ("assistant", 9)], 0) == [(119, 1.0)]
    # A message without tokens, such as an empty answer, is in no run.
    assert policy.runs([("user", 0), ("assistant", 200), ("user", 0)], 0) == [(200, 4.0)]
    # A recent window fits.
    assert gracekv.Compaction(after=64, ratio=16, recent=0).runs([("user", 72)], 0) == [(72, 9.0)]


@given(
    tail=lists(tuples(some(["user", "assistant"]), ints(1, 200))),
    recent=ints(0, 5),
    keep=some([(), ("user",), ("assistant", 2), (0, 1)]),
)
def test_runs_hold_older_messages_once_and_in_order(tail, recent, keep):
    runs = gracekv.Compaction(after=100, ratio=4, recent=recent, keep=keep).runs(tail, 0)
    older = tail[: max(0, len(tail) - recent)]
    if not runs:
        assert sum(tokens for _, tokens in tail) <= 100 or sum(n for _, n in older) < 32
        return
    ratios = [ratio for tokens, ratio in runs for _ in range(tokens)]
    assert sum(tokens for _, tokens in older) - len(ratios) < 32
    assert all(a != b for (_, a), (_, b) in itertools.pairwise(runs))
    for number, (role, tokens) in enumerate(older):
        if not ratios:
            # Waiting messages are short, and not kept whole.
            assert not {role, number} & set(keep)
            continue
        own, ratios = ratios[:tokens], ratios[tokens:]
        assert len(set(own)) == 1
        assert own[0] == 1 or not (role in keep or number in keep)


@pytest.mark.parametrize("options", [{"after": 3}, {"ratio": 0.5}, {"recent": -1}])
def test_unusable_policies_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        gracekv.Compaction(**options)
