"""Tiny random-weight models: every shape that matters, milliseconds to run, nothing to download."""

from __future__ import annotations

from typing import Any

import torch

_LLAMA3_SCALING: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN_SCALING: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


def tiny_llama(
    *,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    vocabulary: int = 97,
    rope: str = "default",
    bias: bool = False,
    attention: str = "sdpa",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Any:
    """A `LlamaForCausalLM` in evaluation mode whose weights depend only on `seed`.

    Args:
        layers: L.
        heads: H.
        kv_heads: G.
        dim: d.
        vocabulary: number of token ids; none of them ends a sequence.
        rope: "default", "llama3" (scaled frequencies) or "yarn" (scaled, with an attention factor).
        bias: whether the attention projections have biases.
        attention: transformers' attention implementation.
        dtype: of the weights.
        seed: of the weights; torch's own generator is left as it was.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    scaling: dict[str, dict[str, Any]] = {
        "default": {"rope_type": "default"},
        "llama3": _LLAMA3_SCALING,
        "yarn": _YARN_SCALING,
    }
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=heads * dim,
        intermediate_size=2 * heads * dim,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=dim,
        max_position_embeddings=4096,
        attention_bias=bias,
        rope_parameters={**scaling[rope], "rope_theta": 10_000.0},
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        attn_implementation=attention,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        # transformers' small initial weights make attention uniform and biases zero, and would
        # hide most mistakes; unit-scale projections make it choose.
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name.endswith(("q_proj.weight", "k_proj.weight")):
                    weight.normal_(std=2.0 * weight.shape[1] ** -0.5)
                elif name.endswith(("proj.weight", "lm_head.weight")):
                    weight.normal_(std=weight.shape[1] ** -0.5)
                elif name.endswith(("bias", "embed_tokens.weight")):
                    weight.normal_()
    return model.to(dtype).eval()
