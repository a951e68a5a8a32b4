"""Hold the next requests of agents whose tools are running (:class:`OwnTurn`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

import anyio

from flashmoa._concurrency import Work
from flashmoa.engine import EngineClient
from flashmoa.linking.failure_policy import OnFailure
from flashmoa.linking.placeholders import Placeholders
from flashmoa.linking.planned_links import Forecast, Turn

# The request after a tool that takes less time comes before its stream would be of any use.
_AT_ONCE_SECONDS = 0.02
_LONGEST_SECONDS = 60.0


class OwnTurn:
    """The next request of an agent whose tools are running.

    Its prompt is certain up to the first result that is missing: the results follow each other in
    the order of the calls, in whatever order the tools end.

    Args:
        agent: the agent's name.
        engine: the engine that the request will be sent to.
        tools: a name for each call of a tool, in the order of the calls. The names are slots of the
            prompt, so they must differ from each other and from agents' names.
        render: renders the prompt of the request, given the tools' results by these names. It may
            raise EngineError.
        on_failure: see :class:`Forecast`.
        namespace: see :class:`Forecast`.
        writers: the agents whose texts results may hold; ``render`` is given what stands for these
            texts, too, by the agents' names.

    Attributes:
        dropped: is set when the request is not held any more.
        is_given_up: whether that is because it will not come.
    """

    def __init__(  # noqa: PLR0913 - the last three have a default
        self,
        agent: str,
        engine: EngineClient,
        tools: Sequence[str],
        render: Callable[[Mapping[str, str]], Awaitable[str]],
        *,
        on_failure: OnFailure = "abort",
        namespace: Mapping[str, str] | None = None,
        writers: Iterable[str] = (),
    ) -> None:
        self.turn = Turn(agent)
        self.tools = tuple(tools)
        self._engine = engine
        self._render = render
        self._on_failure: OnFailure = on_failure
        self._namespace = namespace
        self._writers = tuple(writers)
        self._results: dict[str, str] = {}
        self.dropped = anyio.Event()
        self.is_given_up = False

    @property
    def agent(self) -> str:
        return self.turn.agent

    @property
    def is_complete(self) -> bool:
        """Whether every result is there, so that the request itself follows at once."""
        return len(self._results) == len(self.tools)

    def add_result(self, tool: str, text: str) -> None:
        """Note the result of a tool, as it will be in the request."""
        self._results[tool] = text

    async def forecast(self, turn: Turn) -> Forecast:
        """Return what is known of the request now; the forecast holds until the next result.

        Results are rendered with the whole prompt, since a chat template may quote or escape them.
        """
        results = dict(self._results)
        missing = [tool for tool in self.tools if tool not in results]
        placeholders = Placeholders([*missing, *self._writers])
        texts = {
            name: results[name] if name in results else placeholders.padded(name)
            for name in (*self.tools, *self._writers)
        }
        return Forecast(
            turn,
            self._engine,
            placeholders,
            [lambda: self._render(texts)],
            on_failure=self._on_failure,
            namespace=self._namespace,
            holds=lambda: len(self._results) == len(results),
        )


def name_calls(tools: Sequence[str]) -> list[str]:
    """Return a different name for each call of a tool, which no agent has: ``look()``."""
    names: list[str] = []
    for tool in tools:
        earlier = sum(each == tool for each in tools[: len(names)])
        names.append(f"{tool}() {earlier + 1}" if earlier else f"{tool}()")
    return names


class OwnTurns:
    """Holds the next requests of agents whose tools are running; each agent has at most one.

    A request is held, with a link to its prompt, until it comes (:meth:`drop`), is given up, or its
    team ends (:meth:`clear`), and for a minute at most: a tool that takes longer may take for ever.

    Args:
        start: runs work in the background.
        plan: brings links up to date in the background.
        end_link: ends the link to an agent; its second argument is the reason.
    """

    def __init__(
        self,
        start: Callable[[Work], None],
        plan: Callable[[], None],
        end_link: Callable[[str, str], None],
    ) -> None:
        self._start = start
        self._plan = plan
        self._end_link = end_link
        self._turns: dict[str, OwnTurn] = {}

    def __contains__(self, turn: OwnTurn) -> bool:
        return self._turns.get(turn.agent) is turn

    def all(self) -> list[OwnTurn]:
        """Return every request that is held."""
        return list(self._turns.values())

    def agents(self) -> set[str]:
        """Return the agents whose requests are held."""
        return set(self._turns)

    def hold(self, turn: OwnTurn) -> None:
        """Link an agent's next request, as far as it is certain, unless its tools end at once."""

        async def link_for_a_while() -> None:
            await anyio.sleep(_AT_ONCE_SECONDS)
            if turn in self:
                self._plan()
                with anyio.move_on_after(_LONGEST_SECONDS):
                    await turn.dropped.wait()
                self.give_up(turn, "unused")

        self._turns[turn.agent] = turn
        self._start(link_for_a_while)

    def add_result(self, turn: OwnTurn, tool: str, text: str) -> None:
        """Note the result of a tool; it is prefilled once those before it are there."""
        turn.add_result(tool, text)
        if turn not in self:
            return
        if turn.is_complete:
            # The request comes at once, and brings the last result along.
            self.drop(turn.agent)
        else:
            self._plan()

    def give_up(self, turn: OwnTurn, reason: str = "abort") -> None:
        """Hold a request no longer, since it will not come; end its link for this reason."""
        if turn in self:
            turn.is_given_up = True
            self.drop(turn.agent)
            self._end_link(turn.agent, reason)

    def drop(self, agent: str) -> None:
        """Hold the request of an agent no longer, since it comes; its link stays."""
        if turn := self._turns.pop(agent, None):
            turn.dropped.set()

    def clear(self) -> None:
        """Hold no request any longer."""
        for agent in self.agents():
            self.drop(agent)
