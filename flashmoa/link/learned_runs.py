"""Learn the calls of a program from its runs (:class:`Program`, :class:`LearnedRun`).

Nothing is known of a program but the requests that its runs send. The last complete run is the
example for the next one: the same calls are expected again, in the same order, with messages in
which the texts of this run take the place of those of the example. No I/O.
"""

from __future__ import annotations

import heapq
import logging
import math
from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from typing import Any

from flashmoa.link.calls import OutputLengths
from flashmoa.link.learned_fields import Changes, ChangingFields
from flashmoa.link.learned_texts import (
    Divergence,
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

# Whatever else an answer has, say its reasoning, only some programs send back.
_ALWAYS_SENT_BACK = {"role", "content", "tool_calls"}
# Of the calls that a request may be, only those are predicted that are the most like it as the
# example had them.
_MOST_PREDICTED = 8
# No more calls are expected at once: an engine holds 256 prompt streams.
_MOST_UPCOMING = 256
# Of the calls that a request may be, no more than these first ones are compared with it, since a
# program may ask thousands of times in the same place.
_MOST_COMPARED = 32
# What a run may record; about the bytes of a call itself, beside its messages and answer; and how
# many calls are remembered after that, since their answers or the results of tools may still come.
_MOST_BYTES = 64_000_000
_BYTES_OF_CALL = 1500
_MOST_PASSING = 256
# The numbers of so many names are remembered.
_MOST_NAMES = 4096


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """A request for an answer, as far as its prompt depends on it, and its headers.

    Attributes:
        url: the root URL of its server.
        model: the model name.
        messages: as in OpenAI's API.
        fields: the other ones that shape its prompt; see ``flashmoa.engine.prompt_fields``.
        namespace: the namespace of its KV; see ``flashmoa.engine.kv_namespace``.
        headers: the headers by which its client asks for anything, with its key. A request that is
            sent again with other ones is the same.
        is_response: whether it is one of the Responses API; see :mod:`.response_items`.
        unknown: why its prompt cannot be known, if it cannot.
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
    """Holds what is known of a program from its earlier runs.

    Attributes:
        recorded: the calls of its last complete run by key, in the order in which they began.
        output_lengths: those of the answers of its calls.
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
        """Return the recorded calls that are expected again: those that did not fail.

        The others are only recognised. If a server is down, for instance, each run asks it first;
        without them, such a request would be taken for the one that a second server answered.
        """
        return {key: call for key, call in self.recorded.items() if not call.has_failed}


class LearnedRun:
    """One run of a program. The work for a call does not grow with the number of calls.

    What is recorded of it does, up to a limit; of a longer run, the beginning is an example.

    Attributes:
        parallel: the names of which calls were at the same time, in the example or in this run.
        fields: knows which fields of calls change from run to run.
    """

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
        # The calls of the example that have not begun, in the order in which they began there, and
        # those of them that were answered, in the order of that.
        begun = sorted(calls, key=lambda call: call.after)
        answered = [(call.completed, call) for call in begun if call.completed is not None]
        self._missing = OrderedDict((call.key, call) for call in begun)
        self._unanswered = OrderedDict((call.key, at) for at, call in sorted(answered, key=_first))
        self.parallel: set[str] = set()
        ends: dict[str, float] = {}
        for call in begun:
            if call.after <= ends.get(call.name, -1):
                self.parallel.add(call.name)
            end = math.inf if call.completed is None else call.completed
            ends[call.name] = max(end, ends.get(call.name, -1))
        # By name, the key of the last call, as long as it runs.
        self._running: dict[str, str] = {}
        # By name, the earlier calls that a request of that name may be.
        self._left: defaultdict[str, OrderedDict[str, RecordedCall]] = defaultdict(OrderedDict)
        # By the key of a call, those of the calls of the example with its tools' results.
        self._following: defaultdict[str, list[str]] = defaultdict(list)
        for call in self._earlier.values():
            self._left[call.name][call.key] = call
            if call.follows is not None and not call.has_failed:
                self._following[call.follows].append(call.key)
        # By the key of a call whose tools run, the key of the call after them.
        self._next_keys: dict[str, str | None] = {}
        self._taken = set(self._earlier)
        self._numbers: dict[str, int] = {}  # The last one that each name got.
        # The calls whose tools' results have not come, by the number of their messages and the ids.
        self._waiting: defaultdict[int, dict[tuple[Any, ...], list[RecordedCall]]]
        self._waiting = defaultdict(dict)
        self._failed: defaultdict[Hashable, list[RecordedCall]] = defaultdict(list)
        # Names of which a call began as that of the earlier run did.
        self._alike: set[str] = set()
        self._shared = SharedValues()
        self.fields = ChangingFields()
        for call in calls:
            self.fields.add(call.request.fields, call.changes)
        # The last calls that are not recorded.
        self._passing: dict[str, RecordedCall] = {}

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
            key = self._likest(name, request) or self._new_key(name)
        is_recorded = self._shared.size + len(self.calls) * _BYTES_OF_CALL < _MOST_BYTES
        call = RecordedCall(
            key, name, self._share(request) if is_recorded else request, self._complete
        )
        if name in self._running:
            self.parallel.add(name)
        self._running[name] = key
        self._take(key)
        self._missing.pop(key, None)
        self._unanswered.pop(key, None)
        if before is not None:
            call.follows = before.key
            self._learn_form(before, request)
            self.fields.compare_order(before.request.fields, request.fields)
        if key in self.example:
            self._learn_differences(call, before)
        self.calls[key] = call
        if before is not None and before.key in self._passing:
            self._forget(before)
        if not is_recorded:
            _warn_of_size()
            self._passing[key] = call
            if len(self._passing) > _MOST_PASSING:
                self._forget(next(iter(self._passing.values())))
        if key in self._earlier and name not in self._alike:
            twin = self._earlier[key].request
            if have_same_start(twin.messages, request.messages):
                self._alike.add(name)
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
        is_passing = call.key in self._passing
        if not is_passing:
            answer, tool_answer = map(self._shared, (answer, tool_answer))
        call.completed, call.answer, call.tool_answer = self._complete, answer, tool_answer
        self._complete += 1
        if tool_answer is not None:
            waiting = self._waiting[len(call.request.messages)]
            waiting.setdefault(_ids(tool_answer), []).append(call)
        elif is_passing:
            self._forget(call)

    def fail(self, call: RecordedCall) -> None:
        """Note that the request of a call failed."""
        self._note_end(call)
        if call.key in self._passing:
            self._forget(call)
        elif not call.has_failed:
            call.has_failed = True
            self._failed[_gist(call.name, call.request)].append(call)

    def _note_end(self, call: RecordedCall) -> None:
        if self._running.get(call.name) == call.key:
            del self._running[call.name]

    def next_key(self, call: RecordedCall) -> str | None:
        """Return the key of the call that brings the results of a call's tools.

        ``None`` if none is expected: none came in the example, say because of a handoff.
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
                self._take(key)
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
        found: dict[str, None] = {}
        coming = iter(self._missing.values())
        call = next(coming, None)
        for _ in range(steps):
            # A call needs those that were complete before it began.
            unanswered = (at for key, at in self._unanswered.items() if key not in found)
            first = next(unanswered, math.inf)
            while call is not None and call.after <= first and len(found) < _MOST_UPCOMING:
                found[call.key] = None
                call = next(coming, None)
        return list(found)

    def predict(self, key: str, texts: Mapping[str, str]) -> Messages:
        """Return the messages of a call of the example as they are likely to be in this run.

        Args:
            texts: by key, what stands for the text of each call of the example.
        """
        reader = self._earlier[key]

        def is_readable(writer: str) -> bool:
            # A text that was not complete when the request was sent is in it by chance.
            completed = self._earlier[writer].completed
            return completed is not None and completed < reader.after

        return self._known.predict(reader.request.messages, texts, self._call_ids, is_readable)

    def texts(self, others: Mapping[str, str] | None = None) -> Mapping[str, str]:
        """Return the answers of this run that are complete now, by key.

        Args:
            others: what stands for those that are not.
        """
        return _TextsNow(self.calls, self._complete, others or {})

    def finish(self) -> None:
        """Make this run the example for later ones. Call this when the program has ended well."""
        if any(not call.has_failed for call in self.calls.values()):
            recorded = {key: call for key, call in self.calls.items() if key not in self._passing}
            self._program.recorded = recorded
            self._program.output_lengths.keep(recorded)

    def _find_failed(self, name: str, request: RecordedRequest) -> RecordedCall | None:
        """Return the failed call that a request repeats, if it repeats one."""
        failed = self._failed.get(_gist(name, request), [])
        call = next((call for call in failed if call.request == request), None)
        if call is not None:
            failed.remove(call)
        return call

    def _share(self, request: RecordedRequest) -> RecordedRequest:
        """Return a request of which equal parts are in memory once: most repeat earlier ones."""
        names = ("url", "model", "messages", "fields", "namespace", "headers")
        return replace(request, **{name: self._shared(getattr(request, name)) for name in names})

    def _forget(self, call: RecordedCall) -> None:
        """Remember a call no longer that is not recorded."""
        del self.calls[call.key], self._passing[call.key]
        keys = {call.key, self._next_keys.pop(call.key, None)}
        self._taken -= keys - self._earlier.keys() - self.calls.keys()
        if call.tool_answer is not None:
            by_ids, ids = self._waiting[len(call.request.messages)], _ids(call.tool_answer)
            by_ids[ids] = [other for other in by_ids.get(ids, ()) if other is not call]
            if not by_ids[ids]:
                del by_ids[ids]

    def _find_followed(self, request: RecordedRequest) -> RecordedCall | None:
        """Return the call whose tools' results a request brings, if it brings any.

        Frameworks write an answer down in their own ways, but keep the ids of its calls.
        """
        messages = request.messages
        for count, by_ids in self._waiting.items():
            calls = by_ids.get(_ids(messages[count]), []) if count < len(messages) else []
            for call in calls:
                if list(messages[:count]) == list(call.request.messages):
                    calls.remove(call)
                    return call
        return None

    def _take(self, key: str) -> None:
        """Note that no other request can be the call with this key."""
        self._taken.add(key)
        if key in self._earlier:
            self._left[self._earlier[key].name].pop(key, None)

    def _likest(self, name: str, request: RecordedRequest) -> str | None:
        """Return the key of the earlier call that a request is most like.

        Of those with messages equally like its own, one to the same server and model, if there is
        one, and of these the first; of very many, the one that already was the most like it in the
        example.
        """
        left = self._left[name].values() if name in self._left else ()
        candidates = list(islice(left, _MOST_COMPARED))
        if not candidates or (len(candidates) == 1 and self._is_new(name, request, candidates[0])):
            return None
        if len(candidates) == 1:
            return candidates[0].key
        texts, first = self.texts(), candidates[0]
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

        if len(candidates) > _MOST_PREDICTED:
            candidates = heapq.nlargest(
                _MOST_PREDICTED, candidates, key=lambda call: likeness(call, call.request.messages)
            )
        return max(candidates, key=lambda call: likeness(call, self.predict(call.key, texts))).key

    def _is_new(self, name: str, request: RecordedRequest, candidate: RecordedCall) -> bool:
        """Return whether a request is none of the earlier ones, of which one is left.

        It is if its first message has nothing in common with that one's, while that of another
        call by this name does with its own.
        """
        if name not in self._alike:
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
        call.changes = self.fields.compare(twin.request.fields, twin.changes, call.request.fields)
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
        number = self._numbers.pop(name, 0) + 1
        key = f"{name} ({number})" if number > 1 else name
        while key in self._taken:
            number += 1
            key = f"{name} ({number})"
        self._numbers[name] = number
        if len(self._numbers) > _MOST_NAMES:
            del self._numbers[next(iter(self._numbers))]
        return key


class _TextsNow(Mapping[str, str]):
    """The answers of a run that were complete when this was made, by key.

    Args:
        calls: the calls of the run, also later ones.
        complete: how many of them were complete.
        others: what stands for other answers.
    """

    def __init__(
        self, calls: Mapping[str, RecordedCall], complete: int, others: Mapping[str, str]
    ) -> None:
        self._calls, self._complete, self._others = calls, complete, others

    def __getitem__(self, key: str) -> str:
        call = self._calls.get(key)
        if call is None or call.answer is None or call.completed is None:
            return self._others[key]
        return call.answer if call.completed < self._complete else self._others[key]

    def __iter__(self) -> Iterator[str]:
        return (key for key in {**self._calls, **self._others} if key in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


@cache
def _warn_of_size() -> None:
    logger.warning(
        "a run has sent so much that only its beginning is learned from: more than %d MB. Begin a "
        "run for each time that your program runs, for instance for each request to a server",
        _MOST_BYTES // 1_000_000,
    )


def _first(pair: tuple[int, object]) -> int:
    return pair[0]


def _gist(name: str, request: RecordedRequest) -> Hashable:
    """Return what requests that are equal have in common, and few others."""
    messages = request.messages
    content = messages[-1].get("content") if messages else None
    return name, len(messages), content if isinstance(content, str) else None


def _ids(message: Message) -> tuple[Any, ...]:
    return tuple(str(call.get("id")) for call in message.get("tool_calls") or ())


def call_ids(answer: Message) -> list[str]:
    """Return the ids of an answer's calls, in their order."""
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
