"""Test where an engine's settings say that it publishes its KV events."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flashmoa.router.event_sources import EventSource, parse_event_sources

DESCRIPTION = {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "topic": "kv"}
CONFIG = {"publisher": "zmq", "endpoint": "tcp://*:7000", "replay_endpoint": "tcp://*:7100"}


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({}, ()),
        ({"kv_events": None, "kv_events_config": None}, ()),
        ({"kv_events_config": "no JSON"}, ()),
        ({"kv_events_config": json.dumps({"publisher": "null"})}, ()),
        (
            {"kv_events": DESCRIPTION | {"dp_size": 2}},
            (
                EventSource("tcp://host:5557", None, "kv"),
                EventSource("tcp://host:5558", None, "kv"),
            ),
        ),
        # Some releases have only the configuration.
        (
            {"kv_events_config": json.dumps(CONFIG), "dp_size": 2},
            (
                EventSource("tcp://host:7000", "tcp://host:7100"),
                EventSource("tcp://host:7001", "tcp://host:7101"),
            ),
        ),
        (
            {"kv_events": DESCRIPTION, "kv_events_config": json.dumps(CONFIG)},
            (EventSource("tcp://host:5557", "tcp://host:7100", "kv"),),
        ),
    ],
)
def test_event_sources_of_server_info(
    info: dict[str, Any], expected: tuple[EventSource, ...]
) -> None:
    assert parse_event_sources("http://host:30000", info) == expected


def test_events_of_an_engine_with_an_ipv6_address() -> None:
    sources = parse_event_sources("http://[::1]:30000", {"kv_events": DESCRIPTION})
    assert sources == (EventSource("tcp://[::1]:5557", None, "kv"),)


@pytest.mark.parametrize(
    "info",
    [
        {"kv_events_config": json.dumps({"publisher": "zmq", "endpoint": "ipc:///tmp/x"})},
        {"kv_events": {"topic": "kv"}},
        {"kv_events": 7},
    ],
)
def test_events_without_a_port_are_an_error_that_says_what_to_do(info: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"need a port.*--kv-events-config"):
        parse_event_sources("http://host:30000", info)
