"""A port for processes that a test starts."""

import socket


def free_port():
    """An unused port of this machine, as text."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])
