"""The captured rotation is the model's own, and its inverse restores the unrotated keys."""

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gracekv.hf.capture import capture
from gracekv.prefill.options import CaptureOptions
from gracekv.testing.models import tiny_model
from support.covering import cases
from support.prompts import random_prompt

pytestmark = pytest.mark.filterwarnings("ignore::gracekv.errors.LengthWarning")

LENGTH, BEYOND = 70, CaptureOptions(beyond_positions=True)

VARIANTS = [
    *[{"family": "llama", "rope": rope} for rope in ("default", "linear", "llama3")],
    *[{"family": "llama", "rope": "dynamic", "positions": n} for n in (4096, 50)],
    *[
        {"family": family, "rope": rope, "original": original}
        for family in ("llama", "mistral", "qwen2", "qwen3", "gemma")
        for rope, original in (("yarn", 1024), ("longrope", 64), ("longrope", 2048))
    ],
    *[
        {"family": "phi3", "rope": rope, "original": original, "partial": partial}
        for partial in (1.0, 0.75, 0.5)
        for rope, original in (("default", 64), ("longrope", 64), ("longrope", 2048))
    ],
]


def captured(model, prompt):
    """The prefill, and per layer the unrotated key and the module's rotation function."""
    module = sys.modules[type(model.get_decoder().layers[0].self_attn).__module__]
    own, before = module.apply_rotary_pos_emb, []

    def listening(query, key, *args, **kwargs):
        before.append(key[0])
        return own(query, key, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "apply_rotary_pos_emb", listening)
        return capture(model, prompt, options=BEYOND), before, own


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@settings(max_examples=cases(3, 8))
@given(seed=st.integers(0, 2**32 - 1), dim=st.sampled_from([16, 32, 64]))
def test_a_captured_key_is_unrotated_and_rotated_on_as_the_model_would(variant, seed, dim):
    model = tiny_model(**variant, dim=dim, seed=seed)
    prefill, before, own = captured(model, random_prompt(seed=seed))
    assert prefill.rope.cos.shape == (LENGTH, round(dim * variant.get("partial", 1.0)))
    # As in merging: the mean of unrotated keys, rotated to its node's position.
    moved = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(seed))
    cos, sin = prefill.rope.cos[moved][None], prefill.rope.sin[moved][None]
    for key, plain in zip(prefill.keys, before, strict=True):
        unrotated = prefill.rope.unrotate(key, torch.arange(LENGTH))
        torch.testing.assert_close(unrotated, plain, rtol=0, atol=1e-5)
        _, want = own(plain[None], plain[None], cos, sin)
        torch.testing.assert_close(prefill.rope.rotate(plain, moved), want[0], rtol=0, atol=1e-6)


def test_dynamic_rope_is_captured_as_it_was_not_recomputed():
    """Beyond its length a model rotates by the longest sequence that it has seen so far."""
    model = tiny_model(rope="dynamic", positions=50)
    first, _, _ = captured(model, random_prompt())
    captured(model, random_prompt(400))
    again, before, _ = captured(model, random_prompt())

    assert not torch.allclose(first.rope.cos, again.rope.cos)
    unrotated = again.rope.unrotate(again.keys[0], torch.arange(LENGTH))
    torch.testing.assert_close(unrotated, before[0], rtol=0, atol=1e-5)
