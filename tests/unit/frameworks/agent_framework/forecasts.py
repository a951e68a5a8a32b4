"""Run chats against a fake engine, and compare each request with the request that was forecast."""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from agent_framework import Workflow

from flashmoa.agent_framework import FlashMoAChatClient, link
from flashmoa.frameworks.agent_framework.chats import ChatLinkPlanner
from flashmoa.link.expected import ExpectedRequest, Turn
from flashmoa.observe import Event, LinkDeclined
from flashmoa.observe.calls import Call, calls
from tests.unit.frameworks.agent_framework.fakes import FakeEngine, make_client, split_answer

# Writes an agent's answer, given its name, the number of its calls so far, and the request's body.
Script = Callable[[str, int, Mapping[str, Any]], Any]

# The executors of agents whose names differ.
_EXECUTORS = {"magentic manager": "magentic_orchestrator"}


def prose(name: str, number: int, _: Mapping[str, Any]) -> str:
    """Write a text with characters that JSON and templates treat in their own ways."""
    return f'{name} "{number}": - köhler \\n'


@dataclass
class Forecast:
    """A forecast, the request's real body, and the last texts of the agents."""

    expected: ExpectedRequest
    body: Mapping[str, Any]
    texts: Mapping[str, str]


@dataclass
class Chat:
    """The requests of a chat, and their forecasts.

    Attributes:
        asked: the agents, in the order of their requests.
        verdicts: for each request, whether it was as forecast: ``exact``, ``none`` if no forecast
            was in force, or the place of the first different message.
        forecast: the forecasts that were in force.
    """

    asked: list[str] = field(default_factory=list[str])
    verdicts: list[str] = field(default_factory=list[str])
    events: list[Event] = field(default_factory=list[Event])
    texts: dict[str, str] = field(default_factory=dict[str, str])
    forecasts: dict[str, ExpectedRequest | None] = field(
        default_factory=dict[str, ExpectedRequest | None]
    )
    forecast: list[Forecast] = field(default_factory=list["Forecast"])
    counts: Counter[str] = field(default_factory=Counter[str])
    fake: FakeEngine | None = None

    @property
    def calls(self) -> list[Call]:
        return calls(self.events)

    @property
    def statuses(self) -> list[str | None]:
        assert self.fake is not None
        return self.fake.statuses

    @property
    def declined(self) -> dict[str, str]:
        declined = [event for event in self.events if isinstance(event, LinkDeclined)]
        return {event.agent: event.reason for event in declined}

    def check(self, name: str, body: Mapping[str, Any]) -> None:
        self.asked.append(name)
        expected = self.forecasts.pop(_EXECUTORS.get(name, name), None)
        if expected is not None:
            self.forecast.append(Forecast(expected, dict(body), dict(self.texts)))
        self.verdicts.append("none" if expected is None else self._compare(expected, body))

    def _compare(self, expected: ExpectedRequest, body: Mapping[str, Any]) -> str:
        verdicts = [self._compare_request(each, expected, body) for each in expected.requests]
        return "exact" if "exact" in verdicts else verdicts[-1]

    def _compare_request(
        self, request: Any, expected: ExpectedRequest, body: Mapping[str, Any]
    ) -> str:
        filled = json.dumps(request.body, default=str)
        if len(expected.requests) > 1:  # One request has an unknown text.
            filled = filled.replace('"?"', json.dumps(self.texts.get(self.asked[-2])))
        for writer in expected.placeholders._cores:
            text = self.texts.get(writer, "(none)")
            filled = filled.replace(expected.placeholders.padded(writer), json.dumps(text)[1:-1])
        forecast = json.loads(filled)
        messages, found = forecast["messages"], body["messages"]
        same = [one == other for one, other in zip(messages, found, strict=False)]
        if not all(same) or len(messages) != len(found):
            return f"differs from message {[*same, False].index(False)} of {len(found)}"
        return "exact" if forecast.get("tools") == body.get("tools") else "other tools"


class ChatRunner:
    """Builds, links and runs chats."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.chat = Chat()
        expect, observe = ChatLinkPlanner.expect, ChatLinkPlanner.observe

        async def noting_expect(planner: ChatLinkPlanner, turn: Turn) -> ExpectedRequest | None:
            self.chat.forecasts[turn.agent] = await expect(planner, turn)
            return self.chat.forecasts[turn.agent]

        def noting_observe(planner: ChatLinkPlanner, name: str, request: Any) -> Any:
            expected = self.chat.forecasts.get(name)
            prompt: Any = None
            if expected is not None and not expected.holds(prompt, None):
                self.chat.forecasts[name] = None
            return observe(planner, name, request)

        monkeypatch.setattr(ChatLinkPlanner, "expect", noting_expect)
        monkeypatch.setattr(ChatLinkPlanner, "observe", noting_observe)

    def client(self, script: Script = prose, **settings: Any) -> FlashMoAChatClient:
        """Make a client whose answers follow a script."""

        def answer(body: Mapping[str, Any]) -> Any:
            name = body["messages"][0]["content"].split("You are ")[1].split(".")[0]
            self.chat.counts[name] += 1
            self.chat.check(name, body)
            answer = script(name, self.chat.counts[name], body)
            self.chat.texts[name] = split_answer(answer)[0] or ""
            return answer

        client, self.chat.fake = make_client(answer, **settings)
        return client

    async def run(
        self,
        workflow: Workflow,
        *tasks: str,
        stream: bool = False,
        kv_share: float = 0.5,
        **options: Any,
    ) -> Chat:
        """Link a chat, and run it once for each task."""
        linked = link(workflow, listener=self.chat.events.append, kv_share=kv_share)
        for task in tasks or ("Find a hut.",):
            if stream:
                async for _ in workflow.run(task, stream=True, **options):
                    pass
            else:
                await workflow.run(task, **options)
        await linked.close()
        return self.chat
