"""Learn the calls of a program from its runs (:class:`Program`, :class:`LearnedRun`), and plan the
links of its next run by them (:class:`LearnedLinkPlanner`).

Nothing is known of a program but the requests that its runs send. The last complete run is the
example for the next one: the same calls are expected again, in the same order, with messages in
which the texts of this run take the place of those of the example. A planner does all I/O.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import ChainMap
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

from flashmoa.engine import EngineClient
from flashmoa.linking.calls import CallRequest, CallResult, OutputLengths
from flashmoa.linking.forecasts import Forecast, RequestAfterTools, Turn, name_calls
from flashmoa.linking.learned_texts import (
    Divergence,
    KnownTexts,
    Messages,
    end_at,
    find_changes,
    find_divergence,
    have_same_start,
    similarity,
)
from flashmoa.linking.options import LinkSettings
from flashmoa.linking.planner import LinkedCall, LinkPlanner
from flashmoa.linking.prompt import Placeholders, Prompt
from flashmoa.observe import Listener

# What is known beforehand of a call two steps away is prefilled while others write. A call further
# away would hold its KV for long, and is less likely to come.
_STEPS = 2
# An answer that calls tools, as a message of OpenAI's API.
Message = Mapping[str, Any]

# Whatever else an answer has, say its reasoning, only some programs send back.
_ALWAYS_SENT_BACK = {"role", "content", "tool_calls"}
# Of the calls that a request may be, only those are predicted that are the most like it as the
# example had them.
_MOST_PREDICTED = 8
# Of the calls that a request may be, no more than these first ones are compared with it, since a
# program may ask thousands of times in the same place.
_MOST_COMPARED = 32


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """A request for a chat completion, as far as its prompt depends on it, and its headers.

    Attributes:
        url: the root URL of its server.
        model: the model name.
        messages: as in OpenAI's API.
        fields: the other ones that shape its prompt; see ``flashmoa.engine.prompt_fields``.
        namespace: the namespace of its KV; see ``flashmoa.engine.kv_namespace``.
        headers: the headers by which its client asks for anything, with its key. A request that is
            sent again with other ones is the same.
    """

    url: str
    model: str
    messages: Messages
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])
    namespace: Mapping[str, str] = field(default_factory=dict[str, str])
    headers: Mapping[str, str] = field(default_factory=dict[str, str], compare=False, repr=False)


# The last requests of a run with the same headers and namespaces, each after the one of the example
# that it stands for, or after itself.
SentInPlace = Sequence[tuple[RecordedRequest, RecordedRequest]]


@dataclass(eq=False, slots=True)
class RecordedCall:
    """A call of a run.

    Attributes:
        key: the call's name, unique in its run; the same call of another run has the same.
        name: the name of the agent that made it.
        after: how many calls were complete when it began.
        completed: how many were complete before its own answer was; ``None`` before that.
        answer: the text of its answer; ``None`` before that, and if it is a tool call.
        has_failed: whether the request failed.
        differed: where its messages were not as an earlier run had them, if they were not. What
            comes after that is not predicted.
        tool_answer: its answer, if that calls tools.
        follows: the key of the call whose tools' results it brings, if it brings any.
        result_differed: where what follows that call's answer was not as predicted.
    """

    key: str
    name: str
    request: RecordedRequest
    after: int
    completed: int | None = None
    answer: str | None = None
    has_failed: bool = False
    differed: Divergence | None = None
    tool_answer: Message | None = None
    follows: str | None = None
    result_differed: Divergence | None = None


class Program:
    """Holds what is known of a program from its earlier runs.

    Attributes:
        recorded: the calls of its last complete run by key, in the order in which they began.
        output_lengths: those of the answers of its calls.
        sent_back: the extra fields of answers that it sends back with the results of tools.
        reported_declines: see :class:`~flashmoa.linking.planner.LinkPlanner`.
    """

    def __init__(self) -> None:
        self.recorded: Mapping[str, RecordedCall] = {}
        self.output_lengths = OutputLengths()
        self.sent_back: set[str] = set()
        self.reported_declines: set[tuple[str, str]] = set()

    @property
    def example(self) -> dict[str, RecordedCall]:
        """Return the recorded calls that are expected again: those that did not fail.

        The others are only recognised. If a server is down, for instance, each run asks it first;
        without them, such a request would be taken for the one that a second server answered.
        """
        return {key: call for key, call in self.recorded.items() if not call.has_failed}


class LearnedRun:
    """One run of a program."""

    def __init__(self, program: Program) -> None:
        self._program = program
        # Runs at the same time may replace the program's example.
        self._earlier = program.recorded
        self.example = program.example
        self.calls: dict[str, RecordedCall] = {}
        self._complete = 0  # How many of them are.
        calls = self.example.values()
        self._known = KnownTexts(
            {call.key: call.answer for call in calls if call.answer is not None},
            {call.key: call_ids(call.tool_answer) for call in calls if call.tool_answer},
        )
        # By the key of a call whose tools run, the key of the call after them.
        self._next_keys: dict[str, str | None] = {}

    def begin(self, name: str, request: RecordedRequest) -> RecordedCall:
        """Record a call that is about to be sent, and return it."""
        failed = self._find_failed(name, request)
        if failed is not None:
            # The engine may have refused the key that it was sent with before.
            failed.request, failed.has_failed = request, False
            return failed
        before = self._find_followed(request)
        key = self.next_key(before) if before is not None else None
        if key is None:
            key = self._likest(name, request) or self._new_key(name)
        call = RecordedCall(key, name, request, self._complete)
        if before is not None:
            call.follows = before.key
            self._learn_form(before, request)
        if key in self.example:
            self._learn_differences(call, before)
        self.calls[key] = call
        return call

    def complete(self, call: RecordedCall) -> None:
        """Note that the answer to a call is complete. Repeating this is harmless."""
        if call.completed is None:
            call.completed = self._complete
            self._complete += 1

    def next_key(self, call: RecordedCall) -> str | None:
        """Return the key of the call that brings the results of a call's tools.

        ``None`` if none is expected: none came in the example, say because of a handoff.
        """
        if call.key not in self._next_keys:
            earlier = self.example.get(call.key)
            if earlier is not None and earlier.tool_answer is not None:
                after = [each.key for each in self.example.values() if each.follows == call.key]
                key = next((key for key in after if key not in self.calls), None)
            else:
                key = self._new_key(call.name)
            self._next_keys[call.key] = key
        return self._next_keys[call.key]

    def after_tools(
        self, call: RecordedCall, texts: Mapping[str, str], missing: Sequence[str]
    ) -> Messages:
        """Return the messages of the call after the tools of a call, as they are likely to be.

        Args:
            texts: see :meth:`predict`.
            missing: for each call of a tool, what stands for a result that is not known.
        """
        assert call.tool_answer is not None
        kept = _ALWAYS_SENT_BACK | self._program.sent_back
        answer = {name: value for name, value in call.tool_answer.items() if name in kept}
        likely: list[Message] = []
        earlier = self.example.get(call.key)
        following = self.example.get(self.next_key(call) or "")
        if earlier is not None and earlier.tool_answer is not None and following is not None:
            start = len(earlier.request.messages) + 1
            likely = likely_results(
                answer,
                earlier.tool_answer,
                following.request.messages[start:],
                self.predict(following.key, texts)[start:],
                following.result_differed,
            )
        results = [
            {"role": "tool", "tool_call_id": id_, "content": text}
            for id_, text in zip(call_ids(answer), missing, strict=True)
        ]
        return [*call.request.messages, answer, *likely, *results[len(likely) :]]

    def upcoming(self, steps: int) -> list[str]:
        """Return the keys of the calls of the example that may come next, in its order.

        Args:
            steps: how far to look: 1 for calls that only need such as have begun, 2 for those that
                may follow these, and so on.
        """
        begun = set(self.calls)
        found: set[str] = set()
        for _ in range(steps):
            begun |= found
            missing = [call for call in self.example.values() if call.key not in begun]
            # A call needs those that were complete before it began.
            completed = [call.completed for call in missing if call.completed is not None]
            first = min(completed, default=math.inf)
            found |= {call.key for call in missing if call.after <= first}
        return [key for key in self.example if key in found]

    def predict(self, key: str, texts: Mapping[str, str]) -> Messages:
        """Return the messages of a call of the example as they are likely to be in this run.

        Args:
            texts: by key, what stands for the text of each call of the example.
        """
        return self._known.predict(self._earlier[key].request.messages, texts, self._call_ids)

    def texts(self) -> dict[str, str]:
        """Return the answers of this run that are complete, by key."""
        return {call.key: call.answer for call in self.calls.values() if call.answer is not None}

    def finish(self) -> None:
        """Make this run the example for later ones. Call this when the program has ended well."""
        if any(not call.has_failed for call in self.calls.values()):
            self._program.recorded = dict(self.calls)

    def _find_failed(self, name: str, request: RecordedRequest) -> RecordedCall | None:
        """Return the failed call that a request repeats, if it repeats one."""
        failed = (call for call in self.calls.values() if call.has_failed and call.name == name)
        return next((call for call in failed if call.request == request), None)

    def _find_followed(self, request: RecordedRequest) -> RecordedCall | None:
        """Return the call whose tools' results a request brings, if it brings any."""
        followed = {call.follows for call in self.calls.values()}
        waiting = (call for call in self.calls.values() if call.key not in followed)
        return next((call for call in waiting if _follows(request.messages, call)), None)

    def _likest(self, name: str, request: RecordedRequest) -> str | None:
        """Return the key of the earlier call that a request is most like.

        Of those with messages equally like its own, one to the same server and model, if there is
        one, and of these the first; of very many, the one that already was the most like it in the
        example.
        """
        taken = {*self.calls, *self._next_keys.values()}
        left = (
            call for call in self._earlier.values() if call.name == name and call.key not in taken
        )
        candidates = list(itertools.islice(left, _MOST_COMPARED))
        if not candidates or (len(candidates) == 1 and self._is_new(name, request, candidates[0])):
            return None
        if len(candidates) == 1:
            return candidates[0].key

        def likeness(call: RecordedCall, messages: Messages) -> tuple[Any, ...]:
            earlier = call.request
            return (
                similarity(messages, request.messages),
                earlier.url == request.url,
                earlier.model == request.model,
                earlier.fields == request.fields,
            )

        if len(candidates) > _MOST_PREDICTED:
            candidates = heapq.nlargest(
                _MOST_PREDICTED, candidates, key=lambda call: likeness(call, call.request.messages)
            )
        texts = self.texts()
        return max(candidates, key=lambda call: likeness(call, self.predict(call.key, texts))).key

    def _is_new(self, name: str, request: RecordedRequest, candidate: RecordedCall) -> bool:
        """Return whether a request is none of the earlier ones, of which one is left.

        It is if its first message has nothing in common with that one's, while that of another
        call by this name does with its own.
        """
        twins = [
            (self._earlier[call.key].request.messages, call.request.messages)
            for call in self.calls.values()
            if call.name == name and call.key in self._earlier
        ]
        if not any(have_same_start(*twin) for twin in twins):
            return False
        predicted = self.predict(candidate.key, self.texts())
        return not have_same_start(predicted, request.messages)

    def _learn_form(self, before: RecordedCall, request: RecordedRequest) -> None:
        """Learn which extra fields of an answer the program sends back."""
        assert before.tool_answer is not None
        message = request.messages[len(before.request.messages)]
        for field_name in before.tool_answer.keys() - _ALWAYS_SENT_BACK:
            if message.get(field_name) == before.tool_answer[field_name]:
                self._program.sent_back.add(field_name)
            else:
                self._program.sent_back.discard(field_name)

    def _learn_differences(self, call: RecordedCall, before: RecordedCall | None) -> None:
        """Learn in what a call differs from the example's."""
        messages, twin = call.request.messages, self.example[call.key]
        predicted = self.predict(call.key, self.texts())
        call.differed = find_divergence(predicted, messages)
        if before is not None and twin.follows == before.key:
            start = len(self.example[before.key].request.messages) + 1
            results = messages[len(before.request.messages) + 1 :]
            call.result_differed = find_divergence(predicted[start:], results)
        changes = find_changes(twin.request.messages, predicted, messages)
        self._known.learn(changes)

    def _call_ids(self, key: str) -> Sequence[str]:
        """Return the ids of the calls of tools in the answer to a call of this run."""
        call = self.calls.get(key)
        return call_ids(call.tool_answer) if call is not None and call.tool_answer else ()

    def _new_key(self, name: str) -> str:
        taken = {*self.calls, *self._earlier, *self._next_keys.values()}
        keys = (f"{name} ({number})" for number in itertools.count(2))
        return next(key for key in itertools.chain([name], keys) if key not in taken)


