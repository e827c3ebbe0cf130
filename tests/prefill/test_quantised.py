"""Models whose weights are not plain tensors: the capture only calls their modules."""

import copy
from itertools import product

import pytest
import torch

import gracekv
from gracekv.hf.capture import capture
from gracekv.prefill.model_layers import cache_dtype
from gracekv.prefill.projection import Projection
from gracekv.segment.surprisal import Surprisal
from gracekv.testing.attention import relative_error
from gracekv.testing.models import tiny_model
from gracekv.value.critical import written_norms
from gracekv.value.output_projection import (
    ProjectedNorms,
    ProjectionNorms,
    projected_norms,
    projection_norms,
)
from support.covering import every
from support.margins import assert_same_tokens, logits_over
from support.prompts import random_prompt

PROMPT = random_prompt(120, (4, 108))


def quantise(linear):
    weight = linear.weight.detach()
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    return (weight / scale).round().to(torch.int8), scale


class Eight(torch.nn.Module):
    """Like bitsandbytes' 8-bit layer: an int8 `weight` that is not the weight."""

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.bias = linear.in_features, linear.bias
        weight, self.scale = quantise(linear)
        self.weight = torch.nn.Parameter(weight, requires_grad=False)

    def plain(self):
        return self.weight * self.scale

    def forward(self, x):
        return torch.nn.functional.linear(x, self.plain().to(x.dtype), self.bias)


class Packed(Eight):
    """Like GPTQ and AWQ layers: buffers with their own names, no parameter, no sizes."""

    def __init__(self, linear):
        torch.nn.Module.__init__(self)
        self.bias = None if linear.bias is None else linear.bias.detach()
        weight, scale = quantise(linear)
        self.register_buffer("qweight", weight.flatten())
        self.register_buffer("scales", scale)

    def plain(self):
        return self.qweight.view(len(self.scales), -1) * self.scales


class Four(Eight):
    """Like bitsandbytes' 4-bit layer: packed bytes in a column."""

    def __init__(self, linear):
        super().__init__(linear)
        self.shape = linear.weight.shape
        packed = self.weight.detach().view(torch.uint8).reshape(-1, 1)
        self.weight = torch.nn.Parameter(packed, requires_grad=False)

    def plain(self):
        return self.weight.view(torch.int8).view(self.shape) * self.scale


class Scaled(torch.nn.Linear):
    """Like 8-bit float layers: a floating-point weight of the usual shape, and a scale."""

    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None)
        self.bias = linear.bias
        self.scale = linear.weight.detach().abs().max() / 400
        weight = (linear.weight.detach() / self.scale).to(torch.float8_e4m3fn)
        self.weight = torch.nn.Parameter(weight, requires_grad=False)

    def plain(self):
        return self.weight.float() * self.scale

    forward = Eight.forward


class Calibrated(Eight):
    """Like layers with 8-bit activations: inputs have at most 127 steps of a known size."""

    step = torch.tensor([1 / 256])

    def forward(self, x):
        return super().forward((x / self.step).round().clamp(-127, 127) * self.step)


class Adapted(torch.nn.Module):
    """Like LoRA layers: the base's weight under the usual name, and more in the forward pass."""

    def __init__(self, linear):
        super().__init__()
        self.base = linear
        self.low = torch.nn.Parameter(torch.randn(2, linear.in_features) / 4, requires_grad=False)
        self.up = torch.nn.Parameter(torch.randn(linear.out_features, 2) / 4, requires_grad=False)

    weight = property(lambda self: self.base.weight)
    bias = property(lambda self: self.base.bias)

    def plain(self):
        return self.base.weight + self.up @ self.low

    def forward(self, x):
        return self.base(x) + (x @ self.low.to(x.dtype).T) @ self.up.to(x.dtype).T


class Biased(Adapted):
    """Like LoRA with `lora_bias`: a bias that the base does not have."""

    def forward(self, x):
        return super().forward(x) + 0.3


class Single(Packed):
    """Like SpQR's layers: one sequence [1, T, n] at a time."""

    def forward(self, x):
        assert x.ndim == 3
        assert len(x) == 1
        return super().forward(x)


KINDS = [Eight, Packed, Four, Scaled, Adapted, Single]
TWINS = [*product(KINDS, ["llama", "qwen2", "phi3"], [torch.float32, torch.bfloat16])]


def seen(linear):
    return Projection(linear, 24)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, Biased])
