"""The router's queue, and what it reads of engines' messages; without engines."""

from __future__ import annotations

import json

import anyio
import httpx
import pytest

from flashmoa import cli
from flashmoa.router.blocks import text_blocks, token_blocks
from flashmoa.router.dispatcher import Dispatcher, NoEngine, QueueFull
from flashmoa.router.engines import Engine, Watch
from flashmoa.router.event_sources import EventSource
from flashmoa.router.fleet import merged
from flashmoa.router.flops import TokenCount
from flashmoa.router.forwarding import passed_on
from flashmoa.router.policies import EngineTraits
from flashmoa.router.prefix_aware import PrefixAware
from flashmoa.router.prompts import Prompts

pytestmark = pytest.mark.anyio
SMALL = EngineTraits(TokenCount(), saturation=20)
PROMPT = token_blocks([1] * 32)


async def test_requests_wait_in_order_and_whoever_leaves_makes_room() -> None:
    dispatcher = Dispatcher(PrefixAware(), most_waiting=2)
    dispatcher.join("a", SMALL)
    served: list[int] = []

    async def ask(number: int) -> None:
        async with dispatcher.place(token_blocks([number] * 32)) as place:
            served.append(number)
            place.computed()

    async with anyio.create_task_group() as group, dispatcher.place(PROMPT):
        group.start_soon(ask, 2)
        await anyio.wait_all_tasks_blocked()
        with anyio.CancelScope() as leaving:
            leaving.cancel()
            await ask(9)
        group.start_soon(ask, 3)
        await anyio.wait_all_tasks_blocked()
        assert served == [] and dispatcher.waiting == 2
        with pytest.raises(QueueFull):
            await ask(4)
    assert served == [2, 3] and dispatcher.waiting == 0


async def test_who_waits_for_an_engine_hears_that_none_is_left() -> None:
    dispatcher = Dispatcher(PrefixAware())
    dispatcher.join("a", SMALL)
    lost: list[str] = []

    async def ask() -> None:
        try:
            async with dispatcher.place(PROMPT) as place:
                lost.append(place.engine)
        except NoEngine:
            lost.append("nobody")

    async with dispatcher.place(PROMPT), anyio.create_task_group() as group:
        group.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        dispatcher.leave("a")
    dispatcher.join("b", SMALL)
    await ask()
    assert lost == ["nobody", "b"]


async def test_prompts_are_tokenised_by_the_engine_and_remembered() -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.host)
        if request.url.host == "plain":
            return httpx.Response(404)
        return httpx.Response(200, json={"tokens": [1] * 32})

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        prompts = Prompts(http, lambda: True, remembered=1)
        for _ in range(2):
            assert await prompts.blocks({"text": "a b"}, "http://ours", {}) == PROMPT
        assert await prompts.blocks({"input_ids": [1] * 32}, "http://ours", {}) == PROMPT
        salted = await prompts.blocks({"prompt": "a b", "cache_salt": "x"}, "http://ours", {})
        assert salted == token_blocks([1] * 32, salt="x")
        for text in ("c", "d"):
            plain = await prompts.blocks({"text": text * 80}, "http://plain", {})
            assert plain == text_blocks(text * 80)
    assert asked == ["ours", "ours", "plain"]


async def test_an_engine_too_busy_to_say_what_it_is_is_asked_again() -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if (path := request.url.path) == "/server_info" and path not in asked:
            asked.append(path)
            raise httpx.ReadTimeout("busy")
        config = json.dumps({"publisher": "zmq", "endpoint": "tcp://*:7"})
        return httpx.Response(200, json={"kv_events_config": config})

    dispatcher, engine = Dispatcher(PrefixAware()), Engine("http://engine")
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        watch = Watch(http, dispatcher)
        await watch.look(engine)
        assert not engine.is_up and not dispatcher.engines
        await watch.look(engine)
    assert engine.is_up and engine.events == (EventSource("tcp://engine:7"),)


async def test_an_engine_that_never_says_what_it_is_is_taken_all_the_same() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/server_info":
            raise httpx.ReadTimeout("busy")
        return httpx.Response(200, json={})

    dispatcher, engine = Dispatcher(PrefixAware()), Engine("http://engine")
    looks = 0
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        watch = Watch(http, dispatcher)
        while not engine.is_up and looks < 20:
            await watch.look(engine)
            looks += 1
    assert 1 < looks < 20 and list(dispatcher.engines) == ["http://engine"]


async def test_an_engine_that_hangs_is_waited_for_no_longer() -> None:
    silent = False

    async def answer(_request: httpx.Request) -> httpx.Response:
        if silent:
            raise httpx.ReadTimeout("silence")
        return httpx.Response(200, json={})

    dispatcher, engine = Dispatcher(PrefixAware()), Engine("http://engine")
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        patient, watch = (Watch(http, dispatcher, hung_seconds=s) for s in (60.0, 0.0))
        await watch.look(engine)
        silent = True
        with engine.attended() as waiting:
            # A busy one is slow, too.
            await patient.look(engine)
            assert engine.is_up
            await watch.look(engine)
            await anyio.sleep_forever()
        assert waiting.cancelled_caught and not engine.is_up and not dispatcher.engines
        silent = False
        await watch.look(engine)
    assert engine.is_up


def test_headers_that_concern_one_connection_stay_there() -> None:
    given = {"Authorization": "Bearer k", "Expect": "100-continue", "Content-Length": "9"}
    assert passed_on(given) == {"Authorization": "Bearer k"}


async def test_embeddings_have_prompts_too() -> None:
    async with httpx.AsyncClient() as http:
        prompts = Prompts(http, lambda: False)
        assert await prompts.blocks({"input": "a" * 200}, "", {}) == text_blocks("a" * 200)
        assert await prompts.blocks({"input": [1] * 32}, "", {}) == PROMPT
        many = await prompts.blocks({"input": ["a" * 100, "b" * 100]}, "", {})
        assert many.length == 50


def test_engines_are_told_of_as_one_that_does_what_all_can() -> None:
    one = {"capabilities": ["a", "b"], "context_length": 100, "prompt_streams": 1, "kv": [1]}
    other = {"capabilities": ["b"], "context_length": 50, "prompt_streams": 2, "kv": [2]}
    expected = {"capabilities": ["b"], "context_length": 50, "prompt_streams": 3, "kv": [1, 2]}
    assert merged([one, other]) == expected


def test_the_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    from flashmoa.cli import router

    with pytest.raises(SystemExit):
        router.main(["--help"])
    assert "--patience" in capsys.readouterr().out
    assert router.main(["--engine", "nonsense"]) == 1
    assert "nonsense" in capsys.readouterr().err
    assert "router" in cli._USAGE
