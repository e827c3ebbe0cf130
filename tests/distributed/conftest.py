"""A model that processes share, and its folder."""

import pytest

from gracekv.testing.models import tiny_llama


@pytest.fixture(scope="module")
def model():
    return tiny_llama(heads=8, kv_heads=4, dim=8)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    place = tmp_path_factory.mktemp("ranks")
    model.save_pretrained(place / "model")
    return place
