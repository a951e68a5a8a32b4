"""What a chat client is asked, also where nothing is to be sent."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agent_framework import Message

from flashmoa.engine import kv_namespace

if TYPE_CHECKING:
    from flashmoa.agent_framework._client import FlashMoAChatClient

_listening: ContextVar[bool] = ContextVar("flashmoa_listening", default=False)


@dataclass(frozen=True, slots=True)
class Request:
    """A chat completion; ``body``: as the client would send it."""

    client: FlashMoAChatClient
    body: Mapping[str, Any]

    async def render(self) -> str:
        """The text of its prompt, by its engine's chat template. Raises: EngineError."""
        extra_body: Mapping[str, Any] = self.body.get("extra_body") or {}
        return await self.client.engine.render(
            self.body["messages"],
            tools=self.body.get("tools"),
            template_args=extra_body.get("chat_template_kwargs"),
        )

    @property
    def namespace(self) -> dict[str, str]:
        """Of its KV."""
        extra_body: Mapping[str, Any] = self.body.get("extra_body") or {}
        return kv_namespace({"model": self.body.get("model"), **extra_body})


class Captured(Exception):
    """Carries a request out of a dry run."""

    def __init__(self, request: Request) -> None:
        super().__init__("a dry run ends here")
        self.request = request


@contextmanager
def listening() -> Generator[None]:
    """While it lasts, a client that is asked here raises :class:`Captured` instead."""
    token = _listening.set(True)
    try:
        yield
    finally:
        _listening.reset(token)


def capture(
    client: FlashMoAChatClient, messages: Sequence[Message], options: Mapping[str, Any]
) -> None:
    """Raises: Captured in a dry run."""
    if _listening.get():
        raise Captured(Request(client, client._prepare_options(messages, options)))
