"""vLLM's admission of requests: any problem with a context is a client error there."""

import sys
from copy import deepcopy
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import pytest

from gracekv.errors import ConfigError, StoreError
from gracekv.vllm import admission
from gracekv.vllm.store import ContextStore


class Refused(Exception):
    def __init__(self, message, parameter):
        super().__init__(message)
        assert parameter == "kv_transfer_params"


@pytest.fixture
def processor(monkeypatch):
    """vLLM's class that admits requests, and the error that it answers with status 400."""
    exceptions = ModuleType("vllm.exceptions")
    exceptions.VLLMValidationError = exceptions.VLLMNotFoundError = Refused
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.exceptions", exceptions)
    monkeypatch.setitem(sys.modules, "vllm.v1.engine", SimpleNamespace(FinishReason=None))
    connector = SimpleNamespace(kv_connector="GraceConnector")

    class Processor:
        vllm_config, tokenizer = SimpleNamespace(kv_transfer_config=connector), None

        def process_inputs(self, request_id, prompt, params, mm_features=None, resumable=False):
            return SimpleNamespace(prompt_token_ids=prompt, params=params, mm_features=mm_features)

    admission.wrap(Processor, admission.process_inputs)
    return Processor()


def asking(transfer):
    return SimpleNamespace(extra_args={"kv_transfer_params": transfer})


OTHERS = [RecursionError("deep"), OverflowError("1e999"), MemoryError(), AttributeError("'items'")]
BY_NAME = [(error, rf"cannot be used \({type(error).__name__}\)") for error in OTHERS]


@pytest.mark.parametrize(("error", "said"), [(StoreError("Damaged."), "Damaged."), *BY_NAME])
def test_any_error_refuses_that_request(processor, monkeypatch, error, said):
    store = SimpleNamespace(check_allowed=Mock(side_effect=error))
    monkeypatch.setattr(admission, "open_store", lambda config: store)
    with pytest.raises(Refused, match=said):
        processor.process_inputs("0", [5], asking({"gracekv": "book"}))
    for plain in ({}, {"remote": 1}, None):
        assert processor.process_inputs("1", [5], asking(plain)).prompt_token_ids == [5]


def test_a_store_that_cannot_be_opened_refuses_requests(processor, monkeypatch):
    monkeypatch.setattr(admission, "open_store", Mock(side_effect=ConfigError("is no folder")))
    with pytest.raises(Refused, match=r"cannot be used \(ConfigError\)"):
        processor.process_inputs("0", [5], asking({"gracekv": "book"}))
    for connector in (None, SimpleNamespace(kv_connector="ExampleConnector")):
        processor.vllm_config = SimpleNamespace(kv_transfer_config=connector)
        for name in ("book", None):
            with pytest.raises(Refused, match="no store of contexts"):
                processor.process_inputs("0", [5], asking({"gracekv": name}))
        for extra in (None, {}, {"kv_transfer_params": {"remote": 1}}):
            processor.process_inputs("1", [5], SimpleNamespace(extra_args=extra))


@pytest.fixture
def ask(processor, monkeypatch, tiny_served):
    """The tokens read for a request to an engine that serves `tiny_served`."""
    store = ContextStore(tiny_served.store, allow=lambda name, _: name in ("c2", "longer"))
    monkeypatch.setattr(admission, "open_store", lambda config: store)
    served = SimpleNamespace(ranks=1, model=tiny_served.model)
    monkeypatch.setattr(admission, "ServedModel", SimpleNamespace(of=lambda config: served))
    config, processor.tokenizer = processor.vllm_config, tiny_served.tokenizer
    config.cache_config = SimpleNamespace(num_gpu_blocks=0)
    config.model_config = SimpleNamespace(max_model_len=99)
    return lambda ids, said, **more: (
        processor.process_inputs("0", list(ids), asking({"gracekv": said, **more})).prompt_token_ids
    )


def hear(processor, name, state):
    """The scheduler's reply to a request that made or deleted a context."""
    reply = SimpleNamespace(kv_transfer_params={"gracekv": {"name": name, "state": state}})
    admission.process_outputs(lambda *_: None, processor, [reply])


# A chat, "<s><|user|>Who?<|end|><|assistant|>".
TURN = [0, 2, 59, 76, 83, 35, 3, 4]


def test_tokens_that_are_exact_are_read_as_they_are(ask):
    passage = {"extend": {"name": "c2", "into": "longer", "ratio": 1}}
    for said, read in (("c2", TURN), (passage, [*TURN, TURN[-1]])):
        assert ask(TURN, said, gracekv_exact=True) == read
        assert ask(TURN, said) != read


def test_a_separator_does_not_make_a_question_too_long(ask, processor):
    # vLLM checks the length of the prompt as it came.
    read = len(ask(TURN, "c2"))
    for most, fits in ((read + 1, True), (read, False)):
        processor.vllm_config.model_config.max_model_len = most
        if fits:
            assert len(ask(TURN, "c2")) == read
        else:
            with pytest.raises(Refused, match=rf"has {read} tokens, .* at most {read - 1} in one"):
                ask(TURN, "c2")


@pytest.mark.parametrize("said", ["c2", {"compress": {"name": "c2", "ratio": 2}}])
def test_a_request_about_a_context_is_one_whole_text(ask, processor, said):
    for more, refused in (
        ({"mm_features": ["an image"]}, "no embeddings, images"),
        ({"resumable": True}, "whole prompt at once"),
    ):
        with pytest.raises(Refused, match=refused):
            processor.process_inputs("0", TURN, asking({"gracekv": said}), **more)
        assert processor.process_inputs("0", TURN, asking({}), **more).prompt_token_ids == TURN


def test_a_passage_has_no_system_prompt(ask, processor):
    processor.tokenizer = deepcopy(processor.tokenizer)
    processor.tokenizer.chat_template = "<s>Be kind." + processor.tokenizer.chat_template
    with pytest.raises(Refused, match="leave the system prompt out"):
        ask(TURN, {"extend": {"name": "c2", "into": "longer", "ratio": 1}})


def test_a_context_answers_in_its_format_until_the_next_one_is_read(ask, processor):
    for state, keeps in ((None, False), ("compressing", True), ("deleted", False)):
        if state:
            hear(processor, "c2", state)
        # A text in no chat format, whose following token is not read in the end.
        ask(range(50, 90), {"compress": {"name": "c2", "ratio": 2}})
        assert (ask(TURN, "c2") == TURN) is keeps


def test_a_context_made_anew_while_it_is_deleted_keeps_its_format(ask, processor):
    for states in (["compressing"], ["deleted", "compressing"]):
        ask(TURN, {"compress": {"name": "longer", "ratio": 1}})
        for state in states:
            hear(processor, "longer", state)
        assert ask(TURN, "longer") != TURN
    hear(processor, "longer", "deleted")
    assert ask(TURN, "longer") == TURN


def test_what_may_not_be_used_is_not_looked_at(ask):
    for name in ("c8", "gone"):
        with pytest.raises(Refused, match=f"may not use the context '{name}'"):
            ask(TURN, {"extend": {"name": name}})
