"""Test how a client finds the linked teams that observe its calls."""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator

import pytest

from flashmoa.autogen import FlashMoAChatCompletionClient
from flashmoa.linking.calls import CallObserver, CallRequest, LinkedTeam


class Team(LinkedTeam):
    def observe(self, request: CallRequest) -> CallObserver | None:
        return None

    async def close(self) -> None: ...


@pytest.fixture
def frequent_switches() -> Generator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("frequent_switches")
def test_calls_find_teams_while_other_threads_link_and_forget_theirs() -> None:
    client = FlashMoAChatCompletionClient(model="gpt-4o", base_url="http://engine")
    kept = [Team() for _ in range(100)]
    for team in kept:
        client.add_team(team)
    ended = threading.Event()

    def link() -> None:
        while not ended.is_set():
            teams = [Team() for _ in range(20)]
            for team in teams:
                client.add_team(team)
            for team in teams[:10]:
                client.remove_team(team)

    other = threading.Thread(target=link)
    other.start()
    try:
        request = CallRequest("http://engine", "m", None)
        found = [client._ask_teams(request) for _ in range(3000)]
    finally:
        ended.set()
        other.join()
    assert found == [[]] * 3000
    assert set(map(id, client.linked_teams)) >= set(map(id, kept))
