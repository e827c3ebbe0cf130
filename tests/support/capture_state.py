"""State that a capture must leave unchanged."""

from transformers import AttentionInterface, AttentionMaskInterface


def state(model):
    """Hooks, attention, replaced functions and transformers' registries."""
    return (
        [
            (name, len(x._forward_pre_hooks), len(x._forward_hooks), "forward" in vars(x))
            for name, x in model.named_modules()
        ],
        model.config._attn_implementation,
        # A model keeps its own name there as long as it lives.
        {n: x for n, x in AttentionInterface._global_mapping.items() if "gracekv" not in n},
        {n: x for n, x in AttentionMaskInterface._global_mapping.items() if "gracekv" not in n},
    )
