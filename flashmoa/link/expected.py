"""Say which requests will probably come (:class:`ExpectedRequest`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from flashmoa.engine import EngineClient, kv_namespace, prompt_fields
from flashmoa.errors import MalformedRequest, PromptTooLarge
from flashmoa.link.prompt import NotForecastable, Placeholders, Prompt

# Names of agents that write at the same time, and so finish in any order.
Writers = frozenset[str]


@dataclass(frozen=True, slots=True)
class Turn:
    """A call that may come.

    Attributes:
        agent: the agent that makes it.
        after: the agents that write before it, in order, beginning with those that are writing now.
        sure: whether it is certain to come, unless the team ends before.
    """

    agent: str
    after: tuple[Writers, ...] = ()
    sure: bool = True

    @property
    def writers(self) -> tuple[str, ...]:
        return tuple(name for step in self.after for name in sorted(step))

    @property
    def orders(self) -> list[list[str]]:
        """Orders in which the writers may finish: each writer of a step is its first in one."""
        widest = max((len(step) for step in self.after), default=1)
        return [self._order(first) for first in range(widest)]

    def _order(self, first: int) -> list[str]:
        order: list[str] = []
        for step in map(sorted, self.after):
            start = first % len(step)
            order += step[start:] + step[:start]
        return order


class Renderable(Protocol):
    """A request whose prompt its engine can render before the request is sent."""

    @property
    def engine(self) -> EngineClient: ...

    @property
    def namespace(self) -> Mapping[str, str]:
        """The namespace of its KV."""
        ...

    async def render(self) -> str:
        """Return the text of its prompt. Raises: EngineError if the engine cannot render it."""
        ...


def _always(_prompt: Prompt, _now: Turn | None) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class ExpectedRequest:
    """A request that will probably come, as far as it is known.

    Attributes:
        turn: who sends it, and after whom.
        requests: the requests that it may be, all to one engine; a single one if that is certain.
            Only what their prompts have in common is prefilled.
        placeholders: stand in these requests for texts that are still being written.
        holds: returns whether a link to this request is still right, given the link's prompt so far
            and the turn as it is expected now; ``None`` in place of a turn if the agent is calling
            its model. By default it is.
    """

    turn: Turn
    requests: Sequence[Renderable]
    placeholders: Placeholders
    holds: Callable[[Prompt, Turn | None], bool] = _always

    @property
    def agent(self) -> str:
        return self.turn.agent

    @property
    def engine(self) -> EngineClient:
        return self.requests[0].engine

    @property
    def namespace(self) -> Mapping[str, str]:
        return self.requests[0].namespace

    async def prompt(self) -> Prompt:
        """Build the prompt, with slots for texts that are still being written.

        Raises:
            NotForecastable: if it cannot be rendered ahead, for instance because of images.
            EngineError: if the engine cannot render it for another reason.
        """
        try:
            texts = [await request.render() for request in self.requests]
        except (MalformedRequest, PromptTooLarge) as refusal:
            raise NotForecastable(f"its prompt cannot be rendered ahead: {refusal}") from refusal
        return self.placeholders.build_prompt(*texts)


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat completion that a framework's client would send.

    Attributes:
        body: its body, in which ``extra_body`` may still be a field of its own.
    """

    engine: EngineClient
    body: Mapping[str, Any]

    @property
    def fields(self) -> dict[str, Any]:
        """The fields that shape its prompt, without the messages."""
        return prompt_fields(self.sent)

    @property
    def namespace(self) -> dict[str, str]:
        return kv_namespace(self.sent)

    async def render(self) -> str:
        return await self.engine.render(self.body["messages"], **self.fields)

    @property
    def sent(self) -> Mapping[str, Any]:
        """What the server receives: OpenAI's client adds the extra body to the body."""
        return {**self.body, **(self.body.get("extra_body") or {})}


class RequestCaptured(Exception):
    """Ends a dry run at its first request. The copy of the client that it uses raises this."""

    def __init__(self, request: ChatRequest) -> None:
        super().__init__("a dry run ends here")
        self.request = request


async def first_request(dry_run: Awaitable[object]) -> ChatRequest:
    """Return the request that a dry run ends at.

    Raises: NotForecastable if it ends without one.
    """
    try:
        await dry_run
    except RequestCaptured as captured:
        return captured.request
    raise NotForecastable("its dry run ended without a call of its model")
