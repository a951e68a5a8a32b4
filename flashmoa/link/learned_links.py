"""Plan the links of a run by its program's last run (:class:`LearnedLinkPlanner`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

from flashmoa._limits import MAX_CALLS_AT_ONCE, Recent
from flashmoa.engine import EngineClient
from flashmoa.link.after_tools import RequestAfterTools, name_calls
from flashmoa.link.calls import CallRequest, CallResult
from flashmoa.link.expected import ExpectedRequest, Turn
from flashmoa.link.learned_runs import (
    LearnedRun,
    Message,
    Program,
    RecordedRequest,
    called_tools,
)
from flashmoa.link.learned_texts import Messages, end_at
from flashmoa.link.options import LinkSettings
from flashmoa.link.planner import LinkedCall, LinkPlanner
from flashmoa.link.prompt import NotForecastable, Placeholders, Prompt
from flashmoa.link.response_items import write_messages
from flashmoa.observe import Listener

# Pairs of a request of the example, and the request that this run sent in its place. If the example
# has no such request, both are the run's. Only the last pair is kept for each server, headers and
# namespace.
SentInPlace = Sequence[tuple[RecordedRequest, RecordedRequest]]
# The key of a call may have a number after its agent's name.
_NUMBER = re.compile(r" \(\d+\)\Z")
_FIRST_RUN = (
    "the first run of a program is only watched; later runs of it in this process are linked, and "
    "in later processes with run(remember=FOLDER)"
)


class LearnedLinkPlanner(LinkPlanner):
    """Plans the links of a program's run. Its agents are the keys of the run's calls.

    Args:
        find_engine: returns a client of the engine that a request of the example was sent to, given
            that request and the requests of this run. Raises NotForecastable if this run may send
            it differently.
        find_client: returns a client that hears the answer to a request of this run; ``None`` if
            the answer is not to be heard.
    """

    def __init__(
        self,
        program: Program,
        listener: Listener,
        find_engine: Callable[[RecordedRequest, SentInPlace], EngineClient],
        settings: LinkSettings,
        find_client: Callable[[RecordedRequest], EngineClient | None] = lambda _: None,
    ) -> None:
        super().__init__(listener, settings)
        self._find_client = find_client
        # The runs of a program report a reason once, and expect the lengths of earlier answers.
        self.reported_declines = program.reported_declines
        self.output_lengths = program.output_lengths
        self._learned = LearnedRun(program)
        self._find_engine = find_engine
        self._placeholders = Placeholders(self._learned.example)
        self._padded = {each: self._placeholders.padded(each) for each in self._learned.example}
        self._is_running = True
        # See SentInPlace; headers may differ in each request.
        self._sent: Recent[Hashable, tuple[RecordedRequest, RecordedRequest]]
        self._sent = Recent(limit=MAX_CALLS_AT_ONCE)
        self._given_up: set[str] = set()  # Calls after tools that will not come.

    @property
    def is_running(self) -> bool:
        return self._is_running

    def observe(self, name: str, request: RecordedRequest, hold_reason: str | None) -> LinkedCall:
        """Note that a request is about to be sent. Return its observer.

        Args:
            name: the name of the agent that sends it.
            hold_reason: see :class:`CallRequest`.
        """
        recorded = self._learned.begin(name, request)
        self._note_sent(self._learned.example.get(recorded.key, recorded).request, request)
        known = recorded.key in self._learned.example or recorded.follows is not None
        client = self._find_client(request)
        engine_request = CallRequest(request.url, request.model, hold_reason, client)
        return self.begin(recorded.key, engine_request, linkable=known)

    def why_unplanned(self, agent: str) -> str:
        if not self._learned.example:
            return _FIRST_RUN
        if agent not in self._learned.example:
            return "the run before had no such call"
        return super().why_unplanned(agent)

    def call_answered(self, call: LinkedCall, result: CallResult) -> None:
        text = result.text if result.is_forwarded else None
        if (recorded := self._learned.calls.get(call.agent)) is not None:
            self._learned.complete(recorded, text, cast("Message | None", result.tool_calls))
        super().call_answered(call, result)
        # No other call has its key.
        self.links.forget(call.agent)
        if not self.streams:
            self.drop_call(call)

    def call_failed(self, call: LinkedCall) -> None:
        if (recorded := self._learned.calls.get(call.agent)) is not None:
            self._learned.fail(recorded)
        super().call_failed(call)

    async def close(self, *, learn: bool) -> None:
        """End the run and every link, and wait until the engines have their KV back.

        Args:
            learn: whether the run has ended well, so that later ones are likely to be like it.
        """
        self._is_running = False
        if learn:
            self._learned.finish()
        self.end_all("unused")
        await self.host.close()

    async def upcoming(self, caller: str) -> Sequence[Turn]:
        # Calls two steps away are prefilled while others write. A call further away would keep its
        # KV for long, and is less likely to come.
        upcoming = self._learned.upcoming(steps=2)
        return [Turn(key) for key in upcoming if key not in self._given_up]

    def given_up(self, request: RequestAfterTools, reason: str) -> None:
        super().given_up(request, reason)
        if request.agent in self._learned.example:
            self._given_up.add(request.agent)

    def agent_of(self, name: str) -> str:
        return _NUMBER.sub("", name)

    def session_of(self, agent: str) -> str:
        name = self.agent_of(agent)
        return agent if name in self._learned.parallel else name

    def call_held_back(self, call: LinkedCall, reason: str) -> None:
        super().call_held_back(call, reason)
        # The next call of its agent has another key.
        self.drop_call(call)

    async def expect(self, turn: Turn) -> ExpectedRequest:
        """Return the request that a call of the example will send in this run."""
        earlier = self._learned.example[turn.agent]
        engine = self._find_engine(earlier.request, [*self._sent.values()])
        written = self._learned.texts(self._padded)
        messages = self._learned.predict(turn.agent, written)

        def holds(_: Prompt, now: Turn | None) -> bool:
            if now is None:
                return True
            # While tools run, their results tell more about the request after them.
            return (
                turn.agent not in self.tools
                and self._learned.predict(turn.agent, written) == messages
            )

        variants = [messages]
        if earlier.differed is not None:
            variants = [end_at(messages, earlier.differed, other) for other in ("0", "1")]
        first, *others = self._forms(earlier.request, turn.agent)
        namespace = self._namespace(earlier.request)
        requests = [LearnedRequest(engine, namespace, first, each) for each in variants]
        requests += [LearnedRequest(engine, namespace, each, variants[0]) for each in others]
        return ExpectedRequest(turn, requests, self._placeholders, holds)

    def request_after_tools(self, agent: str, answer: object) -> RequestAfterTools | None:
        """Return the agent's request after its tools, unless the example has no such call.

        A result that may differ from the example is a slot that gets no text, since only the
        request shows the result.
        """
        call = self._learned.calls.get(agent)
        key = self._learned.next_key(call) if call is not None else None
        if call is None or key is None or call.tool_answer is None:
            return None
        example = self._learned.example.get(key)
        following = example.request if example is not None else _after_first_choice(call.request)
        engine = self._find_engine(following, [*self._sent.values()])
        namespace = self._namespace(following)
        tools = name_calls(called_tools(call.tool_answer))

        async def request(form: RecordedRequest, texts: Mapping[str, str]) -> LearnedRequest:
            written = self._learned.texts(self._padded)
            missing = [texts[tool] for tool in tools]
            messages = self._learned.after_tools(call, written, missing)
            return LearnedRequest(engine, namespace, form, messages)

        requests = [partial(request, form) for form in self._forms(following, key)]
        return RequestAfterTools(key, tools, requests, self._placeholders)

    def _forms(self, request: RecordedRequest, key: str) -> list[RecordedRequest]:
        """Return forms of a call's expected request that differ in the fields that change."""
        earlier = self._learned.example.get(key)
        forms = self._learned.fields.forms(request.fields, earlier.changes if earlier else {})
        return [replace(request, fields=fields) for fields in forms]

    def _note_sent(self, before: RecordedRequest, now: RecordedRequest) -> None:
        """Note that a request was sent in place of a request of the example."""
        like = tuple(
            (each.url, frozenset(each.headers.items()), frozenset(each.namespace.items()))
            for each in (before, now)
        )
        self._sent[like] = before, now

    def _namespace(self, request: RecordedRequest) -> Mapping[str, str]:
        """Return this run's namespace in place of the namespace of a request of the example."""
        pairs = reversed(self._sent.values())
        found = (now.namespace for before, now in pairs if before.namespace == request.namespace)
        return next(found, request.namespace)


def _after_first_choice(request: RecordedRequest) -> RecordedRequest:
    """Return the request without the field that forces a call of a tool.

    Programs do not send it again with the result, where it would force another call.
    """
    fields = {name: value for name, value in request.fields.items() if name != "tool_choice"}
    return replace(request, fields=fields)


@dataclass(frozen=True, slots=True)
class LearnedRequest:
    """A request that a run is likely to send.

    Attributes:
        like: a request with its model and fields.
    """

    engine: EngineClient
    namespace: Mapping[str, str]
    like: RecordedRequest
    messages: Messages

    async def render(self) -> str:
        like = self.like
        if like.unknown is not None:
            raise NotForecastable(like.unknown)
        if like.is_response:
            body = {**write_messages(self.messages), **like.fields, "model": like.model}
            return await self.engine.render_response(body)
        return await self.engine.render(self.messages, **like.fields)
