"""Classify how an upstream text fails, and decide what happens to the prompts that contain it."""

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
    """Decides what happens to a prompt when a text in it fails (FlashAgents §4.3).

    ``abort`` ends the link and releases its KV at once; the failure is raised where the text is
    awaited. ``finalize`` ends the text where it is, and the prompt continues after it.

    Attributes:
        error: the action if the text's writer failed.
        cancel: the action if its writer was cancelled.
        timeout: the action if its writer waited for its engine longer than its client allows.
        stall: the action if the text has begun and then pauses for ``stall_seconds``. Nothing has
            failed yet, so ``abort`` raises nothing: the reader keeps waiting for the text, and its
            prompt is computed without a link.
        stall_seconds: the longest pause in a text that has begun.

    Raises:
        ValueError: if an action is unknown or ``stall_seconds`` is not positive.
    """

    error: Action = "abort"
    cancel: Action = "abort"
    timeout: Action = "abort"
    stall: Action = "abort"
    stall_seconds: float = 60.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value: object = getattr(self, field.name)
            if field.name == "stall_seconds":
                if not isinstance(value, int | float) or not value > 0:
                    raise ValueError(f"stall_seconds must be a positive number, not {value!r}")
            elif value not in ("abort", "finalize"):
                raise ValueError(f"{field.name} must be 'abort' or 'finalize', not {value!r}")

    @classmethod
    def of(cls, given: OnFailure) -> FailurePolicy:
        """Return ``given`` if it is a policy, otherwise a policy with this action.

        The action then applies to every failure except a stall: a text may continue after a stall.

        Raises: ValueError if the action is unknown.
        """
        if isinstance(given, FailurePolicy):
            return given
        return cls(error=given, cancel=given, timeout=given)

    def action(self, failure: Failure) -> Action:
        action: Action = getattr(self, failure)
        return action


OnFailure = FailurePolicy | Action


def classify_failure(error: BaseException) -> Failure:
    """Return the kind of failure of an exception of FlashMoA or an OpenAI client."""
    if isinstance(error, UpstreamCancelled) or not isinstance(error, Exception):
        return "cancel"
    cause: BaseException | None = error
    seen: set[int] = set()  # The chain of causes may have a cycle.
    while cause is not None and id(cause) not in seen:
        if isinstance(cause, TimeoutError) or _is_httpx_timeout(cause):
            return "timeout"
        seen.add(id(cause))
        cause = cause.__cause__
    return "error"


def _is_httpx_timeout(error: BaseException) -> bool:
    """Return whether this is a timeout of httpx, or of httpx2, which OpenAI's client 3 uses."""
    return any(base.__name__ == "TimeoutException" for base in type(error).__mro__)
