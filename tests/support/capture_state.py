"""State that a capture must leave unchanged."""

from transformers import AttentionInterface, AttentionMaskInterface


def state(model):
    """Hooks, attention, replaced functions and transformers' registries."""
    hooks = [
        (name, len(x._forward_pre_hooks), len(x._forward_hooks), "forward" in vars(x))
        for name, x in model.named_modules()
    ]
    tables = AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping
    # A model keeps its own name there as long as it lives.
    known = [{n: x for n, x in table.items() if "gracekv" not in n} for table in tables]
    return hooks, model.config._attn_implementation, known
