"""The memory that tensors hold, some of which may share a storage."""


def storages(tensors):
    """Bytes of the tensors' storages by address."""
    found = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in found}


def stored_bytes(tensors):
    """Bytes of the tensors' storages, each counted once."""
    return sum(storages(tensors).values())
