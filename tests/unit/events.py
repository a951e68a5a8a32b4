"""Select events of a kind, and warnings."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TypeVar

import pytest

T = TypeVar("T")


def of_kind(events: Iterable[object], kind: type[T]) -> list[T]:
    return [event for event in events if isinstance(event, kind)]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
