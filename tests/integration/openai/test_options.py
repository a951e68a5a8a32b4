"""Test that an answer has the same fields in a run as outside, whatever its request asks for."""

import inspect
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from flashmoa.engine.local import LocalEngine
from flashmoa.openai import OpenAI, run
from tests.integration.openai.programs import BODY, SETTINGS, Clients
from tests.integration.sent_bodies import record_bodies

SCHEMA = {
    "name": "plan",
    "schema": {
        "type": "object",
        "properties": {"days": {"type": "integer", "maximum": 9}},
        "required": ["days"],
        "additionalProperties": False,
    },
}

# What the plugin adds about a prompt stream.
FIGURES = {"prompt_stream", "streamed_tokens", "late_tokens"}


def options(eos: int, word: str) -> list[dict[str, Any]]:
    """Return what the requests ask for; at ``eos`` an answer ends, and at ``word`` it may."""
    at_once = {"logit_bias": {str(eos): 100}}
    logprobs = {"logprobs": True, "top_logprobs": 2}
    return [
        {}, {"max_tokens": 1}, {"seed": 7}, {"user": "u", "top_p": 0.9, "presence_penalty": 0.1},
        {"stop": word}, {"stop": [word], "no_stop_trim": True}, {"stop_regex": word[:3]},
        {"stop": word, **logprobs}, logprobs, at_once, {**at_once, **logprobs},
        {**at_once, "skip_special_tokens": False}, {"stop_token_ids": [eos], **at_once},
        {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
        {"regex": "(yes|no)"}, {"n": 2}, {"ignore_eos": True, "min_tokens": 3},
        {"return_meta_info": True}, {"return_token_ids": True}, {"return_prompt_token_ids": True},
        {"return_cached_tokens_details": True}, {"stream_options": {"include_usage": True}},
        {"chat_template_kwargs": {"enable_thinking": False}, "separate_reasoning": True},
    ]  # fmt: skip


async def answers(client: openai.AsyncOpenAI | openai.OpenAI, asked: list[dict[str, Any]]) -> Any:
    """Return a plan, and the answers of calls that read it; each call asks with other fields."""

    async def create(**request: Any) -> Any:
        create: Any = client.chat.completions.create
        answer = create(**request)
        return await answer if inspect.isawaitable(answer) else answer

    task = [{"role": "user", "content": "Plan three days in Nepal."}]
    plan = await create(messages=task, extra_body=BODY, **SETTINGS)
    found = [plan.choices[0].message.content]
    messages = [{"role": "user", "content": f"Check this plan:\n{found[0]}"}]
    for number, fields in enumerate(asked):
        body: dict[str, Any] = {"max_tokens": 24, **fields}
        checker = [{"role": "system", "content": f"You are checker {number}."}, *messages]
        answer = await create(model="tiny", temperature=0, messages=checker, extra_body=body)
        found.append(answer.to_dict())
    return found


def comparable(answer: Any) -> Any:
    """Return an answer without what differs from request to request and from link to link."""
    if isinstance(answer, str):
        return answer
    found = {name: answer[name] for name in answer if name not in ("id", "created")}
    found["sglext"] = sorted(answer.get("sglext", {}))
    found["usage"] = dict(answer["usage"])
    del found["usage"]["prompt_tokens_details"]
    found["usage"].pop("prompt_stream", None)
    for choice in found["choices"]:
        if "meta_info" in choice:
            choice["meta_info"] = sorted(choice["meta_info"].keys() - FIGURES)
        if choice["logprobs"] is not None:  # Their last digits depend on the cache.
            tokens = choice["logprobs"]["content"]
            choice["logprobs"] = [(one["token"], len(one["top_logprobs"])) for one in tokens]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["asynchronous", "synchronous"])
async def test_an_answer_has_the_same_fields_linked_and_not(
    clients: Clients,
    engine: LocalEngine,
    model: Path,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    eos: int = json.loads((model / "config.json").read_text())["eos_token_id"]
    (_, plain) = await answers(clients.first, [{}])
    word = plain["choices"][0]["message"]["content"].split()[3]
    asked = options(eos, word)
    sent = record_bodies(monkeypatch)
    unlinked = await answers(clients.first, asked)
    runs: list[Any] = []
    with OpenAI(base_url=engine.url, max_retries=0) as blocking:
        for _ in range(2):
            async with AsyncExitStack() as stack:
                if kind == "asynchronous":
                    await stack.enter_async_context(run("options"))
                    runs.append(await answers(clients.first, asked))
                else:
                    stack.enter_context(run("blocking options"))
                    runs.append(await answers(blocking, asked))
    bodies = len(asked) + 1
    assert len(sent) == 3 * bodies
    assert sent[:bodies] == sent[bodies : 2 * bodies] == sent[2 * bodies :]
    expected = [comparable(answer) for answer in unlinked]
    for found in runs:
        for fields, one, other in zip([None, *asked], found, expected, strict=True):
            assert comparable(one) == other, fields
    statuses = [answer["usage"]["prompt_stream"]["status"] for answer in runs[1][1:]]
    assert "hit" in statuses
