"""Where vLLM takes requests in: whatever goes wrong over a context is a client's error there."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from gracekv.errors import ConfigError, StoreError
from gracekv.vllm import admission


class Refused(Exception):
    def __init__(self, message, parameter):
        super().__init__(message)
        assert parameter == "kv_transfer_params"


@pytest.fixture
def processor(monkeypatch):
    """The class of vLLM that takes requests in, and the error that it answers with status 400."""
    exceptions = ModuleType("vllm.exceptions")
    exceptions.VLLMValidationError = Refused
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.exceptions", exceptions)
    connector = SimpleNamespace(kv_connector="GraceConnector")

    class Processor:
        vllm_config = SimpleNamespace(kv_transfer_config=connector)

        def process_inputs(self, request_id, prompt, params):
            return SimpleNamespace(prompt_token_ids=prompt)

    admission.wrap(Processor, admission.process_inputs)
    return Processor()


def asking(transfer):
    return SimpleNamespace(extra_args={"kv_transfer_params": transfer})


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (StoreError("It is damaged."), "It is damaged."),
        (RecursionError("deep"), r"cannot be used \(RecursionError\)"),
        (OverflowError("1e999"), r"cannot be used \(OverflowError\)"),
        (MemoryError(), r"cannot be used \(MemoryError\)"),
        (AttributeError("'list' has no 'items'"), r"cannot be used \(AttributeError\)"),
    ],
)
def test_any_error_refuses_that_request(processor, monkeypatch, error, said):
    def allowed(name, transfer):
        raise error

    store = SimpleNamespace(check_allowed=allowed)
    monkeypatch.setattr(admission, "open_store", lambda config: store)
    with pytest.raises(Refused, match=said):
        processor.process_inputs("0", [5], asking({"gracekv": "book"}))
    for plain in ({}, {"remote": 1}, None):
        assert processor.process_inputs("1", [5], asking(plain)).prompt_token_ids == [5]


def test_a_store_that_cannot_be_opened_refuses_requests(processor, monkeypatch):
    def gone(config):
        raise ConfigError("is no folder")

    monkeypatch.setattr(admission, "open_store", gone)
    with pytest.raises(Refused, match=r"cannot be used \(ConfigError\)"):
        processor.process_inputs("0", [5], asking({"gracekv": "book"}))
    processor.vllm_config = SimpleNamespace(kv_transfer_config=None)
    with pytest.raises(Refused, match="no store of contexts"):
        processor.process_inputs("0", [5], asking({"gracekv": None}))
