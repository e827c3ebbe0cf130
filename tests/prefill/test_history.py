"""A conversation's history, and what of it is still uncompressed."""

from gracekv.decode import Compaction
from gracekv.prefill.history import History

ASKED = {"role": "user", "content": "Who?"}
TOLD = {"role": "assistant", "content": "Alice"}


def test_compressed_messages_leave_the_tail_and_stay_in_the_history():
    turns = [("user", range(40)), ("assistant", [40, 41])]
    before = History().with_turns([ASKED, TOLD], None, turns)
    compact = Compaction(after=32, recent=1)
    assert before.due(compact) == [(40, 4.0)]
    after = before.compressed(40)
    assert (after.uncompressed, after.tail) == ((40, 41), (("assistant", 2),))
    # What the model wrote last is still known, even if it is compressed.
    assert after.compressed(2).ids == before.ids == (*range(42),)
    assert after.messages == (ASKED, TOLD)


def test_compressing_that_failed_waits_for_more_messages():
    compact = Compaction(after=32, recent=0)
    failed = History(tail=(("user", 40),), failed=40)
    more = failed.with_turns([ASKED, TOLD], None, [("assistant", range(33))])
    assert failed.due(compact) == []
    assert more.due(compact) == [(73, 4.0)]
    assert more.compressed(73).failed == 0


def test_an_edit_by_the_caller_is_noticed():
    given, tools = [dict(ASKED), TOLD], [{"name": "find"}]
    history = History().with_turns(given, tools, [])
    assert history.edit(given, tools) is None
    given[0]["content"] = "Where?"
    assert "Message 0" in history.edit(given, tools)
    tools[0]["name"] = "seek"
    assert "tools" in history.edit([ASKED, TOLD], tools)
