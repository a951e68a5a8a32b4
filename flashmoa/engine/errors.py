"""What can go wrong between FlashMoA and an engine.

::

    FlashMoAError
     +-- EngineError                  anything an engine answers or fails to answer
          +-- EngineUnreachable       no connection, or it broke; is the engine running?
          +-- EngineTimeout           no answer in time
          +-- BadAnswer               an answer that is not what the API promises
          +-- PluginMissing           the engine runs without flashmoa-sglang (404 on its routes)
          +-- RequestRefused          the engine refused it; ``code`` and ``status`` say why
               +-- MalformedRequest   400
               +-- StreamUnknown      404
               +-- StreamOutOfOrder   409
               +-- StreamGone         410
               +-- PromptTooLarge     413
               +-- TooManyStreams     429
               +-- EngineDraining     503
"""

from __future__ import annotations


class FlashMoAError(Exception):
    """Base of everything FlashMoA raises on purpose."""


class EngineError(FlashMoAError):
    """Base of everything that concerns an engine."""


class EngineUnreachable(EngineError):
    """No connection could be made, or it broke."""


class EngineTimeout(EngineError, TimeoutError):
    """The engine did not answer in time."""


class BadAnswer(EngineError):
    """The answer is not what the API promises."""


class PluginMissing(EngineError):
    """The engine answers, but not FlashMoA's routes."""


class RequestRefused(EngineError):
    """The engine refused a request.

    Attributes:
        status: HTTP status. code: the plugin's stable name for the reason.
    """

    def __init__(self, message: str, status: int, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class MalformedRequest(RequestRefused):
    """400: the body is not what the route takes."""


class StreamUnknown(RequestRefused):
    """404: the engine has no such prompt stream."""


class StreamOutOfOrder(RequestRefused):
    """409: an append skipped ahead, or the stream has ended."""


class StreamGone(RequestRefused):
    """410: the prompt stream expired, was deleted or has been used."""


class PromptTooLarge(RequestRefused):
    """413: over the context length or a buffer limit."""


class TooManyStreams(RequestRefused):
    """429: the engine's limit of open prompt streams is reached."""


class EngineDraining(RequestRefused):
    """503: the engine is shutting down, or takes no more requests (``engine_busy``)."""


BY_STATUS: dict[int, type[RequestRefused]] = {
    400: MalformedRequest,
    404: StreamUnknown,
    409: StreamOutOfOrder,
    410: StreamGone,
    413: PromptTooLarge,
    429: TooManyStreams,
    503: EngineDraining,
}
