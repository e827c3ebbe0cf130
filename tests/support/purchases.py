"""Compares frontiers of two computed paths: nodes may differ only if their gains tie."""

from gracekv.allocate import Frontier

# Other batch sizes round D differently, by at most 1e-5 of the utility.
UTILITY = 1e-5


def bought(frontier: Frontier) -> set[tuple[int, int, int]]:
    """(tree, start, end) of the kept nodes, comparable between forests of different depths."""
    forest, kept = frontier.forest, frontier.kept
    columns = (forest.tree[kept], forest.start[kept], forest.end[kept])
    return set(zip(*(column.tolist() for column in columns), strict=True))


def assert_same_purchase(got: Frontier, want: Frontier) -> None:
    """The same nodes; or as much utility for as many entries, with few nodes exchanged."""
    assert abs(got.utility - want.utility) <= UTILITY * abs(want.utility)
    exchanged = bought(got) ^ bought(want)
    if exchanged:
        assert got.spent == want.spent
        assert abs(got.utility - want.utility) <= UTILITY / 10 * abs(want.utility), exchanged
        assert len(exchanged) <= 8, f"more than a tie: {exchanged}"
