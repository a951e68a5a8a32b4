"""Observe runs: typed events, and listeners that receive them."""

from flashmoa.observe.events import (
    CallEvent,
    CallFailed,
    CallFinished,
    CallStarted,
    Event,
    FirstToken,
    LinkAdvanced,
    LinkClosed,
    LinkDeclined,
    LinkOpened,
    LinkWaits,
    Listener,
    PromptSent,
    StreamFound,
    UpstreamFailed,
)

__all__ = [
    "CallEvent",
    "CallFailed",
    "CallFinished",
    "CallStarted",
    "Event",
    "FirstToken",
    "LinkAdvanced",
    "LinkClosed",
    "LinkDeclined",
    "LinkOpened",
    "LinkWaits",
    "Listener",
    "PromptSent",
    "StreamFound",
    "UpstreamFailed",
]
