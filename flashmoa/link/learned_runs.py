"""Learn the calls of a program from its runs (:class:`Program`, :class:`LearnedRun`).

Only the requests of earlier runs are known of a program. The last complete run is the example for
the next run: the same calls are expected in the same order, and the texts of this run replace the
example's texts in their messages. No I/O.
"""

from __future__ import annotations

import heapq
import logging
import math
from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from types import MappingProxyType
from typing import Any

from flashmoa._limits import MAX_CALLS_AT_ONCE, Recent
from flashmoa.link.calls import OutputLengths
from flashmoa.link.learned_fields import Changes, ChangingFields
from flashmoa.link.learned_texts import (
    Divergence,
    FindText,
    KnownTexts,
    Messages,
    SharedValues,
    find_changes,
    find_divergence,
    have_same_start,
    similarity,
)

logger = logging.getLogger(__name__)

# An answer that calls tools, as a message of OpenAI's API.
Message = Mapping[str, Any]

# Programs send these fields of an answer back. Other fields, such as reasoning, only some do.
_ALWAYS_SENT_BACK = {"role", "content", "tool_calls"}
# The most recorded calls whose messages are predicted, to find the call that a request is.
MAX_PREDICTED = 8
MAX_RECORDED_BYTES = 64_000_000
# The most programs that a process, or a folder, remembers.
MAX_PROGRAMS = 256
# The headers of requests of an earlier process, whose headers were not kept.
NOT_REMEMBERED: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """A request for an answer: what its prompt depends on, and its headers.

    Attributes:
        url: the root URL of its server.
        model: the model name.
        messages: as in OpenAI's API.
        fields: the other fields that shape its prompt; see ``flashmoa.engine.prompt_fields``.
        namespace: the namespace of its KV; see ``flashmoa.engine.kv_namespace``.
        headers: the client's headers, with its key; :data:`NOT_REMEMBERED` of an earlier process.
            Requests that differ only in them are equal.
        is_response: whether the request is for the Responses API; see :mod:`.response_items`.
        unknown: why its prompt cannot be known; ``None`` if it can.
    """

    url: str
    model: str
    messages: Messages
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])
    namespace: Mapping[str, str] = field(default_factory=dict[str, str])
    headers: Mapping[str, str] = field(default_factory=dict[str, str], compare=False, repr=False)
    is_response: bool = False
    unknown: str | None = None


