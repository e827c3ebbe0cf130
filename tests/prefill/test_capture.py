"""The capture against the stock forward pass, and what it leaves behind."""

import copy

import pytest
import torch

from gracekv.errors import MissingCaptureError, NonFiniteError, PromptError, UnsupportedModelError
from gracekv.hf import attach
from gracekv.hf.capture import EVERYTHING, capture
from gracekv.prefill import Needs
from gracekv.prefill.fingerprint import differences, fingerprint
from gracekv.prefill.prompt import Prompt
from gracekv.segment.curvature import BlockInput
from gracekv.testing.models import tiny_llama
from gracekv.value.output_projection import ProjectedNorms, ProjectionNorms
from support.capture_state import state
from support.observers import HeadOutputs


def prompt_of(length=90, seed=0, **spans):
    ids = torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(seed))
    return Prompt.from_ids(
        ids, **({"context": (5, length - 12), "question_end": length - 4} | spans)
    )


def test_queries_scale_and_outputs_fit_together():
    """Attention recomputed from what was captured gives the captured outputs and their norms."""
    model, prompt = tiny_llama(bias=True), prompt_of()
    prefill = capture(model, prompt, EVERYTHING | Needs.observed(HeadOutputs()))
    probes = prompt.spans.question_probes()
    seen = torch.arange(90)[None] <= torch.tensor(probes)[:, None]

    for layer, block in enumerate(model.model.layers):
        weight = block.self_attn.o_proj.weight.double()
        summed = torch.zeros(2, len(probes), 64, dtype=torch.float64)
        for head in range(4):
            query = prefill.queries_at(layer, probes)[head].double()
            logits = query @ prefill.keys[layer][head // 2].double().T * prefill.scale
            attention = logits.masked_fill(~seen, -torch.inf).softmax(-1)
            output = attention @ prefill.values[layer][head // 2].double()
            torch.testing.assert_close(
                prefill.observation(HeadOutputs())[layer, head].double(), output, rtol=0, atol=2e-5
            )
            columns = weight[:, 16 * head : 16 * head + 16]
            summed[head // 2] += output @ columns.T
            torch.testing.assert_close(
                prefill.observation(ProjectionNorms())[layer, head].double(), columns.norm()
            )
        torch.testing.assert_close(
            prefill.observation(ProjectedNorms())[layer].double(),
            summed.norm(dim=-1),
            rtol=1e-4,
            atol=1e-4,
        )


def test_less_is_kept_where_less_is_needed():
    prompt = prompt_of(200, context=(5, 150), question_end=190)
    prefill = capture(tiny_llama(), prompt, Needs())

    kept = {*range(118, 150), *range(158, 200)}
    assert prefill.query_positions.tolist() == sorted(kept)
    assert prefill.queries[0].shape == (4, len(kept), 16)
    full = capture(tiny_llama(), prompt)
    assert torch.equal(prefill.queries[1], full.queries_at(1, sorted(kept)))
    assert prefill.observed == {}
    with pytest.raises(MissingCaptureError):
        prefill.queries_at(0, [10])


def test_a_failing_forward_leaves_no_trace():
    model = tiny_llama()

    def fail(*_):
        raise RuntimeError("midway")

    model.model.layers[1].mlp.forward = fail
    before = state(model)
    with pytest.raises(RuntimeError, match="midway"):
        capture(model, prompt_of())

    assert state(model) == before


def test_half_precision_is_captured_in_half_precision():
    prefill = capture(tiny_llama(dtype=torch.bfloat16), prompt_of())
    assert prefill.keys[0].dtype == prefill.queries[0].dtype == torch.bfloat16
    assert {x.dtype for o, x in prefill.observed.items() if not isinstance(o, BlockInput)} == {
        torch.float32
    }


def test_the_fingerprint_tells_models_apart():
    model = tiny_llama()
    assert fingerprint(model) == fingerprint(tiny_llama())
    assert differences(fingerprint(model), fingerprint(tiny_llama(seed=1))) == ["weights"]
    assert fingerprint(model)["config"] != fingerprint(tiny_llama(rope="llama3"))["config"]
    assert fingerprint(model)["dtype"] == "float32"
    assert "tokenizer" not in fingerprint(model, tokenizer=object())
    stock = fingerprint(model)
    attach(model)
    assert fingerprint(model) == stock


def another_rope():
    model = tiny_llama()
    model.config.rope_parameters["rope_type"] = "spiral"
    return model


def flex():
    model = tiny_llama()
    model.config._attn_implementation_internal = "flex_attention"
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (another_rope, "RoPE variant 'spiral'"),
        (flex, r"set_attn_implementation\('sdpa'\)"),
        (lambda: torch.nn.Linear(2, 2), "causal language model; got Linear"),
    ],
)
def test_unsupported_models_are_refused(make, message):
    model = make()
    with pytest.raises(UnsupportedModelError, match=message):
        capture(model, prompt_of())


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (torch.arange(10), "takes one Prompt, .*; got Tensor"),
        (
            Prompt.from_ids(torch.arange(90, 110), context=(2, 15)),
            "token id 109, the model knows 97",
        ),
    ],
)
def test_bad_prompts_are_refused(prompt, message):
    with pytest.raises(PromptError, match=message):
        capture(tiny_llama(), prompt)


def test_broken_weights_are_reported():
    model = copy.deepcopy(tiny_llama())
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match="keys of layer 1"):
        capture(model, prompt_of())
