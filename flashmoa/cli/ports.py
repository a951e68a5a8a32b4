"""Check the ``--port`` of commands that serve (``port_problem``), and listen there (``bind``)."""

from __future__ import annotations

import errno
import socket


def port_problem(port: int) -> str | None:
    """Return why no server can have this port, ``None`` if one can."""
    return None if 0 < port < 65536 else f"--port {port} is not between 1 and 65535"


def bind(host: str, port: int) -> socket.socket:
    """Return a socket for a server at this address. Raises: OSError that says what to give."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        # A name such as localhost may have both kinds of addresses; all clients try IPv4.
        family, kind, protocol, _, address = min(found, key=lambda info: info[0] != socket.AF_INET)
        # With the protocol, asyncio recognises TCP and turns off Nagle's algorithm, which would
        # delay answers.
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise OSError(f"port {port} is in use; choose another one with --port") from error
        raise OSError(
            f"cannot listen on {host}:{port} ({error.strerror}); give an address of this machine "
            "with --host"
        ) from error
    return bound


def root_url(host: str, port: int, scheme: str = "http") -> str:
    """Return the URL of a server at this address."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def api_url(host: str, port: int) -> str:
    """Return the URL of the OpenAI API of a server at this address."""
    return f"{root_url(host, port)}/v1"
