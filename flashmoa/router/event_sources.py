"""Read from an engine's settings where it publishes its KV events (`parse_event_sources`); pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from flashmoa.router.client_requests import parse_object


@dataclass(frozen=True, slots=True)
class EventSource:
    """Gives the ZMQ addresses at which one data-parallel rank publishes its events.

    Attributes:
        address: where events are published.
        replay: where missed events can be requested; ``None`` if they cannot.
        topic: the topic that every message begins with.
    """

    address: str
    replay: str | None = None
    topic: str = ""


def parse_event_sources(url: str, info: Mapping[str, Any]) -> tuple[EventSource, ...]:
    """Return one source for each rank of an engine, or none if the engine publishes no events.

    The ranks have consecutive ports. Raises: ValueError if it cannot be read where they publish.

    Args:
        url: the engine's URL, which has the host.
        info: the engine's ``/server_info``. Some releases give the address in ``kv_events``. The
            address of replays is only in ``kv_events_config``, the engine's command line option.
    """
    config = parse_object(str(info.get("kv_events_config")))
    published: Any = info.get("kv_events")
    try:
        if published is None:
            if config.get("publisher") != "zmq":
                return ()
            published = {
                "endpoint_port_base": _parse_port(config.get("endpoint", "tcp://*:5557")),
                "topic": config.get("topic", ""),
                "dp_size": info.get("dp_size", 1),
            }
        host = httpx.URL(url).host
        host = f"[{host}]" if ":" in host else host
        port, topic = int(published["endpoint_port_base"]), str(published.get("topic") or "")
        replay = config.get("replay_endpoint")
        replay_port = _parse_port(replay) if replay else None
        return tuple(
            EventSource(
                f"tcp://{host}:{port + rank}",
                f"tcp://{host}:{replay_port + rank}" if replay_port is not None else None,
                topic,
            )
            for rank in range(max(1, int(published.get("dp_size") or 1)))
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"they need a port, which {published or config!r} does not have; start the engine with "
            """--kv-events-config '{"publisher": "zmq", "endpoint": "tcp://*:5557"}'"""
        ) from error


def _parse_port(endpoint: object) -> int:
    return int(str(endpoint).rpartition(":")[2])
