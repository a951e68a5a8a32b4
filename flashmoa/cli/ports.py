"""Check the ``--port`` of commands that serve (``port_problem``)."""

from __future__ import annotations


def port_problem(port: int) -> str | None:
    """Return why no server can have this port, ``None`` if one can."""
    return None if 0 < port < 65536 else f"--port {port} is not between 1 and 65535"
