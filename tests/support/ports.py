"""Loopback ports: finding a free one, asking whether somebody answers."""

from __future__ import annotations

import socket


def free_port() -> int:
    """Return a loopback port that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def answers(port: int, host: str = "127.0.0.1") -> bool:
    """Return whether a connection to a port is accepted."""
    try:
        with socket.create_connection((host, port), timeout=2):
            return True
    except OSError:
        return False