@dataclass(eq=False, slots=True)
class RecordedCall:
    """A call of a run.

    Attributes:
        key: the call's name, unique in its run; the same call of another run has the same key.
        name: the name of the agent that made it.
        after: number of calls that were complete when it began.
        completed: number of calls that were complete before its answer; ``None`` before that.
        answer: the text of its answer; ``None`` if it has none yet, or calls tools.
        has_failed: whether the request failed.
        differed: where its messages differed from the prediction. Later text is not predicted.
        tool_answer: its answer, if that calls tools.
        follows: the key of the call whose tools' results it brings, if it brings any.
        result_differed: where the messages after that call's answer differed from the prediction.
        changes: the request's fields that have changed from run to run.
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
    changes: Changes = field(default_factory=dict[str, tuple[Any, int]])


class Program:
    """Remembers a program's earlier runs.

    Attributes:
        recorded: the calls of its last complete run by key, in the order of their beginning.
        output_lengths: the lengths of its calls' answers.
        sent_back: the extra fields of answers that it sends back with the results of tools.
        reported_declines: see :class:`~flashmoa.link.planner.LinkPlanner`.
    """

    def __init__(self) -> None:
        self.recorded: Mapping[str, RecordedCall] = {}
        self.output_lengths = OutputLengths()
        self.sent_back: set[str] = set()
        self.reported_declines: set[tuple[str, str]] = set()

    @property
    def example(self) -> dict[str, RecordedCall]:
        """The recorded calls that are expected again: the calls that did not fail.

        Failed calls are only recognised. If a server is down, for instance, each run asks it first;
        without them, such a request would be taken for the one that a second server answered.
        """
        return {key: call for key, call in self.recorded.items() if not call.has_failed}


@dataclass(slots=True)
class _RecordedAgent:
    """The calls of an earlier run that have one name.

    Attributes:
        left: the calls that a request of this run may still be, by key.
        began_alike: whether a call of this run began with the same words as its recorded call.
    """

    left: OrderedDict[str, RecordedCall] = field(default_factory=OrderedDict[str, RecordedCall])
    began_alike: bool = False


class LearnedRun:
    """One run of a program. The work for a call does not grow with the number of calls.

    The record does grow with it, up to a limit. A longer run is recorded up to there.

    Attributes:
        example: see :attr:`Program.example`.
        calls: the calls of this run by key.
        parallel: names with several calls at the same time, in the example or in this run.
        fields: knows which fields of calls change from run to run.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        # Another run that ends meanwhile replaces the program's example.
        self._earlier = program.recorded
        self.example = program.example
        self.calls: dict[str, RecordedCall] = {}
        self._completed = 0
        calls = self.example.values()
        self._known = KnownTexts(
            {call.key: call.answer for call in calls if call.answer is not None},
            {call.key: call_ids(call.tool_answer) for call in calls if call.tool_answer},
        )
        # The calls of the example that have not begun, in the order of their beginning there, and
        # the answered calls in the order of their answers.
        begun = sorted(calls, key=lambda call: call.after)
        answered = [(call.completed, call.key) for call in begun if call.completed is not None]
        self._missing = OrderedDict((call.key, call) for call in begun)
        self._unanswered = OrderedDict((key, completed) for completed, key in sorted(answered))
        self.parallel = _parallel_names(begun)
        self._running: dict[str, str] = {}  # The key of each name's last call, while it runs.
        self._agents: defaultdict[str, _RecordedAgent] = defaultdict(_RecordedAgent)
        # By key, the recorded calls with the results of a call's tools.
        self._following: defaultdict[str, list[str]] = defaultdict(list)
        for call in self._earlier.values():
            self._agents[call.name].left[call.key] = call
            if call.follows is not None and not call.has_failed:
                self._following[call.follows].append(call.key)
        # The key of the call after the tools of a call, by the key of the latter.
        self._next_keys: dict[str, str | None] = {}
        self._reserved = set[str]()  # These keys.
        self._numbers = Recent[str, int]()  # The last number that each name got.
        # The calls whose tools' results have not come, by the number of their messages and the ids.
        self._waiting: defaultdict[int, dict[tuple[Any, ...], list[RecordedCall]]]
        self._waiting = defaultdict(dict)
        self._failed: defaultdict[Hashable, list[RecordedCall]] = defaultdict(list)
        self._shared = SharedValues()
        self.fields = ChangingFields()
        for call in calls:
            self.fields.add(call.request.fields, call.changes)
        # Calls beyond the record's limit, whose answers or tools' results may still come.
        self._unrecorded: OrderedDict[str, RecordedCall] = OrderedDict()

    def begin(self, name: str, request: RecordedRequest) -> RecordedCall:
        """Record a call that is about to be sent, and return it."""
        failed = self._find_failed(name, request)
        if failed is not None:
            # The engine may have refused the key that it was sent with before.
            failed.request, failed.has_failed = self._share(request), False
            return failed
        before = self._find_followed(request)
        key = self.next_key(before) if before is not None else None
        if key is None:
            key = self._find_recorded(name, request) or self._new_key(name)
        # A call takes about 1,500 bytes beside its messages and its answer.
        is_recorded = self._shared.size + 1500 * len(self.calls) < MAX_RECORDED_BYTES
        request = self._share(request) if is_recorded else request
        call = RecordedCall(key, name, request, self._completed)
        if name in self._running:
            self.parallel.add(name)
        self._running[name] = key
        self._claim(key)
        self._missing.pop(key, None)
        self._unanswered.pop(key, None)
        if before is not None:
            call.follows = before.key
            self._learn_sent_back(before, request)
            self.fields.compare_order(before.request.fields, request.fields)
        if key in self.example:
            self._learn_differences(call, before)
        self.calls[key] = call
        if before is not None and before.key in self._unrecorded:
            self._forget(before)
        if not is_recorded:
            _warn_of_size()
            self._unrecorded[key] = call
            if len(self._unrecorded) > MAX_CALLS_AT_ONCE:
                self._forget(next(iter(self._unrecorded.values())))
        if key in self._earlier and not self._agents[name].began_alike:
            recorded = self._earlier[key].request.messages
            self._agents[name].began_alike = have_same_start(recorded, request.messages)
        return call

    def complete(
        self, call: RecordedCall, answer: str | None = None, tool_answer: Message | None = None
    ) -> None:
        """Note that the answer to a call is complete. Repeating this is harmless.

        Args:
            answer, tool_answer: see :class:`RecordedCall`.
        """
        if call.completed is not None:
            return
        self._note_end(call)
        is_recorded = call.key not in self._unrecorded
        if is_recorded:
            answer, tool_answer = map(self._shared, (answer, tool_answer))
        call.completed, call.answer, call.tool_answer = self._completed, answer, tool_answer
        self._completed += 1
        if tool_answer is not None:
            waiting = self._waiting[len(call.request.messages)]
            waiting.setdefault(_ids(tool_answer), []).append(call)
        elif not is_recorded:
            self._forget(call)

    def fail(self, call: RecordedCall) -> None:
        self._note_end(call)
        if call.key in self._unrecorded:
            self._forget(call)
        elif not call.has_failed:
            call.has_failed = True
            self._failed[_gist(call.name, call.request)].append(call)

    def _note_end(self, call: RecordedCall) -> None:
        if self._running.get(call.name) == call.key:
            del self._running[call.name]

    def next_key(self, call: RecordedCall) -> str | None:
        """Return the key of the call that brings the results of a call's tools.

        ``None`` if no such call is expected: in the example none came, say because of a handoff.
        """
        if call.key not in self._next_keys:
            earlier = self.example.get(call.key)
            if earlier is not None and earlier.tool_answer is not None:
                after = self._following.get(call.key, ())
                key = next((key for key in after if key not in self.calls), None)
            else:
                key = self._new_key(call.name)
            self._next_keys[call.key] = key
            if key is not None:
                self._reserved.add(key)
                self._claim(key)
        return self._next_keys[call.key]

    def after_tools(
        self, call: RecordedCall, find_text: FindText, missing: Sequence[str]
    ) -> Messages:
        """Return the likely messages of the call after the tools of a call.

        Args:
            find_text: see :meth:`predict`.
            missing: for each call of a tool, a text in place of an unknown result.
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
                self.predict(following.key, find_text)[start:],
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
            steps: how far to look: 1 for calls that need only calls that have begun, 2 for calls
                that may follow these, and so on.
        """
        found: dict[str, None] = {}
        coming = iter(self._missing.values())
        call = next(coming, None)
        for _ in range(steps):
            # A call needs the answers that were complete before it began.
            unanswered = (at for key, at in self._unanswered.items() if key not in found)
            first = next(unanswered, math.inf)
            while call is not None and call.after <= first and len(found) < MAX_CALLS_AT_ONCE:
                found[call.key] = None
                call = next(coming, None)
        return list(found)

    def predict(self, key: str, find_text: FindText) -> Messages:
        """Return the likely messages of a call of the example in this run.

        Args:
            find_text: returns the text that replaces the answer of the example's call with a key;
                ``None`` if it is not known.
        """
        reader = self._earlier[key]

        def find_readable(writer: str) -> str | None:
            # A text that was not complete when the request was sent is in it by chance.
            completed = self._earlier[writer].completed
            is_readable = completed is not None and completed < reader.after
            return find_text(writer) if is_readable else None

        return self._known.predict(reader.request.messages, find_readable, self._call_ids)

    def texts(self, others: Mapping[str, str] | None = None) -> FindText:
        """Return a function that finds the answers that are complete now, by key.

        Args:
            others: texts in place of other answers.
        """
        completed = self._completed

        def find_text(key: str) -> str | None:
            call = self.calls.get(key)
            if call is None or call.answer is None or (call.completed or 0) >= completed:
                return (others or {}).get(key)
            return call.answer

        return find_text

    def finish(self) -> None:
        """Make this run the example for later ones. Call this when the program has ended well."""
        if any(not call.has_failed for call in self.calls.values()):
            calls = self.calls.items()
            recorded = {key: call for key, call in calls if key not in self._unrecorded}
            self._program.recorded = recorded
            self._program.output_lengths.keep(recorded)

    def _find_failed(self, name: str, request: RecordedRequest) -> RecordedCall | None:
        failed = self._failed.get(_gist(name, request), [])
        call = next((call for call in failed if call.request == request), None)
        if call is not None:
            failed.remove(call)
        return call

    def _share(self, request: RecordedRequest) -> RecordedRequest:
        """Return an equal request that shares its values with earlier requests."""
        names = ("url", "model", "messages", "fields", "namespace", "headers")
        return replace(request, **{name: self._shared(getattr(request, name)) for name in names})

    def _forget(self, call: RecordedCall) -> None:
        """Forget a call that is not recorded."""
        del self.calls[call.key], self._unrecorded[call.key]
        self._reserved -= {call.key, self._next_keys.pop(call.key, None)}
        if call.tool_answer is not None:
            by_ids, ids = self._waiting[len(call.request.messages)], _ids(call.tool_answer)
            by_ids[ids] = [other for other in by_ids.get(ids, ()) if other is not call]
            if not by_ids[ids]:
                del by_ids[ids]

    def _find_followed(self, request: RecordedRequest) -> RecordedCall | None:
        """Return the call whose tools' results a request brings, if it brings any.

        Frameworks change the form of an answer, but keep the ids of its calls.
        """
        messages = request.messages
        for count, by_ids in self._waiting.items():
            calls = by_ids.get(_ids(messages[count]), []) if count < len(messages) else []
            for call in calls:
                if list(messages[:count]) == list(call.request.messages):
                    calls.remove(call)
                    return call
        return None

    def _claim(self, key: str) -> None:
        """Note that no other request can be the recorded call with this key."""
        if key in self._earlier:
            self._agents[self._earlier[key].name].left.pop(key, None)

    def _find_recorded(self, name: str, request: RecordedRequest) -> str | None:
        """Return the key of the recorded call that a request is most like.

        Among calls with equally like messages, a call to the same server and model comes first,
        then the call that began first.
        """
        if name not in self._agents:
            return None
        agent = self._agents[name]
        # A program may ask thousands of times in the same place.
        candidates = list(islice(agent.left.values(), 32))
        if not candidates:
            return None
        texts, first = self.texts(), candidates[0]
        if len(candidates) == 1:
            # If the first messages differ from the first word on, although another call of the name
            # began as recorded, the request is a new call.
            is_new = agent.began_alike and not have_same_start(
                self.predict(first.key, texts), request.messages
            )
            return None if is_new else first.key
        # Most programs ask the same again in the same order.
        if replace(first.request, messages=self.predict(first.key, texts)) == request:
            return first.key

        def likeness(call: RecordedCall, messages: Messages) -> tuple[Any, ...]:
            earlier = call.request
            return (
                similarity(messages, request.messages),
                earlier.url == request.url,
                earlier.model == request.model,
                earlier.fields == request.fields,
            )

        if len(candidates) > MAX_PREDICTED:
            candidates = heapq.nlargest(
                MAX_PREDICTED, candidates, key=lambda call: likeness(call, call.request.messages)
            )
        return max(candidates, key=lambda call: likeness(call, self.predict(call.key, texts))).key

    def _learn_sent_back(self, before: RecordedCall, request: RecordedRequest) -> None:
        assert before.tool_answer is not None
        message = request.messages[len(before.request.messages)]
        for field_name in before.tool_answer.keys() - _ALWAYS_SENT_BACK:
            if message.get(field_name) == before.tool_answer[field_name]:
                self._program.sent_back.add(field_name)
            else:
                self._program.sent_back.discard(field_name)

    def _learn_differences(self, call: RecordedCall, before: RecordedCall | None) -> None:
        """Learn how a call differs from the example's call."""
        messages, example = call.request.messages, self.example[call.key]
        fields = example.request.fields
        call.changes = self.fields.compare(fields, example.changes, call.request.fields)
        predicted = self.predict(call.key, self.texts())
        call.differed = find_divergence(predicted, messages)
        if before is not None and example.follows == before.key:
            start = len(self.example[before.key].request.messages) + 1
            results = messages[len(before.request.messages) + 1 :]
            call.result_differed = find_divergence(predicted[start:], results)
        self._known.learn(find_changes(example.request.messages, predicted, messages))

    def _call_ids(self, key: str) -> Sequence[str]:
        call = self.calls.get(key)
        return call_ids(call.tool_answer) if call is not None and call.tool_answer else ()

    def _new_key(self, name: str) -> str:
        number = self._numbers.get(name, 0) + 1
        key = f"{name} ({number})" if number > 1 else name
        while key in self._earlier or key in self.calls or key in self._reserved:
            number += 1
            key = f"{name} ({number})"
        self._numbers[name] = number
        return key


