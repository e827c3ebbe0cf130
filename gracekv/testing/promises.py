"""`hold`: how every check of `gracekv.testing` names the promise that is broken."""

from __future__ import annotations


def hold(promise: bool, broken: str) -> None:
    """Raise `AssertionError` with the sentence `broken` unless `promise`."""
    if not promise:
        raise AssertionError(broken)
