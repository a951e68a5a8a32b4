"""Watching: typed events and what is made of them."""

from flashmoa.observe.events import (
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
    UpstreamFailed,
    both,
    contained,
    ignore,
)

__all__ = [
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
    "UpstreamFailed",
    "both",
    "contained",
    "ignore",
]
