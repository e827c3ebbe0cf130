"""Attention of a chunk in one call without a mask, against a masked one."""

from unittest.mock import Mock, patch

import pytest
import torch
from hypothesis import given

from gracekv.errors import SlowAttentionWarning
from gracekv.prefill import partial_attention
from gracekv.prefill.partial_attention import causal_attention
from support.draws import SEEDS, ints


def states(seed, groups=2, heads=4, rows=5, length=9, dtype=torch.bfloat16):
    rng = torch.Generator().manual_seed(seed)
    shapes = (1, heads, rows, 16), (groups, length, 16), (groups, length, 16)
    return [torch.randn(shape, generator=rng).to(dtype) for shape in shapes]


def expected(query, keys, values, scale):
    """[1, C, H, d] in float64: each of the last C tokens attends to the keys up to its own."""
    repeats = query.shape[1] // len(keys)
    keys, values = (x.double().repeat_interleave(repeats, dim=0)[None] for x in (keys, values))
    logits = scale * query.double() @ keys.mT
    rows, length = logits.shape[-2:]
    later = torch.arange(length) > torch.arange(length - rows, length)[:, None]
    return (logits.masked_fill(later, -torch.inf).softmax(dim=-1) @ values).transpose(1, 2)


@pytest.fixture(autouse=True)
def takes_flash():
    """What torch answers, as a build with FlashAttention does on a GPU."""
    partial_attention._warn_once.cache_clear()
    with patch.object(torch.backends.cuda, "can_use_flash_attention", return_value=True) as answer:
        yield answer


@given(seed=SEEDS, groups=ints(1, 3), shared=ints(1, 3), rows=ints(1, 9), before=ints(0, 9))
def test_the_last_tokens_attend_to_all_up_to_their_own(seed, groups, shared, rows, before):
    given = states(seed, groups, groups * shared, rows, before + rows)
    output = causal_attention(*given, scale=0.3)
    # bfloat16 keeps eight bits of the attention shares, which sum to 1, and of the output.
    torch.testing.assert_close(output.double(), expected(*given, 0.3), rtol=0.02, atol=0.02)


@pytest.mark.filterwarnings("error")
def test_what_flash_attention_does_not_take_goes_to_another_kernel(monkeypatch, takes_flash):
    given, takes_flash.return_value = states(0, dtype=torch.float32), False
    with pytest.warns(SlowAttentionWarning, match="without FlashAttention"):
        assert causal_attention(*given, scale=0.3) is None  # no such kernel on a CPU
    monkeypatch.setattr(torch.backends.cuda, "can_use_efficient_attention", lambda params: True)
    output = causal_attention(*given, scale=0.3)  # warns once
    torch.testing.assert_close(output.double(), expected(*given, 0.3), rtol=1e-4, atol=1e-5)


def test_its_mask_is_no_tensor_of_chunk_times_prompt(monkeypatch):
    kernel = Mock(side_effect=lambda query, *_, **__: query)
    monkeypatch.setattr(partial_attention, "scaled_dot_product_attention", kernel)
    causal_attention(*states(0, rows=50, length=90), scale=0.3)
    mask = kernel.call_args.kwargs["attn_mask"]
    assert (mask.seq_len_q, mask.seq_len_kv) == (50, 90)
    assert mask.untyped_storage().nbytes() < 100


def cudnn(query, keys, values, bias, log_sumexp, dropout, causal, debug, *, scale):
    """Like torch's cuDNN call: a causal mask starts at the first key; sums are [1, H, C, 1]."""
    assert (bias, log_sumexp, dropout, debug) == (None, True, 0, False)
    repeats = query.shape[1] // keys.shape[1]
    keys, values = (x.double().repeat_interleave(repeats, dim=1) for x in (keys, values))
    logits = scale * query.double() @ keys.mT
    if causal:
        logits = logits.masked_fill(torch.ones(logits.shape[-2:]).triu(1).bool(), -torch.inf)
    output = (logits.softmax(dim=-1) @ values).to(query.dtype)
    return output, logits.logsumexp(dim=-1, keepdim=True).float(), None, None


@pytest.mark.parametrize(("before", "least"), [(0, 6), (1, 6), (9, 6), (9, 7)])
def test_hoppers_cudnn_attends_in_two_parts(monkeypatch, before, least):
    given = states(3, rows=6, length=before + 6)
    monkeypatch.setattr(partial_attention, "_LEAST_SPLIT", least)
    monkeypatch.setattr(partial_attention, "capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cuda, "can_use_cudnn_attention", lambda params: True)
    kernel = Mock(side_effect=cudnn)
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", kernel)
    output = causal_attention(*given, scale=0.3)
    torch.testing.assert_close(output.double(), expected(*given, 0.3), rtol=0.02, atol=0.02)
    read = [call.args[1].shape[2] for call in kernel.call_args_list]
    assert read == ([before, 6] if before and least == 6 else [])