@torch.no_grad()
def test_norms_are_those_of_the_weight_in_effect(kind, bias):
    torch.manual_seed(0)
    linear = torch.nn.Linear(24, 10, bias=bias)
    odd = kind(copy.deepcopy(linear))
    linear.weight.copy_(odd.plain())
    outputs = torch.randn(6, 5, 4)
    for norms, given in ((projection_norms, (6, outputs)), (projected_norms, (outputs, 2))):
        torch.testing.assert_close(norms(seen(odd), *given), norms(seen(linear), *given))
    # Two KV heads, each read by three query heads.
    values = torch.randn(2, 5, 4)
    got, plain = (written_norms(seen(x), values, 6) for x in (odd, linear))
    for group in range(2):
        parts = odd.plain()[:, 12 * group : 12 * group + 12].split(4, dim=1)
        want = sum((values[group] @ part.T).abs().sum(-1) for part in parts) / 3
        torch.testing.assert_close(got[group], want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(plain, got, rtol=1e-4, atol=1e-4)


def test_unit_vectors_do_not_leave_what_a_layer_is_calibrated_for():
    linear, like = torch.nn.Linear(24, 10), torch.zeros(0)
    plain = Eight(linear).plain()
    known, base = Calibrated(linear), Calibrated(linear)
    known.input_activation_scale = base.input_scale = Calibrated.step
    torch.testing.assert_close(seen(known).weight(like), plain)
    base.out_features = 10
    adapted = Adapted(base)
    adapted.base_layer = base
    want = plain + adapted.up @ adapted.low
    torch.testing.assert_close(seen(adapted).weight(like), want, atol=1e-4, rtol=1e-3)
    odd = Eight(linear)
    # Offloaded, and not calibrated.
    odd.input_scale, odd.input_activation_scale = torch.ones(1, device="meta"), torch.zeros(1)
    torch.testing.assert_close(seen(odd).weight(like), plain)


def test_quantised_embeddings_say_what_the_cache_holds():
    model = tiny_model("llama")
    model.get_input_embeddings().output_dtype = torch.bfloat16
    assert (model.dtype, cache_dtype(model)) == (torch.float32, torch.bfloat16)


def test_unit_vectors_in_blocks_give_the_same_norms(monkeypatch):
    odd, outputs = Packed(torch.nn.Linear(24, 10)), torch.zeros(6, 1, 4)
    whole = projection_norms(seen(odd), 6, outputs)
    monkeypatch.setattr("gracekv.prefill.projection._ROWS", 7)
    torch.testing.assert_close(projection_norms(seen(odd), 6, outputs), whole)


class Tagged(torch.Tensor):
    """Like torchao's weights: a subclass, which may store anything."""


def test_weights_of_a_subclass_are_not_read():
    linear, outputs = torch.nn.Linear(24, 10, bias=False), torch.zeros(6, 1, 4)
    expected = projection_norms(seen(linear), 6, outputs)
    called = []
    stored = linear.weight.detach()
    linear.weight = torch.nn.Parameter(stored.as_subclass(Tagged), requires_grad=False)
    linear.register_forward_hook(lambda *_: called.append(1))
    torch.testing.assert_close(projection_norms(seen(linear), 6, outputs), expected)
    assert called


def replaced(model, kind):
    """The model with quantised layers, and its twin with the plain weights that those stand for."""
    torch.manual_seed(0)
    twin = copy.deepcopy(model)
    for name, module in list(twin.named_modules()):
        if isinstance(module, torch.nn.Linear):
            odd = kind(copy.deepcopy(module))
            model.set_submodule(name, odd)
            with torch.no_grad():
                module.weight.copy_(odd.plain())
    return model, twin


@pytest.mark.parametrize(("kind", "family", "dtype"), every(5, TWINS))
def test_a_quantised_model_is_captured_and_compressed_like_its_plain_twin(kind, family, dtype):
    """Including head and projections; equal up to rounding in float32."""
    model, twin = replaced(tiny_model(family, dtype=dtype), kind)
    prefill, expected = capture(model, PROMPT), capture(twin, PROMPT)
    for name in ("keys", "values", Surprisal(), ProjectionNorms(), ProjectedNorms()):
        if isinstance(name, str):
            got, want = (torch.stack(getattr(x, name)) for x in (prefill, expected))
        else:
            got, want = (x.observation(name) for x in (prefill, expected))
        assert relative_error(got, want) < (1e-5 if dtype is torch.float32 else 0.02), name
    if dtype is torch.float32:
        ids = gracekv.compress(model, PROMPT, ratio=3).generate_ids(8)
        plain = gracekv.compress(twin, PROMPT, ratio=3)
        assert_same_tokens(ids, plain.generate_ids(8), logits_over(plain))
    else:
        assert gracekv.compress(model, PROMPT, ratio=3).generate_ids(8).shape == (1, 8)
