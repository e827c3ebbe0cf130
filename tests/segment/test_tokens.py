from gracekv.prefill import Region
from gracekv.segment import Tokens
from gracekv.testing import synthetic_prefill


def test_gives_every_token_a_slot():
    assert Tokens()(synthetic_prefill(), Region(4, 8)).bounds.tolist() == [4, 5, 6, 7, 8]
