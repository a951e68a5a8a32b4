"""Expect agents' requests after their tools (:class:`RunningTools`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import anyio

from flashmoa._concurrency import TaskHost
from flashmoa._limits import MAX_CALLS_AT_ONCE
from flashmoa.link.expected import ExpectedRequest, Renderable, Turn
from flashmoa.link.prompt import Placeholders, Prompt

# The request after a faster tool comes before its stream would be of any use.
FASTEST_TOOL_SECONDS = 0.02
# A slower tool may run for ever.
SLOWEST_TOOL_SECONDS = 60.0

# Returns the request after tools, given the text of each tool's result by the tool's name.
AfterTools = Callable[[Mapping[str, str]], Awaitable[Renderable]]


@dataclass(eq=False, slots=True)
class RequestAfterTools:
    """The next request of an agent whose tools are running.

    Its prompt is certain up to the first missing result. The prompt has the results in the order of
    the calls, in whatever order the tools end.

    Attributes:
        agent: the agent that sends it.
        tools: a name for each call of a tool, in the order of the calls. The names are slots of the
            prompt, so they must differ from each other and from agents' names.
        requests: functions that return the possible requests, given the results by these names.
        placeholders: provides the texts in place of missing results.
        results: the results so far, by the tools' names.
        over: set when the request comes, or is not expected any more.
        is_given_up: whether it will not come.
    """

    agent: str
    tools: Sequence[str]
    requests: Sequence[AfterTools]
    placeholders: Placeholders = field(default_factory=Placeholders)
    results: dict[str, str] = field(default_factory=dict[str, str])
    over: anyio.Event = field(default_factory=anyio.Event)
    is_given_up: bool = False

    async def expect(self, turn: Turn) -> ExpectedRequest:
        """Return the request as expected until the next result.

        Results are rendered with the whole prompt, since a chat template may quote or escape them.
        """
        results = dict(self.results)
        texts = {
            tool: results[tool] if tool in results else self.placeholders.padded(tool)
            for tool in self.tools
        }

        def holds(_prompt: Prompt, now: Turn | None) -> bool:
            return now is None or len(self.results) == len(results)

        requests = [await request(texts) for request in self.requests]
        return ExpectedRequest(turn, requests, self.placeholders, holds)


class RunningTools(dict[str, RequestAfterTools]):
    """The requests that agents send when their tools have run, by agent.

    Args:
        host: runs a task for each request.
        plan: brings the links up to date with the requests.
        given_up: called with a request that will not come, and the reason for which its link ends.
    """

    def __init__(
        self,
        host: TaskHost,
        plan: Callable[[], None],
        given_up: Callable[[RequestAfterTools, str], None],
    ) -> None:
        super().__init__()
        self._host, self._plan, self._given_up = host, plan, given_up

    def add(self, request: RequestAfterTools) -> None:
        """Expect a request until it comes, is given up, or its tools have run for a minute."""

        async def expect_for_a_while() -> None:
            with anyio.move_on_after(FASTEST_TOOL_SECONDS):
                await request.over.wait()
                return
            self._plan()
            with anyio.move_on_after(SLOWEST_TOOL_SECONDS):
                await request.over.wait()
            self.give_up(request, "unused")

        self.end(request.agent)  # An earlier request would have come by now.
        # Programs that only want a tool's arguments never send the request.
        if len(self) >= MAX_CALLS_AT_ONCE:
            self.give_up(next(iter(self.values())), "unused")
        self[request.agent] = request
        self._host.start(expect_for_a_while)

    def add_result(self, request: RequestAfterTools, tool: str, text: str) -> None:
        """Note the result of a tool. It is prefilled once all earlier results have come."""
        request.results[tool] = text
        if self.get(request.agent) is not request:
            return
        if len(request.results) == len(request.tools):
            # The request comes at once, with the last result.
            self.end(request.agent)
        else:
            self._plan()

    def give_up(self, request: RequestAfterTools, reason: str = "abort") -> None:
        """Stop expecting a request, which will not come; its link ends for this reason."""
        if self.get(request.agent) is request:
            request.is_given_up = True
            self.end(request.agent)
            self._given_up(request, reason)

    def end(self, agent: str) -> None:
        """Stop expecting an agent's request after tools, if there is one: it comes now."""
        if request := self.pop(agent, None):
            request.over.set()


def name_calls(tools: Sequence[str]) -> list[str]:
    """Return a name for each call of a tool, such as ``look()``, which no agent has."""
    names: list[str] = []
    for tool in tools:
        earlier = sum(each == tool for each in tools[: len(names)])
        names.append(f"{tool}() {earlier + 1}" if earlier else f"{tool}()")
    return names
