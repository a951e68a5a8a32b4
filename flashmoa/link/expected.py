"""Say which requests will probably come (:class:`ExpectedRequest`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from flashmoa.engine import EngineClient, kv_namespace, prompt_fields
from flashmoa.errors import MalformedRequest, PromptTooLarge
from flashmoa.link.prompt import NotForecastable, Placeholders, Prompt

# Names of agents that write at the same time, and finish in any order.
Writers = frozenset[str]


@dataclass(frozen=True, slots=True)
class Turn:
    """A call that may come.

    Attributes:
        agent: the agent that makes it.
        after: the agents that write before it, in order; the first ones are writing now.
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
        """Possible orders of the writers' ends. Each writer of a step comes first in some order."""
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
    def namespace(self) -> Mapping[str, str]: ...

    async def render(self) -> str:
        """Return the text of its prompt. Raises: EngineError if the engine cannot render it."""
        ...


def _always(_prompt: Prompt, _now: Turn | None) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class ExpectedRequest:
    """A request that will probably come.

    Attributes:
        turn: the agent that sends it, and the agents that write before it.
        requests: the possible requests, all to one engine; a single request if it is certain. Only
            the common beginning of their prompts is prefilled.
        placeholders: provides the texts in these requests in place of unfinished texts.
        holds: returns whether a link to this request is still right, given the link's prompt so far
            and the turn as it is expected now, or ``None`` if the agent is calling its model. By
            default it is.
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
        body: its body, where ``extra_body`` may still be a separate field.
    """

    engine: EngineClient
    body: Mapping[str, Any]

    @property
    def fields(self) -> dict[str, Any]:
        return prompt_fields(self.sent)

    @property
    def namespace(self) -> dict[str, str]:
        return kv_namespace(self.sent)

    async def render(self) -> str:
        return await self.engine.render(self.body["messages"], **self.fields)

    @property
    def sent(self) -> Mapping[str, Any]:
        """The body that the server receives: OpenAI's client adds the extra body to it."""
        return {**self.body, **(self.body.get("extra_body") or {})}


class RequestCaptured(BaseException):
    """Ends a dry run at its first request. The dry run's copy of the client raises this.

    It is no ``Exception``, as frameworks log exceptions of their clients, and try again.
    """

    def __init__(self, request: ChatRequest) -> None:
        super().__init__("a dry run ends here")
        self.request = request


async def first_request(dry_run: Awaitable[object]) -> ChatRequest:
    """Return the request at the end of a dry run. Raises: NotForecastable if there is none."""
    try:
        await dry_run
    except RequestCaptured as captured:
        return captured.request
    except BaseExceptionGroup as group:  # The agent's own code has a task group.
        captured_all, others = group.split(RequestCaptured)
        if others is not None:
            raise others from None
        error: BaseException | None = captured_all
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, RequestCaptured):
            return error.request
    raise NotForecastable("its dry run ended without a call of its model")