def call_ids(answer: Message) -> list[str]:
    """Return the ids of an answer's calls, in their order."""
    return [call["id"] for call in answer["tool_calls"]]


def called_tools(answer: Message) -> list[str]:
    """Return the names of the tools that an answer calls, in the order of the calls."""
    return [_called(call)["name"] for call in answer["tool_calls"]]


def _called(call: Message) -> Message:
    """Return the function of a call, or the custom tool, with its arguments."""
    return call.get("custom") or call["function"]


def _follows(messages: Messages, call: RecordedCall) -> bool:
    """Return whether messages continue those of a call, after the tools of its answer.

    Frameworks write the answer down in their own ways, but keep the ids of its calls.
    """
    asked, answer = call.request.messages, call.tool_answer
    count = len(asked)
    if answer is None or len(messages) <= count or list(messages[:count]) != list(asked):
        return False
    ids = [call.get("id") for call in messages[count].get("tool_calls") or ()]
    return ids == call_ids(answer)


def likely_results(
    answer: Message,
    earlier: Message,
    earlier_results: Messages,
    predicted: Messages,
    differed: Divergence | None,
) -> list[Message]:
    """Return the first of the messages after an answer that are likely to be as predicted.

    A result is likely to be the same if its tool is called with the same arguments, and to hold the
    texts of this run if it held those of the earlier one.

    Args:
        answer, earlier: the answers of this run, and of the earlier one.
        earlier_results: the messages that followed the earlier answer.
        predicted: these, as predicted for this run.
        differed: where they were not as predicted before; what comes after that is not likely.
    """
    calls, earlier_calls = answer["tool_calls"], earlier["tool_calls"]
    if called_tools(answer) != called_tools(earlier):
        return []
    likely: list[Message] = []
    for index, (before, message) in enumerate(zip(earlier_results, predicted, strict=True)):
        if differed is not None and index >= differed.message:
            break
        if index < len(calls):
            is_same_call = _called(calls[index]) == _called(earlier_calls[index])
            if not is_same_call and before.get("content") == message.get("content"):
                break
        likely.append(message)
    return likely


