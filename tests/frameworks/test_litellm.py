"""Test LiteLLM's client on a server of mixtures, a staircase and a debate of tiny models."""

from __future__ import annotations

import json
import os
from typing import Any

import litellm
import openai
import pytest

pytestmark = [
    # Of its own types and models, which newer pydantic does not like.
    pytest.mark.filterwarnings("ignore:Items? .* on TypedDict class:UserWarning"),
    pytest.mark.filterwarnings("ignore:Accessing the 'model_:DeprecationWarning"),
]

URL = os.environ.get("FLASHMOA_MOA", "")
MODELS = ("three", "stairs", "judged")
QUESTION = [{"role": "user", "content": "What is there to see in Patan?"}]


def given(model: str, **more: Any) -> dict[str, Any]:
    settings = {"api_base": f"{URL}/v1", "api_key": "secret", "max_retries": 0, "timeout": 60}
    return {"model": f"openai/{model}", "messages": QUESTION, **settings, **more}


async def ask(model: str, **more: Any) -> Any:
    return await litellm.acompletion(**given(model, **more))


async def read_stream(model: str, **more: Any) -> tuple[str, str | None, Any]:
    """Return a streamed answer's text, finish reason and usage."""
    options = {"include_usage": True}
    stream: Any = await litellm.acompletion(
        **given(model, stream=True, stream_options=options, **more)
    )
    text, reason, usage = "", None, None
    async for chunk in stream:
        usage = getattr(chunk, "usage", None) or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
    return text, reason, usage


@pytest.mark.parametrize("model", MODELS)
async def test_streamed_answer_equals_the_unstreamed_one(model: str) -> None:
    whole = await ask(model)
    text, reason, usage = await read_stream(model)
    assert text == whole.choices[0].message.content != ""
    assert reason == whole.choices[0].finish_reason
    assert usage.completion_tokens == whole.usage.completion_tokens > 0
    assert usage.prompt_tokens == whole.usage.prompt_tokens > 0


def test_the_synchronous_client_gets_the_same_answer() -> None:
    first, second = (litellm.completion(**given("three")) for _ in range(2))
    assert first.choices[0].message.content == second.choices[0].message.content  # pyright: ignore


@pytest.mark.parametrize("model", ["three", "stairs", "judged"])
async def test_answer_has_the_asked_form(model: str) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    more = {"response_format": form, "max_tokens": 40, "extra_body": {"ignore_eos": False}}
    whole = await ask(model, **more)
    assert json.loads(whole.choices[0].message.content) == {"a": "b"}
    assert json.loads((await read_stream(model, **more))[0]) == {"a": "b"}


@pytest.mark.parametrize("model", ["three", "stairs"])
async def test_answer_ends_before_the_stop_text_and_at_max_tokens(model: str) -> None:
    text = (await ask(model)).choices[0].message.content
    stopped = await ask(model, stop=[text[3]])
    assert stopped.choices[0].message.content == text[: text.index(text[3])]
    assert stopped.choices[0].finish_reason == "stop"
    short = await ask(model, max_completion_tokens=3, temperature=0, seed=1, user="ada", n=1)
    assert short.usage.completion_tokens == 3 and short.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"n": 2}, "n is 2: a question gets one answer"),
        ({"logprobs": True}, "answers come without log-probabilities"),
        ({"extra_body": {"temprature": 1}}, "did you mean 'temperature'?"),
    ],
)
async def test_what_is_not_supported_is_a_bad_request_with_the_reason(
    more: dict[str, Any], problem: str
) -> None:
    for stream in (False, True):
        with pytest.raises(litellm.BadRequestError) as refused:
            await ask("stairs", stream=stream, **more)
        assert problem in str(refused.value)


async def test_errors_are_those_of_their_status() -> None:
    with pytest.raises(litellm.AuthenticationError):
        await ask("three", api_key="guess")
    with pytest.raises(litellm.NotFoundError, match="there is no model 'four'"):
        await ask("four")
    with pytest.raises(litellm.BadGatewayError, match="cannot be reached"):
        await ask("gone")
    with pytest.raises(openai.APIError, match="cannot be reached"):
        await read_stream("gone")
