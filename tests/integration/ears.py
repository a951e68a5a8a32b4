"""Hear on a channel what calls write."""

import json
import secrets
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
import httpx

from tests.integration.support import Body


class Ear:
    """A client's channel, with the lines of each call."""

    def __init__(self) -> None:
        self.channel = secrets.token_hex(8)
        self.heard: defaultdict[str, list[Body]] = defaultdict(list)
        self.listens = anyio.Event()
        self._ended: defaultdict[str, anyio.Event] = defaultdict(anyio.Event)

    def name_call(self) -> str:
        return self.channel + secrets.token_hex(8)

    async def listen(self, http: httpx.AsyncClient) -> None:
        headers = {"X-FlashMoA-Channel": self.channel}
        async with http.stream("GET", "/flashmoa/calls", headers=headers) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if not line:
                    continue
                event = json.loads(line)
                if event.get("listening"):
                    self.listens.set()
                    continue
                call = event.pop("call")
                self.heard[call].append(event)
                if "end" in event:
                    self._ended[call].set()

    async def until_end(self, call: str) -> list[Body]:
        with anyio.fail_after(30):
            await self._ended[call].wait()
        return self.heard[call]


def text_of(events: list[Body], kind: str = "content") -> str:
    text = ""
    for event in events:
        if kind in event:
            assert event["at"] == len(text)
            text += event[kind]
    return text


@asynccontextmanager
async def listening(http: httpx.AsyncClient) -> AsyncGenerator[Ear]:
    ear = Ear()
    async with anyio.create_task_group() as group:
        group.start_soon(ear.listen, http)
        await ear.listens.wait()
        yield ear
        group.cancel_scope.cancel()


async def in_flight(http: httpx.AsyncClient) -> dict[str, int]:
    return (await http.get("/flashmoa/info")).json()["in_flight"]
