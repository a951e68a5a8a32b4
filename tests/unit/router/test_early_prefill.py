"""A chat is rendered early with every field that shapes its prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest

from flashmoa.engine import EngineClient
from flashmoa.router.shell.agent_answers import GrowingAnswer
from flashmoa.router.shell.agent_requests import CHAT, parse_request
from flashmoa.router.shell.early_prefill import EarlyPrefill

pytestmark = pytest.mark.anyio


async def test_an_early_prompt_is_rendered_with_the_fields_of_its_request() -> None:
    rendered: list[dict[str, Any]] = []

    class Engine:
        async def render(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> str:
            rendered.append(fields)
            return "".join(message["content"] for message in messages)

    fields = {"tool_choice": "none", "reasoning_effort": "low", "chat_template_kwargs": {"x": 1}}
    messages = [{"role": "user", "content": "Sum up."}]
    request = parse_request(CHAT, {"messages": messages, "temperature": 0, **fields})
    answers: Mapping[str, GrowingAnswer] = {}
    early = EarlyPrefill(cast("EngineClient", Engine()), request, answers)
    prompt = await early._build_prompt()
    assert prompt.stable() == "Sum up." and rendered == [fields]
