"""The memory that tensors hold, some of which may share a storage."""


def storages(tensors):
    """Bytes of the tensors' storages by address."""
    found = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in found}


def entry_bytes(layer):
    """Bytes of a layer's keys and values, with everything needed to read them."""
    beside = ("positions", "log_multiplicity", "offsets")
    return sum(x.nbytes for name, x in layer.tensors().items() if not name.endswith(beside))


def stored_bytes(tensors):
    """Bytes of the tensors' storages, each counted once."""
    return sum(storages(tensors).values())
