"""Tiny models of families without their own tests, for the check that decides about them."""

import inspect
from typing import Any

import torch

TRIED = {
    "afmoe": "Trinity (AFMoE)", "apertus": "Apertus", "arcee": "Arcee AFM", "bamba": "Bamba",
    "cohere": "Command R", "cwm": "CWM", "dots1": "dots.llm1", "ernie4_5": "ERNIE 4.5",
    "ernie4_5_moe": "ERNIE 4.5 MoE", "exaone4": "EXAONE 4", "exaone_moe": "K-EXAONE",
    "glm4_moe": "GLM-4.5 to 4.7", "granitemoe": "Granite MoE", "lfm2_moe": "LFM2-MoE",
    "minimax_m2": "MiniMax-M2", "ministral3": "Ministral 3", "nemotron": "Nemotron",
    "olmo": "OLMo", "olmo_hybrid": "OLMo hybrid", "olmoe": "OLMoE", "phimoe": "Phi-3.5-MoE",
    "qwen2_moe": "Qwen2-MoE", "qwen3_5_moe_text": "Qwen3.5-MoE (text)", "seed_oss": "Seed-OSS",
    "stablelm": "StableLM", "vaultgemma": "VaultGemma",
}  # fmt: skip
"""`config.model_type` and what people call it."""

MIXED = ["sliding_attention", "full_attention"] * 2
OPTIONS: dict[str, dict[str, Any]] = {
    "cwm": {"bos_token_id": 1, "eos_token_id": [96], "pad_token_id": 0},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "ministral3": {"sliding_window": None},
    "phimoe": {"sliding_window": None},
    "qwen3_5_moe_text": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    },
    "vaultgemma": {"attn_implementation": "eager"},
}
"""What some need beside the sizes."""

SIZES = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SIZES |= {"max_position_embeddings": 4096}
"""Of every tiny model."""

_BY_SIZE = {
    1: "n_shared_experts first_k_dense_replace n_group topk_group attn_layer_offset mamba_n_groups",
    2: "num_experts_per_tok moe_k linear_num_key_heads attn_layer_period",
    4: "num_experts num_local_experts n_routed_experts moe_num_experts linear_num_value_heads",
    8: "hidden_size_per_layer_input qk_nope_head_dim qk_rope_head_dim mamba_n_heads mamba_d_state",
    16: "kv_lora_rank q_lora_rank v_head_dim linear_key_head_dim linear_value_head_dim "
    "mamba_d_head mamba_chunk_size",
    24: "sliding_window attention_chunk_size",
    32: "moe_intermediate_size shared_expert_intermediate_size global_head_dim",
    97: "vocab_size_per_layer_input",
}
_MORE = {name: size for size, names in _BY_SIZE.items() for name in names.split()} | {
    "block_auto_adjust_ff_dim": False,
    "attn_layer_indices": [1, 3],
}
_TOKENS = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))


def tried_model(family: str, **fields: Any) -> Any:
    """A tiny model of this `config.model_type` with random weights."""
    import transformers

    config = transformers.CONFIG_MAPPING[family]
    known = {name for parent in config.__mro__ for name in inspect.get_annotations(parent)}
    sizes = {name: x for name, x in (SIZES | _MORE).items() if name in known}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config(**sizes | _TOKENS | OPTIONS.get(family, {}) | fields)
    )
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=1.5 * weight.shape[1] ** -0.5)
        elif name.endswith("norm.weight"):
            torch.nn.init.uniform_(weight, 0.6, 1.6)
    return model.eval()


def sentence() -> str:
    """The sentence about them in docs/models.md."""
    *first, last = TRIED.values()
    return f"Tests do this with {', '.join(first)} and {last}."
