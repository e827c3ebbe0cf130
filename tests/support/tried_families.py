"""Families without tests of their own: tiny models for the check that decides about them."""

from __future__ import annotations

from typing import Any

import torch

TRIED = {
    "afmoe": "Trinity (AFMoE)",
    "apertus": "Apertus",
    "arcee": "Arcee AFM",
    "bamba": "Bamba",
    "cohere": "Command R",
    "cwm": "CWM",
    "dots1": "dots.llm1",
    "ernie4_5": "ERNIE 4.5",
    "ernie4_5_moe": "ERNIE 4.5 MoE",
    "exaone4": "EXAONE 4",
    "exaone_moe": "K-EXAONE",
    "glm4_moe": "GLM-4.5 to 4.7",
    "granitemoe": "Granite MoE",
    "hunyuan_v1_dense": "Hunyuan",
    "hunyuan_v1_moe": "Hunyuan MoE",
    "jamba": "Jamba",
    "lfm2_moe": "LFM2-MoE",
    "mimo_v2_flash": "MiMo-V2-Flash",
    "minimax_m2": "MiniMax-M2",
    "ministral3": "Ministral 3",
    "nemotron": "Nemotron",
    "olmo": "OLMo",
    "olmo_hybrid": "OLMo hybrid",
    "olmoe": "OLMoE",
    "phimoe": "Phi-3.5-MoE",
    "qwen2_moe": "Qwen2-MoE",
    "qwen3_5_moe_text": "Qwen3.5-MoE (text)",
    "seed_oss": "Seed-OSS",
    "stablelm": "StableLM",
    "vaultgemma": "VaultGemma",
}
"""`config.model_type` and what people call it."""

MIXED = ["sliding_attention", "full_attention"] * 2
OPTIONS: dict[str, dict[str, Any]] = {
    "cwm": {"bos_token_id": 1, "eos_token_id": [96], "pad_token_id": 0},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mimo_v2_flash": {"attn_implementation": "eager"},
    "ministral3": {"sliding_window": None},
    "phimoe": {"sliding_window": None},
    "qwen3_5_moe_text": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    },
    "vaultgemma": {"attn_implementation": "eager"},
}
"""What some need beside the sizes."""

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
}
"""Of every tiny model."""

_MORE = {
    "sliding_window": 24,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 97,
    "global_head_dim": 32,
    "attention_chunk_size": 24,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "block_auto_adjust_ff_dim": False,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "attn_layer_indices": [1, 3],
}
_TOKENS = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))


def tried_model(family: str, **fields: Any) -> Any:
    """A tiny model of this `config.model_type` with random weights."""
    import transformers

    config = transformers.CONFIG_MAPPING[family]
    known = {name for parent in config.__mro__ for name in vars(parent).get("__annotations__", ())}
    sizes = {name: x for name, x in (SIZES | _MORE).items() if name in known}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config(**sizes | _TOKENS | OPTIONS.get(family, {}) | fields)
    )
    for weight in model.parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=1.5 * weight.shape[1] ** -0.5)
    return model.eval()


def sentence() -> str:
    """What docs/models.md says of them."""
    *first, last = TRIED.values()
    return f"Tests try {', '.join(first)} and {last} so."
