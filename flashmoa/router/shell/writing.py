"""An answer on its way to its client, and into the agent prompt cache."""

from __future__ import annotations

import json
from typing import Any, cast

from flashmoa.router.shell.agents import AgentAnswer, AgentFailed
from flashmoa.router.shell.counters import ShellCounters


class Writing:
    """Hears an engine's answer: OpenAI's chat completion or SGLang's ``/generate``.

    Args:
        answer: what it is written into; ``None``: nobody reads it.
        streams: whether it comes as events.

    Attributes:
        last: the last event, which of ``/generate`` has the whole answer.
        ending: how it ended, see :class:`~flashmoa.router.forwarding.Audience`.
    """

    def __init__(self, answer: AgentAnswer | None, counters: ShellCounters, streams: bool) -> None:
        self._answer = answer
        self._counters = counters
        self._streams = streams
        self._line = b""
        self._text = self._tokens = 0
        self.last: dict[str, Any] = {}
        self.ending: str | None = None

    def heard(self, piece: bytes) -> None:
        if self._answer is None:
            return
        if not self._streams:
            self._take(piece)
            return
        *lines, self._line = (self._line + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                self._take(line.removeprefix(b"data: "))

    def computed(self, content: bytes | None = None) -> None:
        """The prefill engine says what it has computed."""

    def ended(self, ending: str) -> None:
        self.ending = ending
        self._counters.ended(ending)
        if self._answer is None or self._answer.is_over:
            return
        if ending == "answered":
            self._answer.close()
        else:
            self._answer.fail(AgentFailed(f"{self._answer.name}'s request was {ending}"))

    def _take(self, content: bytes) -> None:
        assert self._answer is not None
        try:
            event: Any = json.loads(content)
            if not isinstance(event, dict):
                return
            self.last = event = cast("dict[str, Any]", event)
            if "error" in event:
                self._answer.fail(AgentFailed(f"{self._answer.name}: {event['error']}"))
            elif "choices" in event:
                self._chat(self._answer, event)
            elif "text" in event:
                self._generation(self._answer, event)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            self._answer.fail(AgentFailed(f"{self._answer.name}'s answer cannot be read: {error}"))

    def _chat(self, answer: AgentAnswer, event: dict[str, Any]) -> None:
        for choice in event["choices"][:1]:
            said: dict[str, Any] | None = choice.get("delta") or choice.get("message")
            answer.add((said or {}).get("content") or "", None)
            if choice.get("finish_reason") == "abort":
                answer.fail(AgentFailed(f"{answer.name} was aborted"))

    def _generation(self, answer: AgentAnswer, event: dict[str, Any]) -> None:
        """Each event repeats the answer so far."""
        text: str = event["text"]
        ids: list[int] = event["output_ids"]
        reason: dict[str, Any] = event["meta_info"].get("finish_reason") or {}
        if reason.get("type") == "abort":
            answer.fail(AgentFailed(f"{answer.name} was aborted: {reason.get('message')}"))
            return
        if ids and reason.get("matched") == ids[-1]:
            ids = ids[:-1]  # The end of an answer is no part of who reads it.
        answer.add(text[self._text :], ids[self._tokens :])
        self._text, self._tokens = len(text), len(ids)
