"""Define the exception of ``flashmoa plan``."""

from __future__ import annotations

from flashmoa.errors import FlashMoAError


class PlanError(FlashMoAError):
    """Raised when a team cannot be planned; the message says what to change."""
