"""Forecast what agents will ask their models (:class:`Forecast`), also when their tools have run
(:class:`RequestAfterTools`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import anyio

from flashmoa.engine import EngineClient, MalformedRequest, PromptTooLarge
from flashmoa.linking.failure_policy import OnFailure
from flashmoa.linking.placeholders import NotForecastable, Placeholders
from flashmoa.linking.prompt import Prompt

# Names of agents that write at the same time, and so finish in any order.
Step = frozenset[str]


@dataclass(frozen=True, slots=True)
class Turn:
    """A call that may come.

    Attributes:
        agent: the agent that makes it.
        after: the agents that write before it, in order, beginning with those that are writing now.
        sure: whether it is certain to come, unless the team ends before.
    """

    agent: str
    after: tuple[Step, ...] = ()
    sure: bool = True

    @property
    def writers(self) -> tuple[str, ...]:
        return tuple(name for step in self.after for name in sorted(step))


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
        on_failure: what happens to a link to the prompt when a text in it fails.
        namespace: the namespace of the request's KV; by default the engine client's.
        holds: returns whether a link by this forecast is still right, given its prompt as written
            so far, and the turn as it is expected now; ``None`` in place of a turn if the agent is
            calling its model. By default it is.
    """

    turn: Turn
    engine: EngineClient
    placeholders: Placeholders
    renders: Sequence[Callable[[], Awaitable[str]]]
    on_failure: OnFailure = "abort"
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


class RequestAfterTools:
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
        on_failure, namespace: see :class:`Forecast`.
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
        self.results: dict[str, str] = {}
        self.dropped = anyio.Event()
        self.is_given_up = False
        self._engine = engine
        self._render = render
        self._on_failure: OnFailure = on_failure
        self._namespace = namespace
        self._writers = tuple(writers)

    @property
    def agent(self) -> str:
        return self.turn.agent

    @property
    def is_complete(self) -> bool:
        """Whether every result is there, so that the request itself follows at once."""
        return len(self.results) == len(self.tools)

    async def forecast(self, turn: Turn) -> Forecast:
        """Return what is known of the request now; the forecast holds until the next result.

        Results are rendered with the whole prompt, since a chat template may quote or escape them.
        """
        results = dict(self.results)
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
            holds=lambda _, now: now is None or len(self.results) == len(results),
        )


def name_calls(tools: Sequence[str]) -> list[str]:
    """Return a different name for each call of a tool, which no agent has: ``look()``."""
    names: list[str] = []
    for tool in tools:
        earlier = sum(each == tool for each in tools[: len(names)])
        names.append(f"{tool}() {earlier + 1}" if earlier else f"{tool}()")
    return names
