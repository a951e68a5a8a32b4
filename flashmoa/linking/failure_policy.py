"""When an upstream text fails: how that can be, and what becomes of the prompts it is for."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from flashmoa.errors import FlashMoAError

Action = Literal["abort", "finalize"]
Failure = Literal["error", "cancel", "timeout", "stall"]


class UpstreamCancelled(FlashMoAError):
    """Raised when the writer of a text was cancelled."""


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """What becomes of a prompt when a text in it fails (FlashAgents §4.3).

    ``abort`` gives the link up and its KV back at once; what went wrong is raised where the
    text is awaited. ``finalize`` has the text end with what has arrived, and the prompt goes
    on with that.

    Attributes:
        error: its writer failed.
        cancel: its writer was cancelled.
        timeout: its writer waited for its engine longer than its client allows.
        stall: nothing has come for ``stall_seconds`` after some of it had. Nothing has failed
            yet, so ``abort`` raises nothing: the text is awaited on, and its reader is then
            computed without a link.

    Raises:
        ValueError: an action there is not, or a time that is not positive.
    """

    error: Action = "abort"
    cancel: Action = "abort"
    timeout: Action = "abort"
    stall: Action = "abort"
    stall_seconds: float = 60.0

    def __post_init__(self) -> None:
        for one in fields(self):
            value: object = getattr(self, one.name)
            if one.name == "stall_seconds":
                if not isinstance(value, int | float) or not value > 0:
                    raise ValueError(f"stall_seconds must be a positive number, not {value!r}")
            elif value not in ("abort", "finalize"):
                raise ValueError(f"{one.name} must be 'abort' or 'finalize', not {value!r}")

    @classmethod
    def of(cls, given: OnFailure) -> FailurePolicy:
        """``given`` in full: one action is for all but a stall, which may still end well.

        Raises: ValueError.
        """
        if isinstance(given, FailurePolicy):
            return given
        return cls(error=given, cancel=given, timeout=given)

    def action(self, failure: Failure) -> Action:
        """What is to be done."""
        actions: dict[Failure, Action] = {
            "error": self.error,
            "cancel": self.cancel,
            "timeout": self.timeout,
            "stall": self.stall,
        }
        return actions[failure]


OnFailure = FailurePolicy | Action


def failure_of(error: BaseException) -> Failure:
    """Which failure an exception is, of ours or of an OpenAI-style client."""
    if isinstance(error, UpstreamCancelled) or not isinstance(error, Exception):
        return "cancel"
    cause: BaseException | None = error
    seen: set[int] = set()  # A cause may lead back to itself.
    while cause is not None and id(cause) not in seen:
        if isinstance(cause, TimeoutError) or _is_clients_timeout(cause):
            return "timeout"
        seen.add(id(cause))
        cause = cause.__cause__
    return "error"


def _is_clients_timeout(error: BaseException) -> bool:
    """Whether it is a timeout of httpx, or of httpx2, which OpenAI's client 3 has below it."""
    return any(kind.__name__ == "TimeoutException" for kind in type(error).__mro__)
