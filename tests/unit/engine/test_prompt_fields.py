"""Every field of a request that shapes its prompt reaches the engine that renders it."""

from collections.abc import Mapping
from typing import Any

import pytest
from flashmoa_sglang.http import bodies

from flashmoa.engine import EngineClient, kv_namespace, prompt_fields
from flashmoa.engine.wire import RenderedText
from flashmoa.errors import EngineError, PluginMissing

MESSAGES = [{"role": "user", "content": "Hi"}]
FIELDS: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": "walk"}}],
    "tool_choice": {"type": "function", "function": {"name": "walk"}},
    "chat_template_kwargs": {"enable_thinking": False},
    "reasoning_effort": 0.0,
    "reasoning": {"effort": "low"},
    "thinking": {"type": "disabled"},
    "task": "title",
    "continue_final_message": True,
    "add_generation_prompt": False,
}


class RecordingClient(EngineClient):
    """Records the bodies of its requests; ``missing`` are routes that its server does not have."""

    def __init__(self, *missing: str) -> None:
        super().__init__("http://engine")
        self.sent: list[tuple[str, Mapping[str, Any]]] = []
        self._missing = missing

    async def ask(
        self, method: str, path: str, answer: type[Any], body: Mapping[str, Any] | None = None
    ) -> Any:
        self.sent.append((path, body or {}))
        if path in (*self._missing, "/v1/models"):
            raise PluginMissing("no such route")
        return RenderedText(text="rendered")


def test_only_set_prompt_fields_are_kept() -> None:
    body = {**FIELDS, "model": "m", "messages": MESSAGES, "temperature": 0.0, "stream": True}
    assert prompt_fields(body) == FIELDS
    unset = {"messages": [], "tools": [], "chat_template_kwargs": {}, "reasoning_effort": None}
    assert prompt_fields(unset) == {}


async def test_the_engine_is_given_all_fields() -> None:
    async with RecordingClient() as client:
        assert await client.render(MESSAGES, **FIELDS) == "rendered"
    assert client.sent == [("/render", {"messages": MESSAGES, **FIELDS})]


async def test_a_plain_server_is_given_all_fields() -> None:
    async with RecordingClient("/render", "/tokenize") as client:
        with pytest.raises(EngineError, match="cannot convert"):
            await client.render(MESSAGES, **FIELDS)
    assert ("/tokenize", {"messages": MESSAGES, **FIELDS}) in client.sent


def test_the_plugin_accepts_all_fields() -> None:
    body = {"messages": MESSAGES, **FIELDS}
    assert bodies.Prompt.model_validate(body).chat_fields() == body


@pytest.mark.parametrize(
    ("body", "namespace"),
    [
        ({"model": "m"}, {}),
        ({"model": "base:a", "lora_path": "b"}, {"model": "base:a", "lora_path": "b"}),
        ({"model": "m", "lora_path": "b", "cache_salt": ""}, {"lora_path": "b"}),
        ({"cache_salt": "s", "extra_key": "k"}, {"cache_salt": "s", "extra_key": "k"}),
    ],
)
def test_the_namespace_of_a_request_follows_from_its_fields(
    body: dict[str, str], namespace: dict[str, str]
) -> None:
    assert kv_namespace(body) == namespace
