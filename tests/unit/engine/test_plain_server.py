"""Test how prompts are rendered and prefilled on servers of several kinds without the plugin."""

from collections.abc import Mapping
from typing import Any
from unittest.mock import AsyncMock

import anyio
import pytest

from flashmoa.engine import EngineSettings
from flashmoa.engine.plain import PlainServer
from flashmoa.engine.wire import PromptTokens
from flashmoa.errors import EngineError, MalformedRequest, PluginMissing, RequestRefused

MESSAGES = [{"role": "user", "content": "Hi  you"}]
RENDERED = "<u>Hi  you</u><a>"
NO_NAMESPACE: dict[str, str] = {}


class FakeServer:
    """Answers requests by its routes; every character is a token.

    Args:
        routes: the routes that it has.
        text_field: what its ``/detokenize`` calls the text.
        lossy: whether its tokenizer changes white space.
        answers: its answers to some routes, in place of the usual ones.
    """

    def __init__(
        self, *routes: str, text_field: str = "text", lossy: bool = False, **answers: Any
    ) -> None:
        self.routes = routes
        self.answers = answers
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self._text_field = text_field
        self._lossy = lossy

    def plain(self, model: str | None = None) -> PlainServer:
        return PlainServer(self._call, model)

    async def _call(
        self, method: str, path: str, answer: Any, body: Mapping[str, Any] | None = None
    ) -> Any:
        if path not in self.routes:
            raise PluginMissing(f"no {path}")
        self.requests.append((path, dict(body or {})))
        return answer.model_validate(self._answer(path, dict(body or {})))

    def _answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if (answer := self.answers.get(path.rpartition("/")[2])) is not None:
            return answer
        usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}
        if path == "/tokenize":
            return {"tokens": [*map(ord, body.get("prompt", RENDERED))]}
        if path == "/detokenize":
            text = "".join(map(chr, body["tokens"]))
            return {self._text_field: text.replace("  ", " ") if self._lossy else text}
        if path == "/generate":
            return {"meta_info": {"prompt_tokens": 9, "completion_tokens": 0, "cached_tokens": 4}}
        return {"data": [{"id": "served"}]} if path == "/v1/models" else {"usage": usage}


SGLANG = ("/tokenize", "/detokenize", "/generate", "/v1/completions", "/v1/models")
VLLM = ("/tokenize", "/detokenize", "/v1/completions", "/v1/models")


async def test_sglang_prefills_tokens_without_decoding() -> None:
    fake = FakeServer(*SGLANG)
    server = fake.plain()
    assert await server.render(MESSAGES, {}) == RENDERED
    usage, _ = await server.prefill(RENDERED[:5], {"lora_path": "x"})
    assert (usage.prompt_tokens, usage.cached_tokens) == (9, 4)
    asked, (path, body) = fake.requests[-2:]
    assert (path, body["lora_path"]) == ("/generate", "x")
    assert body["input_ids"] == [*map(ord, RENDERED[:5])]
    assert body["sampling_params"]["max_new_tokens"] == 0
    # The text is rendered already: the tokenizer must add nothing.
    assert asked == ("/tokenize", {"prompt": RENDERED[:5], "add_special_tokens": False})


async def test_a_salted_prompt_is_completed() -> None:
    fake = FakeServer(*SGLANG)
    await fake.plain().prefill("text", {"cache_salt": "s"})
    path, body = fake.requests[-1]
    assert (path, body["cache_salt"], body["max_tokens"]) == ("/v1/completions", "s", 1)


async def test_vllm_prefills_and_decodes_one_token() -> None:
    fake = FakeServer(*VLLM, text_field="prompt")
    server = fake.plain("mine")
    assert await server.render(MESSAGES, {}) == RENDERED
    for text in ("ab", "abc"):
        usage, _ = await server.prefill(text, NO_NAMESPACE)
        assert usage.cached_tokens == 4
        path, body = fake.requests[-1]
        assert (path, body["max_tokens"], body["model"]) == ("/v1/completions", 1, "mine")
        assert body["prompt"] == [*map(ord, text)]


EMPTY: dict[str, Any] = {"tokenize": {"tokens": []}, "detokenize": {"text": ""}}


@pytest.mark.parametrize(
    "fake",
    [
        FakeServer(*SGLANG, lossy=True),
        FakeServer("/tokenize"),
        FakeServer(),
        FakeServer(*SGLANG, **EMPTY),  # It ignores the messages.
    ],
)
async def test_a_server_must_not_change_texts(fake: FakeServer) -> None:
    with pytest.raises(EngineError, match="cannot convert messages to tokens and back"):
        await fake.plain().render(MESSAGES, {})


async def test_cached_tokens_may_be_left_out() -> None:
    """An engine leaves them out if there are none."""
    fake, cached = FakeServer(*VLLM), list[int | None]()
    server = fake.plain("m")
    for details in ({}, {"prompt_tokens_details": {"cached_tokens": 5}}, {}):
        fake.answers["completions"] = {"usage": {"prompt_tokens": 9, **details}}
        usage, _ = await server.prefill("text", {"cache_salt": "s"})
        cached.append(usage.cached_tokens)
    assert cached == [None, 5, 0]


async def test_a_refused_render_or_aborted_prefill_is_an_error() -> None:
    refuse = AsyncMock(side_effect=RequestRefused("key", 401, "unauthorized"))
    with pytest.raises(RequestRefused, match="key"):
        await PlainServer(refuse, None).render(MESSAGES, {})
    reason = {"type": "abort", "message": "full", "status_code": 503}
    fake = FakeServer(*SGLANG, generate={"meta_info": {"finish_reason": reason}})
    with pytest.raises(RequestRefused, match="full"):
        await fake.plain().prefill("text", NO_NAMESPACE)


async def test_the_choice_is_checked() -> None:
    with pytest.raises(ValueError, match="without_plugin must be 'prefill' or 'off', not 'on'"):
        EngineSettings(without_plugin="on")  # type: ignore[arg-type]


async def test_prefills_are_timed_only_if_they_run_alone() -> None:
    """Otherwise each one would seem to take the time of all."""
    gates = {"1": anyio.Event(), "2": anyio.Event()}
    seconds: dict[str, float | None] = {}

    async def call(method: str, path: str, answer: Any, body: Any = None) -> Any:
        if answer is PromptTokens:
            return PromptTokens(tokens=[ord(body["prompt"][0])])
        await gates[chr(body["prompt"][0])].wait()
        return answer.model_validate({"usage": {"prompt_tokens": 9}})

    server = PlainServer(call, "m")

    async def prefill(name: str) -> None:
        _, seconds[name] = await server.prefill(name, {"cache_salt": "s"})

    async with anyio.create_task_group() as group:
        for name in gates:
            group.start_soon(prefill, name)
            await anyio.wait_all_tasks_blocked()
        for gate in gates.values():
            gate.set()
            await anyio.wait_all_tasks_blocked()
    assert seconds == {"1": None, "2": None}
    await prefill("1")
    assert seconds["1"] is not None


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "u"}}, "Look", None])
async def test_a_message_of_more_than_text_is_refused(part: object) -> None:
    parts = [{"type": "text", "text": "Look:"}, part]
    with pytest.raises(MalformedRequest, match="images"):
        await FakeServer(*SGLANG).plain().render([{"content": parts}], {})
