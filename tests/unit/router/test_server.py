"""Test the router's queue, and how it reads engines' messages, without engines."""

from __future__ import annotations

import json
from pathlib import Path

import anyio
import httpx
import pytest
from anyio.abc import SocketAttribute, SocketStream
from starlette.requests import Request

from flashmoa import cli
from flashmoa.router.blocks import token_blocks
from flashmoa.router.client_requests import ForwardedRequest, RetryRule, select_forwarded_headers
from flashmoa.router.connections import open_connections
from flashmoa.router.dispatcher import Dispatcher
from flashmoa.router.engine_pool import merge_info
from flashmoa.router.engines import EngineMonitor, RoutedEngine
from flashmoa.router.errors import EngineLost, NoEngine, QueueFull
from flashmoa.router.flops import TokenCount
from flashmoa.router.kv_events import EventSource
from flashmoa.router.policies import EngineTraits
from flashmoa.router.prefix_aware import PrefixAware

pytestmark = pytest.mark.anyio
SMALL = EngineTraits(TokenCount(), saturation=20)
NOT_FOUND = httpx.Response(404, json={"detail": "Not Found"})
PROMPT = token_blocks([1] * 32)


async def test_requests_wait_in_order_and_a_leaving_one_makes_room() -> None:
    dispatcher = Dispatcher(PrefixAware(), max_waiting=2)
    dispatcher.join("a", SMALL)
    served: list[int] = []

    async def ask(number: int) -> None:
        async with dispatcher.place(token_blocks([number] * 32)) as place:
            served.append(number)
            place.finish_prefill()

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


async def test_queue_of_no_length_refuses_only_requests_that_would_wait() -> None:
    dispatcher = Dispatcher(PrefixAware(), max_waiting=0)
    dispatcher.join("a", SMALL)
    async with dispatcher.place(PROMPT) as place:
        assert place.engine == "a"
        with pytest.raises(QueueFull):
            async with dispatcher.place(token_blocks([2] * 32)):
                pass
    assert dispatcher.waiting == 0


async def test_short_sibling_overtakes_the_queue_of_a_full_engine() -> None:
    dispatcher = Dispatcher(PrefixAware())
    dispatcher.join("a", SMALL)
    async with dispatcher.place(PROMPT), anyio.create_task_group() as group:

        async def ask() -> None:
            async with dispatcher.place(token_blocks([2] * 32)):
                pass

        group.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        assert dispatcher.waiting == 1
        with anyio.fail_after(5):
            async with dispatcher.place(token_blocks([1] * 33)) as place:
                assert place.engine == "a" and dispatcher.waiting == 1
        group.cancel_scope.cancel()


async def test_waiting_request_fails_if_no_engine_is_left() -> None:
    dispatcher = Dispatcher(PrefixAware())
    dispatcher.join("a", SMALL)
    outcomes: list[str] = []

    async def ask() -> None:
        try:
            async with dispatcher.place(token_blocks([2] * 32)) as place:
                outcomes.append(place.engine)
        except NoEngine:
            outcomes.append("none")

    async with dispatcher.place(PROMPT), anyio.create_task_group() as group:
        group.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        dispatcher.leave("a")
    dispatcher.join("b", SMALL)
    await ask()
    assert outcomes == ["none", "b"]


async def test_engine_too_busy_to_send_its_settings_is_asked_again() -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if (path := request.url.path) == "/server_info" and path not in asked:
            asked.append(path)
            raise httpx.ReadTimeout("busy")
        config = json.dumps({"publisher": "zmq", "endpoint": "tcp://*:7"})
        return httpx.Response(200, json={"kv_events_config": config})

    dispatcher, engine = Dispatcher(PrefixAware()), RoutedEngine("http://engine")
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        monitor = EngineMonitor(http, dispatcher)
        await monitor.probe(engine)
        assert not engine.is_up and not dispatcher.engines
        await monitor.probe(engine)
    assert engine.is_up and engine.events == (EventSource("tcp://engine:7"),)


async def test_draining_engine_gets_no_requests() -> None:
    status = 200

    def answer(request: httpx.Request) -> httpx.Response:
        is_probe = request.url.path == "/health/ready"
        return httpx.Response(status if is_probe else 200, json={})

    dispatcher, engine = Dispatcher(PrefixAware()), RoutedEngine("http://engine")
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        monitor = EngineMonitor(http, dispatcher)
        await monitor.probe(engine)
        for status in (503, 404, 503):  # A stock engine has no such route.
            await monitor.probe(engine)
            assert engine.is_up == (status == 404) == bool(dispatcher.engines)


@pytest.mark.parametrize(
    ("error", "stays", "stays_after_a_loss"),
    [
        (httpx.ReadTimeout("busy"), True, False),
        (httpx.RemoteProtocolError("closed"), True, False),
        (httpx.ConnectError("refused"), False, False),
        (httpx.ConnectTimeout("its host is gone"), False, False),
        (None, True, True),
    ],
)
async def test_silent_engine_leaves_only_if_it_also_lost_a_connection(
    error: Exception | None, stays: bool, stays_after_a_loss: bool
) -> None:
    failure: Exception | None = None

    def answer(_request: httpx.Request) -> httpx.Response:
        if failure is not None:
            raise failure
        return httpx.Response(200, json={})

    dispatcher, engine = Dispatcher(PrefixAware()), RoutedEngine("http://engine")
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        monitor = EngineMonitor(http, dispatcher)
        for check, expected in ((monitor.probe, stays), (monitor.recheck, stays_after_a_loss)):
            failure = None
            await monitor.probe(engine)
            failure = error
            await check(engine)
            assert engine.is_up == bool(dispatcher.engines) == expected


