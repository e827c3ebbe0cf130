"""The engine for the proof tests, which run where vLLM is installed: `make test-vllm`."""

import importlib.util

import pytest

# tests/ is on the path, so `vllm` alone would be found there.
HAVE_VLLM = importlib.util.find_spec("vllm") is not None and bool(
    importlib.util.find_spec("vllm").origin
)


def pytest_collection_modifyitems(items):
    skip = pytest.mark.skip(reason="vLLM is not installed; run: make test-vllm")
    for item in items:
        if item.get_closest_marker("vllm") and not HAVE_VLLM:
            item.add_marker(skip)
