"""Learn the calls of a program from its runs (:class:`Program`, :class:`LearnedRun`).

Nothing is known of a program but the requests that its runs send. The last complete run is the
example for the next one: the same calls are expected again, in the same order, with messages in
which the texts of this run take the place of those of the example. No I/O.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flashmoa.linking.learned_prompts import (
    Divergence,
    Messages,
    find_changes,
    find_divergence,
    predict,
    similarity,
)
from flashmoa.linking.output_lengths import OutputLengths


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """A request for a chat completion, as far as its prompt depends on it.

    Attributes:
        url: the root URL of its server.
        api_key: the key in its headers, if there is one.
        model: the model name.
        messages: as in OpenAI's API.
        tools: as in OpenAI's API.
        template_args: arguments for the chat template (SGLang's ``chat_template_kwargs``).
        namespace: the namespace of its KV; see ``flashmoa.engine.kv_namespace``.
    """

    url: str
    api_key: str | None
    model: str
    messages: Messages
    tools: Sequence[Mapping[str, Any]] | None = None
    template_args: Mapping[str, Any] | None = None
    namespace: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(eq=False, slots=True)
class RecordedCall:
    """A call of a run.

    Attributes:
        key: the call's name, unique in its run; the same call of another run has the same.
        name: the name of the agent that made it.
        after: the keys of the calls that were complete when it began.
        is_complete: whether its answer is complete.
        answer: the text of its answer; ``None`` before that, and if it is a tool call.
        has_failed: whether the request failed.
        differed: where its messages were not as an earlier run had them, if they were not. What
            comes after that is not predicted.
    """

    key: str
    name: str
    request: RecordedRequest
    after: frozenset[str]
    is_complete: bool = False
    answer: str | None = None
    has_failed: bool = False
    differed: Divergence | None = None


class Program:
    """Holds what is known of a program from its earlier runs.

    Attributes:
        example: the calls of its last complete run by key, in the order in which they began.
        output_lengths: those of the answers of its calls.
        reported_declines: see :class:`~flashmoa.linking.planner.LinkPlanner`.
    """

    def __init__(self) -> None:
        self.example: Mapping[str, RecordedCall] = {}
        self.output_lengths = OutputLengths()
        self.reported_declines: set[tuple[str, str]] = set()


class LearnedRun:
    """One run of a program."""

    def __init__(self, program: Program) -> None:
        self._program = program
        # Runs at the same time may replace the program's example.
        self.example = program.example
        self.calls: dict[str, RecordedCall] = {}
        # Texts of the example and what stands for them in this run, other than answers.
        self._changes: dict[str, str] = {}

    def begin(self, name: str, request: RecordedRequest) -> RecordedCall:
        """Record a call that is about to be sent, and return it."""
        failed = self._find_failed(name, request)
        if failed is not None:
            failed.has_failed = False
            return failed
        twin, predicted = self._find_in_example(name, request)
        key = twin.key if twin is not None else self._new_key(name)
        done = frozenset(other.key for other in self.calls.values() if other.is_complete)
        call = RecordedCall(key, name, request, done)
        if twin is not None:
            call.differed = find_divergence(predicted, request.messages)
            changes = find_changes(twin.request.messages, predicted, request.messages)
            self._changes = changes | self._changes
        self.calls[key] = call
        return call

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
            found |= {
                key
                for key, call in self.example.items()
                if key not in begun and call.after <= begun
            }
        return [key for key in self.example if key in found]

    def predict(self, key: str, texts: Mapping[str, str]) -> Messages:
        """Return the messages of a call of the example as they are likely to be in this run.

        Args:
            texts: by key, what stands for the text of each call of the example.
        """
        known = dict(self._changes)
        for other in self.example.values():
            if other.answer is not None and other.key in texts:
                text = texts[other.key]
                # Programs often strip an answer.
                known[other.answer.strip()] = text.strip()
                known[other.answer] = text
        known.pop("", None)
        return predict(self.example[key].request.messages, known)

    def texts(self) -> dict[str, str]:
        """Return the answers of this run that are complete, by key."""
        return {call.key: call.answer for call in self.calls.values() if call.answer is not None}

    def finish(self) -> None:
        """Make this run the example for later ones. Call this when the program has ended well."""
        calls = {key: call for key, call in self.calls.items() if not call.has_failed}
        if calls:
            self._program.example = calls

    def _find_failed(self, name: str, request: RecordedRequest) -> RecordedCall | None:
        """Return the failed call that a request repeats, if it repeats one."""
        for call in self.calls.values():
            if call.has_failed and call.name == name and call.request == request:
                return call
        return None

    def _find_in_example(
        self, name: str, request: RecordedRequest
    ) -> tuple[RecordedCall | None, Messages]:
        """Return the call of the example that a request is most like, with its predicted messages.

        Of those that are equally like it, the first one.
        """
        texts = self.texts()
        candidates = [
            (call, self.predict(call.key, texts))
            for call in self.example.values()
            if call.name == name and call.key not in self.calls
        ]
        likest = max(
            candidates, key=lambda each: similarity(each[1], request.messages), default=None
        )
        return likest if likest is not None else (None, ())

    def _new_key(self, name: str) -> str:
        if name not in self.calls and name not in self.example:
            return name
        keys = (f"{name} ({number})" for number in itertools.count(2))
        return next(key for key in keys if key not in self.calls and key not in self.example)
