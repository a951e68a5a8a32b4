"""Forecast what agents will ask their models (:class:`Forecast`), also when their tools have run
(:class:`RequestAfterTools`), from requests that dry runs of the agents have captured; hold what is
asked after tools while they run (:class:`HeldRequests`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio

from flashmoa._concurrency import TaskHost
from flashmoa.engine import EngineClient, kv_namespace, prompt_fields
from flashmoa.errors import MalformedRequest, PromptTooLarge
from flashmoa.link.prompt import NotForecastable, Placeholders, Prompt

# The request after a tool that takes less time comes before its stream would be of any use.
_AT_ONCE_SECONDS = 0.02
# A tool that takes longer may take for ever.
_LONGEST_TOOL_SECONDS = 60.0
# An engine has no more streams. Programs that only want a tool's arguments send no more requests.
_MOST_HELD = 256

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
        """Orders in which the writers may finish, such that each of a step is its first in one."""
        widest = max((len(step) for step in self.after), default=1)
        return [self._order(first) for first in range(widest)]

    def _order(self, first: int) -> list[str]:
        order: list[str] = []
        for step in map(sorted, self.after):
            start = first % len(step)
            order += step[start:] + step[:start]
        return order


def _always(_prompt: Prompt, _now: Turn | None) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Forecast:
    """What the agent of a turn will ask its model.

    Attributes:
        engine: the engine that its request will be sent to.
        placeholders: the placeholders for texts in the prompt that are still being written.
        renders: functions that render the prompts which the request may have, a single one if that
            is certain. They raise EngineError.
        namespace: the namespace of the request's KV; by default the engine client's.
        holds: returns whether a link by this forecast is still right, given its prompt as written
            so far, and the turn as it is expected now; ``None`` in place of a turn if the agent is
            calling its model. By default it is.
    """

    turn: Turn
    engine: EngineClient
    placeholders: Placeholders
    renders: Sequence[Callable[[], Awaitable[str]]]
    namespace: Mapping[str, str] | None = None
    holds: Callable[[Prompt, Turn | None], bool] = _always

    async def prompt(self) -> Prompt:
        """Build the prompt.

        Raises:
            NotForecastable: if it cannot be rendered ahead, for instance because of images.
            EngineError: if the engine cannot render it for another reason.
        """
        try:
            texts = [await render() for render in self.renders]
        except (MalformedRequest, PromptTooLarge) as refusal:
            raise NotForecastable(f"its prompt cannot be rendered ahead: {refusal}") from refusal
        return self.placeholders.build_prompt(*texts)


@dataclass(eq=False, slots=True)
class RequestAfterTools:
    """The next request of an agent whose tools are running.

    Its prompt is certain up to the first result that is missing: the results follow each other in
    the order of the calls, in whatever order the tools end.

    Attributes:
        engine: the engine that the request will be sent to.
        tools: a name for each call of a tool, in the order of the calls. The names are slots of the
            prompt, so they must differ from each other and from agents' names.
        render: renders the prompt of the request, given the tools' results by these names. It may
            raise EngineError.
        namespace: see :class:`Forecast`.
        placeholders: those of the agents whose texts results may hold.
        other_renders: render other prompts that the request may have instead, in the same way.
        results: the results so far, by the tools' names.
        dropped: is set when the request is not held any more.
        is_given_up: whether that is because it will not come.
    """

    agent: str
    engine: EngineClient
    tools: Sequence[str]
    render: Callable[[Mapping[str, str]], Awaitable[str]]
    namespace: Mapping[str, str] | None = None
    placeholders: Placeholders = field(default_factory=Placeholders)
    other_renders: Sequence[Callable[[Mapping[str, str]], Awaitable[str]]] = ()
    results: dict[str, str] = field(default_factory=dict[str, str])
    dropped: anyio.Event = field(default_factory=anyio.Event)
    is_given_up: bool = False

    @property
    def turn(self) -> Turn:
        return Turn(self.agent)

    @property
    def is_complete(self) -> bool:
        """Whether every result is there, so that the request itself follows at once."""
        return len(self.results) == len(self.tools)

    async def forecast(self, turn: Turn) -> Forecast:
        """Return what is known of the request now; the forecast holds until the next result.

        Results are rendered with the whole prompt, since a chat template may quote or escape them.
        """
        results = dict(self.results)
        texts = {
            tool: results[tool] if tool in results else self.placeholders.padded(tool)
            for tool in self.tools
        }
        return Forecast(
            turn,
            self.engine,
            self.placeholders,
            [partial(render, texts) for render in (self.render, *self.other_renders)],
            namespace=self.namespace,
            holds=lambda _, now: now is None or len(self.results) == len(results),
        )


class HeldRequests(dict[str, RequestAfterTools]):
    """Holds the requests of agents whose tools run, by agent, while they are linked.

    Args:
        host: runs a task for each of them.
        plan: has what is known of them linked.
        given_up: hears of one that will not come, and why its link ends.
    """

    def __init__(
        self,
        host: TaskHost,
        plan: Callable[[], None],
        given_up: Callable[[RequestAfterTools, str], None],
    ) -> None:
        super().__init__()
        self._host, self._plan, self._given_up = host, plan, given_up

    def hold(self, request: RequestAfterTools) -> None:
        """Hold a request until it comes, is given up, or its team ends, for a minute at most."""

        async def link_for_a_while() -> None:
            await anyio.sleep(_AT_ONCE_SECONDS)
            if self.holds(request):
                self._plan()
                with anyio.move_on_after(_LONGEST_TOOL_SECONDS):
                    await request.dropped.wait()
                self.give_up(request, "unused")

        if len(self) >= _MOST_HELD:
            self.give_up(next(iter(self.values())), "unused")
        self[request.agent] = request
        self._host.start(link_for_a_while)

    def holds(self, request: RequestAfterTools) -> bool:
        return self.get(request.agent) is request

    def add_result(self, request: RequestAfterTools, tool: str, text: str) -> None:
        """Note the result of a tool; it is prefilled once those before it are there."""
        request.results[tool] = text
        if self.holds(request):
            if request.is_complete:
                # The request comes at once, and brings the last result along.
                self.let_come(request.agent)
            else:
                self._plan()

    def give_up(self, request: RequestAfterTools, reason: str = "abort") -> None:
        """Hold a request no longer, since it will not come; its link ends for this reason."""
        if self.holds(request):
            request.is_given_up = True
            self.let_come(request.agent)
            self._given_up(request, reason)

    def let_come(self, agent: str) -> None:
        """Hold the request of an agent no longer, if there is one: it comes, or its team ends."""
        if request := self.pop(agent, None):
            request.dropped.set()


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
        """The namespace of its KV."""
        return kv_namespace(self.sent)

    async def render(self) -> str:
        """Return the text of its prompt, as its engine's chat template renders it.

        Raises: EngineError if the engine cannot be reached or refuses.
        """
        return await self.engine.render(self.body["messages"], **self.fields)

    @property
    def sent(self) -> Mapping[str, Any]:
        """What the server receives: OpenAI's client adds the extra body to the body."""
        return {**self.body, **(self.body.get("extra_body") or {})}


class RequestCaptured(Exception):
    """Ends a dry run at its first request: is raised by the copy of the client that it uses."""

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


def name_calls(tools: Sequence[str]) -> list[str]:
    """Return a different name for each call of a tool, which no agent has: ``look()``."""
    names: list[str] = []
    for tool in tools:
        earlier = sum(each == tool for each in tools[: len(names)])
        names.append(f"{tool}() {earlier + 1}" if earlier else f"{tool}()")
    return names
