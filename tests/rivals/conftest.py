"""Prompts for comparing recipes with kvpress's presses."""

import pytest

from support import kvpress_cases
from support.skips import needs_smollm2


@pytest.fixture(
    scope="session",
    params=["tiny", pytest.param("smollm2", marks=[pytest.mark.model, needs_smollm2])],
)
def case(request):
    return getattr(kvpress_cases, request.param)()
