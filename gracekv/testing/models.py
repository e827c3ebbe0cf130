"""Tiny models with random weights, and a tokenizer, that need milliseconds and no download."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

import torch

SLIDING = ("cohere2", "gemma2", "gemma3_text", "gemma4_text", "gpt_oss", "ministral", "olmo3")
"""Families in which every other layer has a sliding window here."""

# The layers that come before each one with full attention.
_OTHER_LAYERS = {
    **dict.fromkeys(SLIDING, ("sliding_attention",)),
    "granitemoehybrid": ("linear_attention",),
    "lfm2": ("conv",),
    "nemotron_h": ("linear_attention", "moe"),
    "qwen3_5_text": ("linear_attention",),
    "qwen3_next": ("linear_attention",),
}

_EXPERT_SIZES = (
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "moe_shared_expert_intermediate_size",
)
_OWN: Mapping[str, Mapping[str, Any]] = {
    "falcon_h1": {"lm_head_multiplier": 0.5},
    # Its own cap of 50 would hardly change such small logits.
    "gemma2": {"attn_logit_softcapping": 3.0},
    "gemma4_text": {"hidden_size_per_layer_input": 0},
    "granite": {"attention_multiplier": 0.1, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "granitemoehybrid": {"attention_multiplier": 0.1, "logits_scaling": 2.0},
    "lfm2": {"block_auto_adjust_ff_dim": False},
}
# Weights of projections, of standard deviation 1 / sqrt(inputs).
_UNIT_SCALE = (
    "proj.weight", "in_proj_qkvz.weight", "in_proj_ba.weight", "conv1d.weight", "lm_head.weight",
    "fc.weight", "experts.gate_up_proj", "experts.down_proj", "gate.weight",
)  # fmt: skip


def tiny_model(
    family: str = "llama",
    *,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    vocabulary: int = 97,
    rope: str = "default",
    partial: float = 1.0,
    positions: int = 4096,
    original: int = 64,
    window: int | None = None,
    bias: bool = False,
    attention: str = "sdpa",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Any:
    """A causal language model in evaluation mode whose weights depend only on the arguments.

    Args:
        family: one of `gracekv.prefill.supported.TESTED_MODEL_TYPES`.
        layers: L.
        heads: H.
        kv_heads: G.
        dim: d.
        vocabulary: number of token ids; there is no end-of-sequence id.
        rope: "default", "linear", "dynamic", "llama3" (scaled frequencies), "yarn" (scaled, with
            an attention factor) or "longrope" (two sets of frequencies, with an attention factor).
        partial: fraction of a head's features that are rotated ("phi3", "glm4", "qwen3_next",
            "qwen3_5_text").
        positions: `max_position_embeddings`.
        original: context length before RoPE scaling ("llama3", "yarn", "longrope"; 32 for
            "llama3").
        window: sliding window of the family's sliding layers. With None no layer slides, except in
            the families of `SLIDING`, where every other layer has the family's own window.
        bias: whether the attention projections have biases ("qwen2" always has them).
        attention: transformers' attention implementation.
        dtype: dtype of the weights.
        seed: seed of the weights; torch's own generator is not changed.
    """
    import transformers

    kinds = (*_OTHER_LAYERS.get(family, ()), "full_attention")
    layer_kinds = "layers_block_type" if family == "nemotron_h" else "layer_types"
    # Each family reads the options that it knows and ignores the others.
    experts = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4)
    wide = dict.fromkeys(_EXPERT_SIZES, heads * dim)
    states = {"mamba_n_heads": heads, "mamba_d_head": 2 * dim, "mamba_d_state": dim}
    states |= {"mamba_num_heads": heads, "mamba_head_dim": 2 * dim, "ssm_state_size": dim}
    states |= {"linear_num_key_heads": kv_heads, "linear_num_value_heads": heads}
    states |= {"linear_key_head_dim": dim, "linear_value_head_dim": dim}
    states |= {"mamba_n_groups": 1, "n_groups": 1, "mamba_chunk_size": 16, "chunk_size": 16}
    extra: dict[str, Any] = {**experts, "num_experts_per_tok": 2, **wide, **states}
    extra |= _OWN.get(family, {})
    parameters: dict[str, Any] = {**_scaling(rope, original, int(dim * partial)), "rope_theta": 1e4}
    if len(kinds) > 1:
        extra[layer_kinds] = [kinds[i % len(kinds)] for i in range(layers)]
    if family in ("phi3", "glm4", "qwen3_next", "qwen3_5_text"):
        parameters["partial_rotary_factor"] = partial
    if family == "phi3":
        extra["original_max_position_embeddings"] = positions if rope == "default" else original
    elif family in ("qwen2", "qwen3"):
        # The first layer has full attention, the others slide.
        extra |= {"use_sliding_window": window is not None, "max_window_layers": 1}
    elif family in ("gemma3_text", "gemma4_text"):
        local = {"rope_type": "default", "rope_theta": 1e3}
        if family == "gemma4_text":
            # Layers with full attention have larger heads, of which only some features rotate.
            parameters |= {"rope_type": "proportional", "partial_rotary_factor": 0.5}
            extra["global_head_dim"] = 2 * dim
        parameters = {"sliding_attention": local, "full_attention": parameters}
    elif family == "qwen3_5_text":
        parameters["mrope_section"] = [2, 1, 1]
    elif family == "falcon_h1":
        extra["mamba_d_ssm"] = 2 * heads * dim
    elif family == "smollm3":
        # Every other layer has no RoPE.
        extra |= {"no_rope_layers": [1 - i % 2 for i in range(layers)], "use_sliding_window": False}
    if family in ("mistral", "phi3", "mixtral", "starcoder2") or window is not None:
        # Mistral has a window of 4096 unless it is set to None.
        extra["sliding_window"] = window
    config = transformers.AutoConfig.for_model(
        family,
        vocab_size=vocabulary, hidden_size=heads * dim, intermediate_size=2 * heads * dim,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        head_dim=dim, max_position_embeddings=positions, attention_bias=bias,
        rope_parameters=parameters, tie_word_embeddings=False, attn_implementation=attention,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        **extra,
    )  # fmt: skip
    # Gemma multiplies its embeddings by sqrt(D).
    embedding = (heads * dim) ** -0.5 if family.startswith("gemma") else 1.0
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
        # transformers' small initial weights make attention uniform and biases zero, which would
        # hide most bugs; with projections of unit scale, attention is selective.
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name.endswith(_UNIT_SCALE):
                    asks = name.endswith(("q_proj.weight", "k_proj.weight", "qkv_proj.weight"))
                    weight.normal_(std=(1 + asks) * weight.shape[-1] ** -0.5)
                elif name.endswith("embed_tokens.weight"):
                    weight.normal_(std=embedding)
                elif name.endswith(("bias", "sinks")):
                    weight.normal_()
                elif name.endswith("A_log"):
                    # States that persist for some tokens.
                    weight.uniform_(-4.0, -1.0)
                elif name.endswith(("q_norm.weight", "k_norm.weight")):
                    weight.uniform_(0.5, 2.0)
    return model.to(dtype).eval()


def tiny_llama(**options: Any) -> Any:
    """`tiny_model("llama", ...)`."""
    return tiny_model("llama", **options)


def _scaling(rope: str, original: int, rotary: int) -> dict[str, Any]:
    """`rope_parameters` of a RoPE type, without its base."""
    fields: dict[str, dict[str, Any]] = {
        "default": {},
        "linear": {"factor": 4.0},
        "dynamic": {"factor": 2.0},
        "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "yarn": {"factor": 4.0},
        "longrope": {
            "short_factor": [1.0 + 0.05 * i for i in range(rotary // 2)],
            "long_factor": [1.5 + 0.5 * i for i in range(rotary // 2)],
            "factor": 8.0,
        },
    }
    before = {"llama3": 32, "yarn": original, "longrope": original}
    if rope in before:
        fields[rope]["original_max_position_embeddings"] = before[rope]
    return {"rope_type": rope, **fields[rope]}


_CHAT = (
    "<s>{% for m in messages %}<|user|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_tokenizer(texts: Sequence[str] = (), vocabulary: int = 2000) -> Any:
    """A fast byte-level BPE tokenizer with a chat template, determined by the arguments.

    Args:
        texts: training texts in addition to the chapter that comes with gracekv.
        vocabulary: number of token ids, including special ones. `tiny_model` takes the same number.

    Returns:
        A transformers `PreTrainedTokenizerFast`; encoding and decoding preserve any text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from tokenizers.trainers import BpeTrainer
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    raw.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(False)])
    raw.decoder = decoders.ByteLevel()
    chapter = (files("gracekv") / "data" / "alice_chapter_1.txt").read_text(encoding="utf-8")
    trainer = BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<s>", "</s>", "<|user|>", "<|end|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator([chapter, *texts], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = _CHAT
    return tokenizer
