"""Answers and errors that clients get, with engines that follow scripts."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from flashmoa.moa.serve.chat_completions import without_urls
from tests.unit.moa.scripted_engine import NOWHERE, scripted_engine
from tests.unit.moa.serve.served import ask, served

SCRIPTS = {
    "plain": ["It is ", "18."],
    "halves": ["a", "\ud83d", "b"],
    "cut": ["It", ("end", "cut")],
}


@asynccontextmanager
async def serving(*layers: list[dict[str, Any]]) -> AsyncGenerator[httpx.AsyncClient]:
    """Serve a mixture; by default its models are on the scripted engine."""
    async with scripted_engine(SCRIPTS) as (engine, _):
        tables = [{"models": [{"engine": engine.url, **one} for one in layer]} for layer in layers]
        async with served({"layers": tables}) as http:
            yield http


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line for line in answer.text.split("\n") if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize("streams", [False, True])
async def test_half_a_surrogate_pair_does_no_harm(*, streams: bool) -> None:
    """Neither in an answer that an agent reads nor in the last one."""
    async with serving([{"model": "halves"}], [{"model": "halves"}]) as http:
        answer = await ask(http, stream=streams)
    assert answer.status_code == 200
    bodies = [answer.json()] if not streams else events(answer)
    texts = [one.get("message", one.get("delta")) for body in bodies for one in body["choices"]]
    assert "".join(text.get("content") or "" for text in texts) == "a\ufffdb"
    agents = bodies[-1]["flashmoa"]["agents"]
    assert [agent["status"] for agent in agents] == ["used", "used"]


@pytest.mark.parametrize("streams", [False, True])
async def test_answers_do_not_show_urls_of_engines(
    caplog: pytest.LogCaptureFixture, *, streams: bool
) -> None:
    gone: dict[str, Any] = {"engine": NOWHERE, "model": "gone"}
    twice: dict[str, Any] = {"engine": None, "engines": [NOWHERE, f"{NOWHERE}9"], "model": "gone"}
    async with serving([{"model": "plain"}, twice, {"model": "cut"}], [gone]) as http:
        answer = await ask(http, stream=streams)
    assert answer.status_code == 200 and "http" not in answer.text
    body = events(answer)[-1] if streams else answer.json()
    _, without_engine, cut, last = body["flashmoa"]["agents"]
    assert without_engine["problem"].startswith("engine 3 cannot be reached")
    assert without_engine["retries"][0].startswith("engine 2: engine 2 cannot be reached")
    assert cut["status"] == "failed" and "engine 1" in cut["problem"]
    assert "engine 2 cannot be reached" in last["problem"]
    assert body["flashmoa"]["substitution"]["problem"].startswith("engine 2 cannot be reached")
    assert NOWHERE in caplog.text


async def test_errors_do_not_show_urls_of_engines(caplog: pytest.LogCaptureFixture) -> None:
    gone: dict[str, Any] = {"engine": NOWHERE, "model": "gone"}
    async with serving([gone], [gone]) as http:
        answers = [await ask(http), await ask(http, stream=True)]
    assert answers[0].status_code == 502
    for answer in answers:
        # OpenAI's codes are texts.
        assert '"code": "502"' in answer.text
        assert "engine 1 cannot be reached" in answer.text and NOWHERE not in answer.text
    assert NOWHERE in caplog.text


ENGINES = {"http://gpu1:3000": "engine 1", "http://gpu1:30001": "engine 2", "http://gpu1": "other"}


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("http://gpu1:3000: cannot be reached.", "engine 1: cannot be reached."),
        ("http://gpu1:30001/v1 failed", "engine 2/v1 failed"),
        ("see http://gpu1.", "see other."),
        ("http://gpu1-b and http://gpu1.lan", "http://gpu1-b and http://gpu1.lan"),
    ],
)
def test_each_url_has_the_name_of_its_own_engine(text: str, seen: str) -> None:
    assert without_urls(text, ENGINES) == seen
