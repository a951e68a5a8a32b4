"""Define the exceptions of FlashMoA, which form one tree.

::

    FlashMoAError
     +-- EngineError                  a request to an engine failed
     |    +-- EngineUnreachable       no connection, or it broke; is the engine running?
     |    +-- EngineTimeout           no answer in time
     |    +-- BadAnswer               an answer that does not follow the API
     |    +-- PluginMissing           the engine runs without flashmoa-sglang (404 on its routes)
     |    +-- RequestRefused          the engine refused it; ``code`` and ``status`` say why
     |         +-- MalformedRequest   malformed
     |         +-- StreamUnknown      unknown_stream
     |         +-- StreamOutOfOrder   out_of_order
     |         +-- StreamGone         stream_gone
     |         +-- PromptTooLarge     too_large
     |         +-- TooManyStreams     too_many_streams
     |         +-- EngineDraining     draining, engine_busy
     +-- UpstreamCancelled            the writer of a linked text was cancelled
     +-- TraceError                   a file is not a trace
     +-- PlanError                    a team cannot be planned (in flashmoa-bench)
     +-- NotForecastable              an agent's next prompt cannot be predicted
     +-- ConfigError, MixtureFailed      Mixture-of-Agents
     +-- BadLine, CandidateRefused, NotResumable      scoring
     +-- NoEngine, EngineLost, LimitReached, BadRequest, AgentFailed   the router

The exceptions for engines are defined here, with the names of the plugin's errors
(``flashmoa_sglang.http.errors``); each other one is defined in the package that raises it.
"""

from __future__ import annotations


class FlashMoAError(Exception):
    """Raised when FlashMoA cannot do its work; the base of all its exceptions."""


class EngineError(FlashMoAError):
    """Raised when a request to an engine fails; the base of all exceptions about engines."""


class EngineUnreachable(EngineError):
    """Raised when no connection to the engine can be made, or when it breaks."""


class EngineTimeout(EngineError, TimeoutError):
    """Raised when the engine does not answer in time."""


class BadAnswer(EngineError):
    """Raised when an answer does not follow the API."""


class PluginMissing(EngineError):
    """Raised when the engine answers, but does not have FlashMoA's routes."""


class RequestRefused(EngineError):
    """Raised when the engine refuses a request.

    Attributes:
        status: the HTTP status.
        code: the API's stable name for the reason (``docs/engine-api.md``, "Errors").
    """

    def __init__(self, message: str, status: int, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code

    @property
    def blames_request(self) -> bool:
        """Return whether it is wrong or too large, so that other engines would refuse it, too."""
        return self.status in (400, 413, 422)


class MalformedRequest(RequestRefused):
    """Raised when the body is not valid for the route (400)."""


class StreamUnknown(RequestRefused):
    """Raised when the engine has no such prompt stream (404)."""


class StreamOutOfOrder(RequestRefused):
    """Raised when an append skips ahead, or the stream has ended (409)."""


class StreamGone(RequestRefused):
    """Raised when the prompt stream expired, was deleted or has been used (410)."""


class PromptTooLarge(RequestRefused):
    """Raised when a prompt is over the context length or a buffer limit (413)."""


class TooManyStreams(RequestRefused):
    """Raised when the engine's limit of open prompt streams is reached (429)."""


class EngineDraining(RequestRefused):
    """Raised when the engine shuts down, or takes no more requests (503, ``engine_busy``)."""
