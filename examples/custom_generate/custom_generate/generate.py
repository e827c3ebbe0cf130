"""Compression of the prompt's cache for `model.generate(..., custom_generate=FOLDER, ratio=8)`."""

from typing import Any


def generate(model: Any, **arguments: Any) -> Any:
    """`model.generate` over a compressed cache; see `gracekv.generate` for its arguments."""
    import gracekv

    # What is None was not given.
    given = {name: value for name, value in arguments.items() if value is not None}
    return model.generate(**given, custom_generate=gracekv.generate)
