"""End a dry run at its first request (``capture_requests``)."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar


class RequestCaptured(Exception):
    """Ends a dry run at its first request, and carries that request out of it."""

    def __init__(self, request: object) -> None:
        super().__init__("a dry run ends here")
        self.request = request


class Capture:
    """Holds whether the clients of one dry run must raise :class:`RequestCaptured`.

    The tasks that a dry run starts inherit it, and may live longer than the dry run. So it is
    deactivated when the dry run ends; requests that they make later are sent like any other.

    Attributes:
        is_active: whether the dry run is still running.
        was_in_other_task: whether a request was captured in a task other than the dry run's.
    """

    def __init__(self) -> None:
        self.is_active = True
        self.was_in_other_task = False
        self._task = _find_task()

    def take(self, request: object) -> RequestCaptured:
        """Return the exception to raise in place of sending ``request``."""
        if _find_task() is not self._task:
            self.was_in_other_task = True
        return RequestCaptured(request)


_capture: ContextVar[Capture | None] = ContextVar("flashmoa_dry_run", default=None)


def active_capture() -> Capture | None:
    """Return the capture of the dry run that this code belongs to, if that is still running."""
    capture = _capture.get()
    return capture if capture is not None and capture.is_active else None


@contextmanager
def capture_requests() -> Generator[Capture]:
    """Make clients raise :class:`RequestCaptured` instead of sending a request."""
    capture = Capture()
    token = _capture.set(capture)
    try:
        yield capture
    finally:
        capture.is_active = False
        _capture.reset(token)


def _find_task() -> asyncio.Task[object] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # A thread without an event loop.
        return None
