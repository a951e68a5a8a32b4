"""Answers and errors that clients get, with engines that follow scripts."""

import json
from collections.abc import MutableMapping
from typing import Any

import anyio
import httpx
import pytest

from flashmoa.moa.serve.application import sending_events
from flashmoa.moa.serve.chat_completions import without_urls
from tests.unit.moa.scripted_engine import NOWHERE
from tests.unit.moa.serve.served import ask, serving

SCRIPTS = {
    "plain": ["It is ", "18."],
    "halves": ["a", "\ud83d", "b"],
    "cut": ["It", ("end", "cut")],
}


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line for line in answer.text.split("\n") if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize("streams", [False, True])
async def test_half_a_surrogate_pair_does_no_harm(*, streams: bool) -> None:
    """An agent reads such an answer, and writes another."""
    async with serving(SCRIPTS, [{"model": "halves"}], [{"model": "halves"}]) as (_, http):
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
    first = [{"model": "plain"}, twice, {"model": "cut"}]
    async with serving(SCRIPTS, first, [gone]) as (_, http):
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
    async with serving(SCRIPTS, [gone], [gone]) as (_, http):
        answers = [await ask(http), await ask(http, stream=True)]
    assert answers[0].status_code == 502
    for answer in answers:
        # OpenAI's codes are texts.
        assert '"code": "502"' in answer.text
        assert "engine 1 cannot be reached" in answer.text and NOWHERE not in answer.text
    assert NOWHERE in caplog.text


async def test_a_path_with_a_slash_at_its_end_is_unknown() -> None:
    async with serving(SCRIPTS, [{"model": "plain"}], [{"model": "plain"}]) as (_, http):
        answer = await http.post("/v1/responses/?%80")
        assert answer.status_code == 404 and "location" not in answer.headers


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


@pytest.mark.parametrize(("in_file", "asked"), [(False, True), (True, None), (True, False)])
async def test_answers_of_all_agents_are_shown_on_request(
    *, in_file: bool, asked: bool | None
) -> None:
    more = {} if asked is None else {"flashmoa": {"show_answers": asked}}
    plain = [{"model": "plain"}]
    async with serving(SCRIPTS, plain, plain, show_answers=in_file) as (engine, http):
        records = (await ask(http, **more)).json()["flashmoa"]
    shown = [agent.get("text") for agent in records["agents"]]
    assert shown == ["It is 18." if asked is not False else None] * 2
    assert records["completion_tokens"] == 4
    assert not any("flashmoa" in body for body in engine.bodies)


class Client:
    """Records the bytes of an event stream, and tells when a second heartbeat has come."""

    def __init__(self) -> None:
        self.data = b""
        self.has_beaten_twice = anyio.Event()

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        self.data += message.get("body", b"")
        if self.data.count(b": ") >= 2:
            self.has_beaten_twice.set()


@pytest.mark.parametrize("seconds", [0.001, 3600])
async def test_comments_are_sent_only_without_events(seconds: float) -> None:
    client = Client()
    async with sending_events(client, seconds) as send_events:
        if seconds < 1:
            with anyio.fail_after(30):
                await client.has_beaten_twice.wait()
        await send_events([{"text": "é\u2028"}])
    parts = client.data.split(b"\n\n")
    sent = [part for part in parts if not part.startswith(b":")]
    assert sent == [b'data: {"text": "\\u00e9\\u2028"}', b"data: [DONE]", b""]
    assert (parts == sent) == (seconds > 1)
