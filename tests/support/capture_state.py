"""What a capture must leave as it found it."""

from transformers import AttentionInterface, AttentionMaskInterface


def state(model):
    """Hooks, attention, replaced functions and transformers' registries."""
    modules = [
        (name, len(x._forward_pre_hooks), len(x._forward_hooks), "forward" in vars(x))
        for name, x in model.named_modules()
    ]
    return (
        modules,
        model.config._attn_implementation,
        dict(AttentionInterface._global_mapping),
        dict(AttentionMaskInterface._global_mapping),
    )