def _parallel_names(calls: Sequence[RecordedCall]) -> set[str]:
    names = set[str]()
    ends: dict[str, float] = {}
    for call in calls:
        if call.after <= ends.get(call.name, -1):
            names.add(call.name)
        end = math.inf if call.completed is None else call.completed
        ends[call.name] = max(end, ends.get(call.name, -1))
    return names


@cache
def _warn_of_size() -> None:
    logger.warning(
        "a run has sent so much that only its beginning is learned from: more than %d MB. Begin a "
        "run for each time that your program runs, for instance for each request to a server",
        MAX_RECORDED_BYTES // 1_000_000,
    )


def _gist(name: str, request: RecordedRequest) -> Hashable:
    """Return a key that equal requests have in common, and few others."""
    messages = request.messages
    content = messages[-1].get("content") if messages else None
    return name, len(messages), content if isinstance(content, str) else None


def _ids(message: Message) -> tuple[str, ...]:
    return tuple(str(call.get("id")) for call in message.get("tool_calls") or ())


def call_ids(answer: Message) -> list[str]:
    return [str(call["id"]) for call in answer["tool_calls"]]


def called_tools(answer: Message) -> list[str]:
    """Return the names of the tools that an answer calls, in the order of the calls."""
    return [_called(call)["name"] for call in answer["tool_calls"]]


def _called(call: Message) -> Message:
    """Return the function of a call, or the custom tool, with its arguments."""
    return call.get("custom") or call["function"]


def likely_results(
    answer: Message,
    earlier: Message,
    earlier_results: Messages,
    predicted: Messages,
    differed: Divergence | None,
) -> list[Message]:
    """Return the first predicted messages after an answer that are likely to come.

    A tool that is called with the same arguments is likely to return the same result. A result that
    contained texts of the earlier run is likely to contain the texts of this run.

    Args:
        answer, earlier: the answers of this run, and of the earlier run.
        earlier_results: the messages that followed the earlier answer.
        predicted: the same messages, as predicted for this run.
        differed: where they differed from the prediction before; later messages are not likely.
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
