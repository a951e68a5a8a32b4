"""Where an engine publishes KV events, as it says on ``/server_info``; pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import httpx


@dataclass(frozen=True, slots=True)
class EventSource:
    """The publisher of one data-parallel rank: ZMQ addresses, seen from here.

    Attributes:
        replay: where it is asked for what was missed, if anywhere.
        topic: what its messages begin with.
    """

    address: str
    replay: str | None = None
    topic: str = ""


def event_sources(url: str, told: Mapping[str, Any]) -> tuple[EventSource, ...]:
    """One for each rank; none where the engine does not publish.

    Args:
        told: ``/server_info``. ``kv_events`` says where, in the releases that have it, and
            ``kv_events_config``, what the engine was started with, where the replay is.

    The ports of the ranks follow one another.
    """
    config = _config(told.get("kv_events_config"))
    described: Any = told.get("kv_events")
    try:
        if described is None:
            if config.get("publisher") != "zmq":
                return ()
            described = {
                "endpoint_port_base": _port(config.get("endpoint", "tcp://*:5557")),
                "topic": config.get("topic", ""),
                "dp_size": told.get("dp_size", 1),
            }
        host = httpx.URL(url).host
        first, topic = int(described["endpoint_port_base"]), str(described.get("topic") or "")
        replay = config.get("replay_endpoint")
        again = _port(replay) if replay else None
        return tuple(
            EventSource(
                f"tcp://{host}:{first + rank}",
                f"tcp://{host}:{again + rank}" if again is not None else None,
                topic,
            )
            for rank in range(max(1, int(described.get("dp_size") or 1)))
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        return ()


def _config(given: object) -> dict[str, Any]:
    try:
        config: Any = json.loads(str(given))
    except ValueError:
        return {}
    return cast("dict[str, Any]", config) if isinstance(config, dict) else {}


def _port(endpoint: object) -> int:
    return int(str(endpoint).rpartition(":")[2])
