"""Define the errors of the routers. A client gets the ``status`` and the message of each."""

from __future__ import annotations

from starlette.responses import Response

from flashmoa.errors import FlashMoAError


class RouterError(FlashMoAError):
    """Raised when a router cannot serve a request; the base of all its errors.

    Attributes:
        status: the HTTP status of the answer that the client gets.
    """

    status = 500


class BadRequest(RouterError, ValueError):
    """Raised when a request cannot be read, or asks for what the router does not do."""

    status = 400


class BodyTooLarge(RouterError):
    """Raised when a request's body is longer than ``--max-body-bytes``."""

    status = 413


class AgentFailed(RouterError):
    """Raised when an agent's answer, which a request reads, will not be completed."""

    status = 424


class QueueFull(RouterError):
    """Raised when the queue has the most requests that the router allows."""

    status = 429


class EngineLost(RouterError):
    """Raised when an engine fails before any of its answer was passed on to the client.

    Attributes:
        reached: whether the engine may have received the request, and may have crashed on it.
    """

    status = 502

    def __init__(self, reason: str, *, reached: bool = True) -> None:
        super().__init__(reason)
        self.reached = reached


class NoEngine(RouterError):
    """Raised when no engine is left that could take the request."""

    status = 503

    def __init__(self) -> None:
        again = "(the router asks the engines again every few seconds)"
        super().__init__(f"no engine answers; send the request again later {again}")


class AllEnginesRefused(RouterError):
    """Raised when every engine refuses a request that the router sent to all of them.

    Attributes:
        response: one engine's answer, which the client gets unchanged.
    """

    def __init__(self, response: Response) -> None:
        super().__init__(f"every engine refused; one answered {response.status_code}")
        self.response = response