@pytest.mark.parametrize(
    ("info", "saturation", "blocks"),
    [
        ({"dp_size": 2, "chunked_prefill_size": 100, "max_total_num_tokens": 1600}, 240, 200),
        ({"dp_size": 1, "chunked_prefill_size": -1}, 9830, 1 << 16),
        ({}, 9830, 1 << 16),
    ],
)
@pytest.mark.parametrize("told", [None, 50])
async def test_settings_of_one_rank_are_multiplied_by_ranks_that_cannot_be_named(
    info: dict[str, int], saturation: int, blocks: int, told: int | None
) -> None:
    """An engine with the plugin tells its largest forward, which may be smaller than its chunks."""
    joined: list[EngineTraits] = []

    class RecordingPolicy(PrefixAware):
        def join(self, engine: str, traits: EngineTraits) -> None:
            joined.append(traits)
            super().join(engine, traits)

    def reply(request: httpx.Request) -> httpx.Response:
        if request.url.path != "/flashmoa/info":
            return httpx.Response(200, json=info)
        return httpx.Response(200, json={"largest_forward": told}) if told else NOT_FOUND

    answer = httpx.MockTransport(reply)
    if told is not None:
        saturation = int(1.2 * told) * info.get("dp_size", 1)
    async with httpx.AsyncClient(transport=answer) as http:
        await EngineMonitor(http, Dispatcher(RecordingPolicy())).probe(
            RoutedEngine("http://engine")
        )
    assert joined == [EngineTraits(TokenCount(), saturation, blocks)]


async def test_engine_that_has_the_prompt_takes_its_request_at_once() -> None:
    policy = PrefixAware()
    dispatcher = Dispatcher(policy)
    dispatcher.join("a", SMALL)
    async with dispatcher.place(PROMPT):
        assert policy.is_saturated("a")
        with dispatcher.place_at("a", other := token_blocks([2] * 33)) as place:
            assert place.engine == "a" and policy.load("a") == 32
            place.finish_prefill()
    assert policy.matched_tokens("a", other) == 32
    with dispatcher.place_at("gone", PROMPT) as place:
        place.finish_prefill()


def test_forwarded_target_is_the_one_that_the_client_sent() -> None:
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/tokenize/a b",
        "raw_path": b"/tokenize/a%20b",
        "query_string": b"c=%2F",
        "headers": [(b"host", b"x/flush_cache?")],
    }
    call = ForwardedRequest.from_client(Request(scope), b"")
    assert (call.path, call.target) == ("/tokenize/a b", "/tokenize/a%20b?c=%2F")
    del scope["raw_path"]
    assert ForwardedRequest.from_client(Request(scope), b"").target == "/tokenize/a%20b?c=%2F"


async def test_connection_is_probed_while_an_answer_takes_long() -> None:
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
        port = listener.extra(SocketAttribute.local_port)
        timers: list[str] = []

        async def never_answer(client: SocketStream) -> None:
            async with client:
                await client.receive()
                known = await anyio.Path("/proc/net/tcp").read_text()
                lines = [line.split() for line in known.splitlines()]
                timers.extend(line[5][:2] for line in lines if line[2].endswith(f":{port:04X}"))

        async with open_connections() as sending, anyio.create_task_group() as group:
            group.start_soon(listener.serve, never_answer)
            with pytest.raises(EngineLost):
                await sending.exchange(
                    "POST", f"http://127.0.0.1:{port}/", {}, b"", RetryRule.NEVER
                )
            group.cancel_scope.cancel()
    # This is the kernel's name for a keep-alive timer (proc(5)).
    assert timers == ["02"]


def test_headers_of_one_connection_are_not_passed_on() -> None:
    headers = {"Authorization": "Bearer k", "Expect": "100-continue", "Content-Length": "9"}
    assert select_forwarded_headers(headers) == {"Authorization": "Bearer k"}


def test_merged_info_has_the_abilities_of_all_engines() -> None:
    one = {"capabilities": ["a", "b"], "context_length": 100, "prompt_streams": 1, "kv": [1]}
    other = {"capabilities": ["b"], "context_length": 50, "prompt_streams": 2, "kv": [2]}
    expected = {"capabilities": ["b"], "context_length": 50, "prompt_streams": 3, "kv": [1, 2]}
    assert merge_info([one, other]) == expected | {"data_parallel_ranks": 1}
    # An engine without the plugin has no abilities, and others cannot lend it theirs.
    assert merge_info([{}, one])["capabilities"] == []
    assert merge_info([{}, one])["context_length"] == 100


def test_router_command_has_help_and_refuses_bad_urls(capsys: pytest.CaptureFixture[str]) -> None:
    from flashmoa.cli import router

    with pytest.raises(SystemExit):
        router.main(["--help"])
    assert "--patience" in capsys.readouterr().out
    assert router.main(["--engine", "nonsense"]) == 1
    assert "nonsense" in capsys.readouterr().err
    assert "router" in cli._USAGE


def test_router_command_names_a_model_config_that_is_not_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from flashmoa.cli import router

    config = tmp_path / "config.json"
    config.write_text("model_type: llama")
    command = ["--engine", "http://127.0.0.1:9", "--model-config", str(config)]
    assert router.main(command) == 1
    assert f"--model-config {config} is not JSON: Expecting value" in capsys.readouterr().err
