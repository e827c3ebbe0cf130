import pytest

from gracekv.errors import ConfigError
from gracekv.prefill import Region
from gracekv.segment import FixedChunks
from gracekv.testing import synthetic_prefill


@pytest.mark.parametrize(
    ("size", "expected"),
    [(10, [4, 14, 24, 27]), (23, [4, 27]), (50, [4, 27]), (11, [4, 15, 26, 27])],
)
def test_counts_from_the_left_and_leaves_the_rest_to_the_last(size, expected):
    partition = FixedChunks(size)(synthetic_prefill(), Region(4, 27))
    assert partition.bounds.tolist() == expected


def test_takes_ten_tokens_by_default():
    assert FixedChunks() == FixedChunks(10)


def test_refuses_empty_chunks():
    with pytest.raises(ConfigError, match="size"):
        FixedChunks(0)
