"""Connector and admission, without an engine."""

from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.vllm


def test_a_context_that_cannot_be_loaded_fails_the_blocks_of_its_requests():
    from gracekv.errors import StoreError
    from gracekv.vllm.connector import GraceConnector, StepContexts
    from gracekv.vllm.context_attention import current_step

    def load(name, digest, keep):
        if name == "gone":
            raise StoreError("There is no context 'gone' in the store.")
        return SimpleNamespace(header=SimpleNamespace(digest=digest))

    connector = object.__new__(GraceConnector)
    used = []
    connector._store = SimpleNamespace(load=load, retain=used.append)
    connector._failed_blocks = set()
    connector._compressor = SimpleNamespace(begin=lambda chunk, current: None)
    asked = {7: ("gone", "0", 1), 9: ("book", "1", 3)}
    connector.bind_connector_metadata(StepContexts(asked, used={"0", "1", "2"}))
    assert used == [{"0", "1", "2"}]
    assert connector.get_block_ids_with_load_errors() == {7}
    assert connector.get_block_ids_with_load_errors() == set()
    assert [(block, one.tokens) for block, one in current_step().asking.items()] == [(9, 3)]
    connector.clear_connector_metadata()
    assert current_step() is None


@pytest.mark.parametrize("error", [RecursionError("deep"), MemoryError(), TypeError("'list'")])
def test_any_error_refuses_that_request_and_the_scheduler_goes_on(error):
    from gracekv.vllm.connector import GraceConnector

    def admit(transfer):
        raise error

    for plugin in (False, True):
        connector = object.__new__(GraceConnector)
        connector.begin(SimpleNamespace(admit=admit, ragged=plugin), 32)
        request = SimpleNamespace(
            request_id="0", kv_transfer_params={"gracekv": ["book"]}, cache_salt=None,
            skip_reading_prefix_cache=True, update_block_hashes=list, num_prompt_tokens=3,
        )  # fmt: skip
        connector.on_new_request(request)
        assert connector.get_num_new_matched_tokens(request, 0) == (
            (0, False) if plugin else (1, True)
        )
        assert request.cache_salt == "gracekv:0:"
        _, reply = connector.request_finished(request, [])
        assert reply is None or "cannot be used" in reply["gracekv"]["reason"]
        assert (reply is not None) is plugin


def test_an_engine_without_a_store_refuses_requests_about_contexts():
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    from gracekv.vllm import admission

    for connector in (None, SimpleNamespace(kv_connector="ExampleConnector")):
        config = SimpleNamespace(kv_transfer_config=connector)
        processor = SimpleNamespace(vllm_config=config)
        extra = {"kv_transfer_params": {"gracekv": "book"}}
        with pytest.raises(VLLMValidationError, match="no store of contexts"):
            admission.check(processor, SamplingParams(extra_args=extra))
        for other in (None, {}, {"kv_transfer_params": {"remote": 1}}):
            admission.check(processor, SamplingParams(extra_args=other))
