"""Test how prompts are rendered and prefilled on servers of several kinds without the plugin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmoa.engine import BadAnswer, EngineClient, MalformedRequest, PluginMissing
from flashmoa.engine.plain import PlainServer, from_transcript, is_transcript, to_transcript
from flashmoa.engine.wire import PromptTokens
from flashmoa.errors import RequestRefused

pytestmark = pytest.mark.anyio
MESSAGES = [{"role": "user", "content": "Hi  you"}]
RENDERED = "<u>Hi  you</u><a>"
NO_NAMESPACE: dict[str, str] = {}


class FakeServer:
    """Answers requests by its routes; every character is a token.

    Args:
        routes: the routes that it has.
        text_field: what its ``/detokenize`` calls the text.
        lossy: whether its tokenizer changes white space.
    """

    def __init__(self, *routes: str, text_field: str = "text", lossy: bool = False) -> None:
        self.routes = routes
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self._text_field = text_field
        self._lossy = lossy

    async def call(
        self, method: str, path: str, answer: Any, body: Mapping[str, Any] | None = None
    ) -> Any:
        if path not in self.routes:
            raise PluginMissing(f"no {path}")
        self.requests.append((path, dict(body or {})))
        return answer.model_validate(self._answer(path, dict(body or {})))

    def _answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}
        if path == "/tokenize":
            text = body.get("prompt", RENDERED)
            return {"tokens": [ord(character) for character in text]}
        if path == "/detokenize":
            text = "".join(map(chr, body["tokens"]))
            return {self._text_field: text.replace("  ", " ") if self._lossy else text}
        if path == "/generate":
            return {"meta_info": {"prompt_tokens": 9, "completion_tokens": 0, "cached_tokens": 4}}
        return {"data": [{"id": "served"}]} if path == "/v1/models" else {"usage": usage}


SGLANG = ("/tokenize", "/detokenize", "/generate", "/v1/completions", "/v1/models")
VLLM = ("/tokenize", "/detokenize", "/v1/completions", "/v1/chat/completions", "/v1/models")
OTHER = ("/v1/chat/completions", "/v1/models")


async def test_sglang_prefills_tokens_without_decoding() -> None:
    fake = FakeServer(*SGLANG)
    server = PlainServer(fake.call, None)
    assert await server.render(MESSAGES, {}) == RENDERED
    usage, _ = await server.prefill(RENDERED[:5], {"lora_path": "x"})
    assert usage is not None and (usage.prompt_tokens, usage.cached_tokens) == (9, 4)
    path, body = fake.requests[-1]
    assert path == "/generate"
    assert body["input_ids"] == [ord(character) for character in RENDERED[:5]]
    assert body["sampling_params"]["max_new_tokens"] == 0
    assert body["lora_path"] == "x"
    # The text is rendered already: the tokenizer must add nothing.
    assert fake.requests[-2] == ("/tokenize", {"prompt": RENDERED[:5], "add_special_tokens": False})


async def test_a_salted_prompt_takes_the_route_that_knows_salts() -> None:
    fake = FakeServer(*SGLANG)
    await PlainServer(fake.call, None).prefill("text", {"cache_salt": "s"})
    path, body = fake.requests[-1]
    assert (path, body["cache_salt"], body["max_tokens"]) == ("/v1/completions", "s", 1)


async def test_vllm_prefills_tokens_with_one_token_to_decode() -> None:
    fake = FakeServer(*VLLM, text_field="prompt")
    server = PlainServer(fake.call, "mine")
    assert await server.render(MESSAGES, {}) == RENDERED
    for text in ("ab", "abc"):
        usage, _ = await server.prefill(text, NO_NAMESPACE)
        assert usage is not None and usage.cached_tokens == 4
        path, body = fake.requests[-1]
        assert (path, body["max_tokens"], body["model"]) == ("/v1/completions", 1, "mine")
        assert body["prompt"] == [ord(character) for character in text]


async def test_a_server_that_cannot_tokenize_gets_messages() -> None:
    fake = FakeServer(*OTHER)
    server = PlainServer(fake.call, None)
    messages = [{"role": "system", "content": "Be kind."}, *MESSAGES]
    prompt = await server.render(messages, {"tools": [{"type": "function"}]})
    usage, _ = await server.prefill(prompt[:-4], NO_NAMESPACE)
    assert usage is not None and usage.cached_tokens == 4
    path, body = fake.requests[-1]
    assert path == "/v1/chat/completions"
    assert body == {
        "model": "served",
        "max_tokens": 1,
        "temperature": 0.0,
        "tools": [{"type": "function"}],
        "messages": [messages[0], {"role": "user", "content": "Hi "}],
    }


async def test_messages_without_any_text_are_not_sent() -> None:
    fake = FakeServer(*OTHER)
    server = PlainServer(fake.call, None)
    prompt = await server.render(MESSAGES, {})
    usage, _ = await server.prefill(prompt.removesuffix("Hi  you"), NO_NAMESPACE)
    assert usage is None
    assert fake.requests == []


async def test_a_tokenizer_that_changes_white_space_is_not_used() -> None:
    fake = FakeServer(*SGLANG, "/v1/chat/completions", lossy=True)
    prompt = await PlainServer(fake.call, None).render(MESSAGES, {})
    assert from_transcript(prompt) == {"messages": MESSAGES}


@pytest.mark.parametrize(
    "error",
    [MalformedRequest("no", 400, "error"), RequestRefused("?", 422, "error"), BadAnswer("?")],
)
async def test_a_server_with_another_tokenize_route_gets_messages(error: Exception) -> None:
    async def call(method: str, path: str, answer: Any, body: Any = None) -> Any:
        raise error

    prompt = await PlainServer(call, None).render(MESSAGES, {})
    assert from_transcript(prompt) == {"messages": MESSAGES}


async def test_a_server_that_ignores_messages_gets_them_another_way() -> None:
    async def call(method: str, path: str, answer: Any, body: Any = None) -> Any:
        return answer.model_validate({"tokens": [], "text": ""})

    prompt = await PlainServer(call, None).render(MESSAGES, {})
    assert from_transcript(prompt) == {"messages": MESSAGES}


async def test_cached_tokens_that_are_left_out_are_none_once_others_were_reported() -> None:
    answers = [{}, {"prompt_tokens_details": {"cached_tokens": 5}}, {}]
    cached: list[int | None] = []

    async def call(method: str, path: str, answer: Any, body: Any = None) -> Any:
        return answer.model_validate({"usage": {"prompt_tokens": 9, **answers[len(cached)]}})

    server = PlainServer(call, "m")
    prompt = to_transcript(MESSAGES, {})
    for _ in answers:
        usage, _ = await server.prefill(prompt, NO_NAMESPACE)
        cached.append(usage.cached_tokens if usage is not None else -1)
    assert cached == [None, 5, 0]


async def test_a_wrong_key_is_an_error() -> None:
    async def call(method: str, path: str, answer: Any, body: Any = None) -> Any:
        raise RequestRefused("key", 401, "unauthorized")

    with pytest.raises(RequestRefused, match="key"):
        await PlainServer(call, None).render(MESSAGES, {})


async def test_an_aborted_prefill_is_an_error() -> None:
    async def call(method: str, path: str, answer: Any, body: Any = None) -> Any:
        if answer is PromptTokens:
            return PromptTokens(tokens=[1])
        reason = {"type": "abort", "message": "full", "status_code": 503}
        return answer.model_validate({"meta_info": {"finish_reason": reason}})

    with pytest.raises(RequestRefused, match="full"):
        await PlainServer(call, None).prefill("text", NO_NAMESPACE)


async def test_the_choice_is_checked() -> None:
    with pytest.raises(ValueError, match="without_plugin must be 'prefill' or 'off', not 'on'"):
        EngineClient("http://127.0.0.1:9", without_plugin="on")  # type: ignore[arg-type]


async def test_prefills_are_timed_only_if_they_run_alone() -> None:
    """Otherwise each one would seem to take the time of all."""
    gates = {"first": anyio.Event(), "second": anyio.Event()}
    seconds: dict[str, float | None] = {}

    async def call(method: str, path: str, answer: Any, body: Any = None) -> Any:
        await gates[body["messages"][0]["content"]].wait()
        return answer.model_validate({"usage": {"prompt_tokens": 9}})

    server = PlainServer(call, "m")

    async def prefill(name: str) -> None:
        prompt = to_transcript([{"role": "user", "content": name}], {})
        _, seconds[name] = await server.prefill(prompt, NO_NAMESPACE)

    async with anyio.create_task_group() as group:
        group.start_soon(prefill, "first")
        await anyio.wait_all_tasks_blocked()
        group.start_soon(prefill, "second")
        await anyio.wait_all_tasks_blocked()
        gates["first"].set()
        await anyio.wait_all_tasks_blocked()
        gates["second"].set()
    assert seconds == {"first": None, "second": None}
    await prefill("first")
    assert seconds["first"] is not None


FIELDS: dict[str, Any] = {"tools": [{"type": "function"}], "chat_template_kwargs": {"a": "é"}}
TEXTS = st.text(st.characters(exclude_characters="\x00\x01\x02\x03\n"), max_size=20)
CONTENTS = TEXTS | st.lists(TEXTS, min_size=1, max_size=3).map(
    lambda texts: [{"type": "text", "text": text} for text in texts]
)
CHATS = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant"]), "content": CONTENTS},
        optional={"name": TEXTS},
    ),
    max_size=4,
)
CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}


@given(CHATS)
def test_a_whole_transcript_is_the_request(messages: list[dict[str, Any]]) -> None:
    end = {"role": "user", "content": "end"}
    transcript = to_transcript([*messages, CALL, end], FIELDS)
    assert is_transcript(transcript)
    assert from_transcript(transcript) == {**FIELDS, "messages": [*messages, CALL, end]}


@given(CHATS, st.data())
def test_the_beginning_of_a_transcript_is_the_beginning_of_the_request(
    messages: list[dict[str, Any]], data: st.DataObject
) -> None:
    head = len(to_transcript([], FIELDS))
    transcript = to_transcript(messages, FIELDS)
    cut = data.draw(st.integers(head, len(transcript)))
    got: list[dict[str, Any]] = from_transcript(transcript[:cut])["messages"]
    assert got[:-1] == messages[: max(0, len(got) - 1)]
    if got:
        last, whole = got[-1], messages[len(got) - 1]
        assert {**last, "content": ""} == {**whole, "content": ""}
        assert _text(last["content"]).strip("\n"), "a message without text is not sent"
        assert _text(whole["content"]).startswith(_text(last["content"]))


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def test_a_message_with_an_image_is_refused() -> None:
    parts = [{"type": "text", "text": "Look:"}, {"type": "image_url", "image_url": {"url": "u"}}]
    with pytest.raises(MalformedRequest, match="images"):
        to_transcript([{"role": "user", "content": parts}], {})


def test_a_message_with_the_separator_is_refused() -> None:
    with pytest.raises(MalformedRequest):
        to_transcript([{"role": "user", "content": "a\x00b"}], {})


def test_rendered_text_is_not_a_transcript() -> None:
    assert not is_transcript("<|im_start|>user\nhi")
    assert not is_transcript("")
