"""RoPE kinds, windows and sizes of heads: capture and decoding against the stock model."""

import copy

import pytest
import torch

import gracekv
from gracekv.errors import CacheError, LengthWarning
from gracekv.hf import GraceCache
from gracekv.testing.models import tiny_model
from support.dense import dense_logits
from support.greedy_decoding import greedy, heavier
from support.margins import assert_same_steps
from support.prompts import IDS, PROMPT

# Other tests cover its warnings.
pytestmark = pytest.mark.filterwarnings("ignore::gracekv.errors.LengthWarning")


# The families as they are by default: `test_model_families`.
CASES = {
    "llama linear": {"rope": "linear"},
    "llama dynamic within its length": {"rope": "dynamic"},
    "llama dynamic beyond its length": {"rope": "dynamic", "positions": 100},
    "llama llama3": {"rope": "llama3", "bias": True},
    "llama yarn": {"rope": "yarn", "original": 1024},
    "llama longrope short": {"rope": "longrope", "original": 2048},
    "llama longrope long": {"rope": "longrope"},
    "llama one KV head": {"kv_heads": 1},
    "mistral in its window": {"family": "mistral", "window": 170},
    "mistral yarn": {"family": "mistral", "rope": "yarn", "original": 1024, "kv_heads": 4},
    "qwen2 beyond its window": {"family": "qwen2", "window": 100, "layers": 3},
    "qwen2 yarn": {"family": "qwen2", "rope": "yarn", "original": 1024},
    "qwen3 dim 64": {"family": "qwen3", "dim": 64, "heads": 2, "kv_heads": 1},
    "phi3 in its window": {"family": "phi3", "window": 170},
    "phi3 longrope short": {"family": "phi3", "rope": "longrope", "original": 2048},
    "phi3 longrope long": {"family": "phi3", "rope": "longrope"},
    "phi3 longrope partial": {"family": "phi3", "rope": "longrope", "partial": 0.5},
    "gemma dim 256": {"family": "gemma", "dim": 256, "heads": 2, "kv_heads": 1},
}


def make(case):
    return tiny_model(**({"seed": 3} | CASES[case]))


@pytest.mark.parametrize("case", CASES)
def test_ratio_one_generates_what_the_stock_model_does(case):
    expected, expected_logits = greedy(make(case), IDS, tokens=10)

    result = gracekv.compress(make(case), PROMPT, ratio=1)
    ids, logits = greedy(result.model, IDS, result.new_cache(), 10)

    assert_same_steps(ids, logits, expected, expected_logits, margin=3e-4)


@pytest.mark.parametrize("case", CASES)
def test_ratio_four_decodes_like_dense_masked_attention(case):
    result = gracekv.compress(make(case), PROMPT, ratio=4)
    packed = heavier(result.packed)
    entries = packed.entries()
    assert int(entries.sum()) < 0.45 * entries.numel() * len(IDS)
    # Before decoding: dynamic RoPE remembers the longest sequence it has seen.
    fresh = copy.deepcopy(result.model)

    ids, logits = greedy(result.model, IDS, GraceCache(packed), 10)

    tokens = torch.cat([IDS[-1:], ids[:-1]])
    want = dense_logits(copy.deepcopy(fresh), packed, tokens)
    torch.testing.assert_close(logits.double(), want, rtol=0, atol=3e-4)
    # The comparison can see a bias that is left out.
    assert (logits - dense_logits(fresh, packed, tokens, drop_bias=True)).abs().max() > 0.05


# Relative to the logits: twice the error from rounding every layer's output in these models.
# Leaving the multiplicities out costs 30% and more.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.025), (torch.float16, 0.0025)])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "phi3", "gemma"])
def test_half_precision_decodes_like_dense_masked_attention(family, dtype, tolerance):
    model = tiny_model(family, seed=3, dtype=dtype)
    result = gracekv.compress(model, PROMPT, ratio=4)
    packed = heavier(result.packed)
    assert {layer.keys.dtype for layer in packed.layers} == {dtype}

    ids, logits = greedy(result.model, IDS, GraceCache(packed), 8)

    want = dense_logits(result.model, packed, torch.cat([IDS[-1:], ids[:-1]]))
    assert float((logits - want).norm() / want.norm()) < tolerance


def test_a_continuation_past_the_window_is_refused():
    """Up to the window it works; past it, neither way of generating gives wrong tokens silently."""
    model = tiny_model("mistral", seed=3, window=155)
    result = gracekv.compress(model, PROMPT, ratio=2)
    assert result.generate_ids(6).shape == (1, 6)
    with pytest.raises(CacheError, match="Generate at most 6 tokens"):
        result.generate_ids(7)
    with pytest.raises(CacheError, match="grown to 156 tokens"):
        greedy(result.model, IDS, result.new_cache(), 7)


@pytest.mark.parametrize("kind", ["phi3 longrope", "phi3 default", "llama longrope"])
def test_a_continuation_past_the_rope_switch_is_refused(kind):
    """Otherwise transformers would silently drop the cache, or rotate differently."""
    family, rope = kind.split()
    model = tiny_model(family, rope=rope, positions=155, original=155)
    with pytest.warns(LengthWarning, match="can continue this prompt for 6 tokens"):
        result = gracekv.compress(model, PROMPT, ratio=2)
    by_hand, _ = greedy(model, IDS, result.new_cache(), 6)
    assert torch.equal(result.generate_ids(6)[0], by_hand)
    with pytest.raises(CacheError, match="drops the cache"):
        result.generate_ids(7)
    inside = {"custom_generate": gracekv.generate, "ratio": 2, "max_new_tokens": 7}
    with pytest.raises(CacheError, match="drops the cache"):
        model.generate(PROMPT.ids[None], **inside)
    if family == "llama":  # transformers drops the cache of a Phi-3 alone
        with pytest.raises(CacheError, match="grown to 156 tokens, past 155"):
            greedy(result.model, IDS, result.new_cache(), 7)