class LearnedLinkPlanner(LinkPlanner):
    """Plans the links of one run of a program; its agents are the run's calls, by their keys.

    Args:
        find_engine: returns a client of the engine that a request of the example was sent to, given
            that request and those of this run. Raises NotForecastable if this run may send it in
            another way.
    """

    def __init__(
        self,
        program: Program,
        listener: Listener,
        find_engine: Callable[[RecordedRequest, SentInPlace], EngineClient],
        settings: LinkSettings,
    ) -> None:
        super().__init__(listener, settings)
        # All runs of a program report a reason once, and expect answers as long as in earlier runs.
        self.reported_declines = program.reported_declines
        self.output_lengths = program.output_lengths
        self._learned = LearnedRun(program)
        self._find_engine = find_engine
        self._placeholders = Placeholders(self._learned.example)
        self._padded = {each: self._placeholders.padded(each) for each in self._learned.example}
        self._is_running = True
        # By what SentInPlace goes by.
        self._sent: dict[Hashable, tuple[RecordedRequest, RecordedRequest]] = {}
        # Requests after tools, of which some are not held any more.
        self._after_tools: list[RequestAfterTools] = []

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
        engine_request = CallRequest(request.url, request.model, hold_reason)
        return self.begin(recorded.key, engine_request, linkable=known)

    def call_answered(self, call: LinkedCall, result: CallResult) -> None:
        recorded = self._learned.calls[call.agent]
        self._learned.complete(recorded)
        recorded.answer = result.text if result.is_forwarded else None
        recorded.tool_answer = cast("Message | None", result.tool_calls)
        super().call_answered(call, result)

    def call_failed(self, call: LinkedCall) -> None:
        self._learned.calls[call.agent].has_failed = True
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
        given_up = {each.agent for each in self._after_tools if each.is_given_up}
        return [Turn(key) for key in self._learned.upcoming(_STEPS) if key not in given_up]

    async def forecast(self, turn: Turn) -> Forecast:
        """Return what a call of the example will send in this run."""
        earlier = self._learned.example[turn.agent]
        engine = self._find_engine(earlier.request, [*self._sent.values()])
        written = self._learned.texts()
        messages = self._predict(turn.agent, written)

        def holds(_: Prompt, now: Turn | None) -> bool:
            if now is None:
                return True
            # While its tools run, more is known of a request that is held.
            is_held = turn.agent in self._held
            return not is_held and self._predict(turn.agent, written) == messages

        variants = [messages]
        if earlier.differed is not None:
            variants = [end_at(messages, earlier.differed, other) for other in ("0", "1")]
        return Forecast(
            turn,
            engine,
            self._placeholders,
            [partial(_render, engine, earlier.request, each) for each in variants],
            namespace=self._namespace(earlier.request),
            holds=holds,
        )

    def request_after_tools(self, agent: str, answer: object) -> RequestAfterTools | None:
        """Return what an agent asks when its tools have run, unless the example has no such call.

        Results that are not likely to be those of the example are slots that get no text, since
        they are seen only in the request.
        """
        call = self._learned.calls[agent]
        key = self._learned.next_key(call)
        if key is None or call.tool_answer is None:
            return None
        example = self._learned.example.get(key)
        following = example.request if example is not None else _after_first_choice(call.request)
        engine = self._find_engine(following, [*self._sent.values()])
        tools = name_calls(called_tools(call.tool_answer))

        async def render(texts: Mapping[str, str]) -> str:
            written = {**texts, **self._learned.texts()}
            missing = [texts[tool] for tool in tools]
            messages = self._learned.after_tools(call, written, missing)
            return await _render(engine, following, messages)

        request = RequestAfterTools(
            key,
            engine,
            tools,
            render,
            namespace=self._namespace(following),
            writers=self._learned.example,
        )
        self._after_tools.append(request)
        return request

    def _note_sent(self, before: RecordedRequest, now: RecordedRequest) -> None:
        """Note that a request was sent in place of another one, as the last of its like."""
        like = tuple(
            (each.url, frozenset(each.headers.items()), frozenset(each.namespace.items()))
            for each in (before, now)
        )
        # A run may send thousands of requests, which are looked through for each link.
        self._sent.pop(like, None)
        self._sent[like] = before, now

    def _namespace(self, request: RecordedRequest) -> Mapping[str, str]:
        """Return the namespace that this run uses in place of that of a request of the example."""
        pairs = reversed(self._sent.values())
        found = (now.namespace for before, now in pairs if before.namespace == request.namespace)
        return next(found, request.namespace)

    def _predict(self, key: str, written: dict[str, str]) -> Messages:
        """Return the messages of a call, with placeholders for all texts but those given."""
        return self._learned.predict(key, ChainMap(written, self._padded))


def _after_first_choice(request: RecordedRequest) -> RecordedRequest:
    """Return a request with which a model may choose its tools freely.

    What forces a first call of a tool is not sent again with its result, which would force another.
    """
    fields = {name: value for name, value in request.fields.items() if name != "tool_choice"}
    return replace(request, fields=fields)


async def _render(engine: EngineClient, request: RecordedRequest, messages: Messages) -> str:
    return await engine.render(messages, **request.fields)
