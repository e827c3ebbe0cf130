"""An engine of a real vLLM that serves contexts."""


def context_engine(model, store, limit_bytes=None, **options):
    """An engine in float32 for the model in a folder and the contexts of a store."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    from gracekv.vllm import kv_transfer_config

    transfer = KVTransferConfig(**kv_transfer_config(store, limit_bytes=limit_bytes))
    options = {"dtype": "float32", "enforce_eager": True, **options}
    return LLM(str(model), kv_transfer_config=transfer, **options)
