"""Agents with tools whose model is a script, and whose prompts a template renders."""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from functools import cache
from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import TextMessage
from autogen_core import CancellationToken, FunctionCall
from autogen_core.models import CreateResult, RequestUsage

from flashmoa.autogen import FlashMoAChatCompletionClient
from flashmoa.frameworks.autogen.calls import ToolAnswer, note_tools, observe_tools
from flashmoa.frameworks.autogen.dry_run import own_request
from flashmoa.link.after_tools import RequestAfterTools
from flashmoa.link.prompt import NotForecastable
from tests.chat_templates import Renderer

# Quotes the results of tools, as Llama's does, and names the tools that are offered.
TEMPLATE = """
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for m in messages %}<{{ m.role }}>
{%- for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}
{{- m.content | tojson if m.role == "tool" else m.content or "" }}
{%- endfor %}<assistant>"""
Calls = list[FunctionCall]


class ScriptedClient(FlashMoAChatCompletionClient):
    """Answers with calls of tools, one list after the other, and then with a text.

    It predicts the next request after each answer with calls, while its agent waits for the answer.
    """

    def __init__(self) -> None:
        super().__init__(model="tiny", base_url="http://127.0.0.1:9")
        self.engine = Renderer(TEMPLATE)  # type: ignore[assignment]
        self.play([])

    def play(self, script: Sequence[Calls], thought: str | None = None) -> None:
        """Begin a script."""
        self.agent: AssistantAgent | None = None
        self.prompts: list[str] = []
        self.predictions: list[RequestAfterTools | None] = []
        self.problems: list[str] = []
        # The results that were learned, by the answer's number and the tool's.
        self.learned: dict[tuple[int, int], str | None] = {}
        self._script = iter(script)
        self._thought = thought

    async def create(self, messages: Any, *, tools: Any = (), **_: Any) -> CreateResult:  # type: ignore[override]
        self.prompts.append(await self._request(messages, tools).render())
        calls = next(self._script, None)
        content = "Done." if calls is None else calls
        usage = RequestUsage(prompt_tokens=1, completion_tokens=1)
        result = CreateResult(
            finish_reason="stop", content=content, usage=usage, cached=False, thought=self._thought
        )
        if calls is not None:
            self._predict(ToolAnswer(result, tools, note_tools(calls)))
        return result

    async def create_stream(  # type: ignore[override]
        self, messages: Any, **more: Any
    ) -> AsyncGenerator[str | CreateResult]:
        yield await self.create(messages, **more)

    def _predict(self, answer: ToolAnswer) -> None:
        assert self.agent is not None
        number = len(self.prompts)

        def learn(place: int, result: str | None) -> None:
            self.learned[number, place] = result

        observe_tools()
        answer.called.on_result = learn
        try:
            self.predictions.append(own_request("one", self.agent, answer, included=True))
        except NotForecastable as problem:
            self.problems.append(str(problem))


@cache
def shared_client() -> ScriptedClient:
    """Make the client once, which takes a tenth of a second."""
    return ScriptedClient()


def scripted(script: Sequence[Calls], thought: str | None = None) -> ScriptedClient:
    client = shared_client()
    client.play(script, thought)
    return client


async def look(place: str) -> str:
    """Look at a place."""
    await asyncio.sleep(0)
    return place


def walk(hours: int) -> str:
    """Walk for hours."""
    if hours > 9:
        raise ValueError(f"{hours} hours are too many")
    return f"{hours} h"


def called(*calls: tuple[str, object]) -> list[FunctionCall]:
    # Some servers give every call of an answer the same id.
    return [FunctionCall(id="call", name=name, arguments=json.dumps(a)) for name, a in calls]


def make_agent(client: ScriptedClient, **options: Any) -> AssistantAgent:
    options = {"tools": [look, walk], "system_message": "Be brief.", **options}
    client.agent = AssistantAgent("one", model_client=client, **options)
    return client.agent


async def take_turn(agent: AssistantAgent) -> None:
    async for _ in agent.on_messages_stream(
        [TextMessage(content="Go.", source="user")], CancellationToken()
    ):
        pass
