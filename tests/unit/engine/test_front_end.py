"""The engines behind a front end of Dynamo: which are found, and where prompt streams are put."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from flashmoa._concurrency import run_cancelled
from flashmoa.engine import EngineClient, EngineInfo, front_end
from flashmoa.engine.front_end import FrontEnd
from flashmoa.engine.plain import Models, PlainServer
from flashmoa.engine.soon import SOON_SECONDS
from flashmoa.errors import (
    BadAnswer,
    EngineDraining,
    EngineError,
    EngineTimeout,
    EngineUnreachable,
    PluginMissing,
    RequestRefused,
)
from flashmoa.link import prompt_feed
from flashmoa.link.link import Link
from flashmoa.link.prompt import Prompt, Slot
from flashmoa.observe import Event, LinkClosed, LinkOpened, StreamFound
from tests.unit.link.hung_engine import HungEngine, hung_engine
from tests.waiting import until

pytestmark = pytest.mark.anyio


def instance(id_: int, address: str, endpoint: str = "generate") -> dict[str, Any]:
    transport = {"tcp": f"{address}/7f/dynamo/backend/{endpoint}"}
    return {"component": "backend", "endpoint": endpoint, "namespace": "dynamo",
            "instance_id": id_, "transport": transport}  # fmt: skip


class Worker(EngineClient):
    """An engine that says what it can do, or cannot be reached."""

    capabilities = ("render", "prompt_streams")

    async def info(self) -> EngineInfo:
        if "dead" in self.url:
            raise EngineUnreachable(f"{self.url} cannot be reached")
        names = ["render"] if "decodes" in self.url else list(self.capabilities)
        return EngineInfo.model_construct(capabilities=names)


class Dynamo:
    """A front end with these instances, which places prompts on one of them."""

    def __init__(self, *instances: dict[str, Any]) -> None:
        self.instances = list(instances)
        self.owner = "nvidia"
        self.places: dict[str, Any] = {}
        self.placed: list[Mapping[str, Any]] = []

    async def ask(self, method: str, path: str, answer: Any, body: Any) -> Any:
        if (method, path) == ("GET", "/v1/models"):
            return answer.model_validate({"data": [{"id": "m", "owned_by": self.owner}]})
        if (method, path) == ("GET", "/health"):
            return answer.model_validate({"status": "healthy", "instances": self.instances})
        assert (method, path) == ("POST", "/v1/completions")
        self.placed.append(body)
        return answer.model_validate({"nvext": {"worker_id": self.places}})


@pytest.fixture(autouse=True)
def always_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for workers each time."""
    monkeypatch.setattr(front_end, "_FRESH_SECONDS", 0.0)
    monkeypatch.setattr(front_end, "_NONE_SECONDS", 0.0)


@asynccontextmanager
async def behind(dynamo: Dynamo) -> AsyncGenerator[FrontEnd[Worker]]:
    found = FrontEnd(dynamo.ask, Worker)
    yield found
    await found.close()


async def test_a_stream_is_put_where_the_front_end_would_send_its_request() -> None:
    large = 2**63 + 7
    dynamo = Dynamo(
        instance(1, "10.0.0.1:30001"),
        instance(large, "[fd00::2]:30001"),
        instance(large, "[fd00::2]:30001", "worker_kv_query"),
        instance(3, "dead:30001"),
        instance(4, "decodes:30001"),
        {**instance(5, ""), "transport": {"nats_tcp": "subject"}},
    )
    async with behind(dynamo) as found:
        assert not found.is_known
        for places, url in [
            ({"decode_worker_id": 1, "prefill_worker_id": None}, "http://10.0.0.1:30000"),
            ({"decode_worker_id": 4, "prefill_worker_id": large}, "http://[fd00::2]:30000"),
        ]:
            dynamo.places = places
            engine = await found.place("The plan so far", "m")
            assert engine is not None and engine.url == url
        assert found.is_known
        assert {body["prompt"] for body in dynamo.placed} == {"The plan so far"}
        for id_ in (3, 4, 5):
            dynamo.places = {"decode_worker_id": id_}
            with pytest.raises(EngineUnreachable, match="serve --dynamo"):
                await found.place("", "m")


async def test_workers_that_come_and_go_are_noticed() -> None:
    dynamo = Dynamo()
    async with behind(dynamo) as found:
        assert await found.any_engine() is None
        assert await found.place("", "m") is None
        dynamo.instances = [instance(1, "a:1001"), instance(2, "b:1001")]
        first = await found.any_engine()
        assert first is not None and first.url == "http://a:1000"
        dynamo.instances = [instance(2, "b:1001")]
        second = await found.any_engine()
        assert second is not None and second.url == "http://b:1000"
        dynamo.instances = []
        assert await found.any_engine() is None and not found.is_known


async def test_a_worker_that_cannot_be_reached_is_left_out_while_it_is_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(front_end, "_FRESH_SECONDS", 0.0)
    dynamo = Dynamo(instance(1, "a:1001"), instance(2, "b:1001"))
    dynamo.places = {"decode_worker_id": 1}
    async with behind(dynamo) as found:
        first = await found.place("", "m")
        assert first is not None and first is await found.any_engine()
        assert found.drop(first)
        second = await found.any_engine()
        assert second is not None and second.url == "http://b:1000"
        # The front end sends requests on from there.
        assert await found.place("", "m") is second
        assert not found.drop(second)
        assert await found.place("", "m") is None


async def test_workers_stay_known_while_their_front_end_restarts() -> None:
    class Restarting(Dynamo):
        is_down = False

        async def ask(self, method: str, path: str, answer: Any, body: Any) -> Any:
            if self.is_down:
                raise EngineUnreachable("it cannot be reached")
            return await super().ask(method, path, answer, body)

    dynamo = Restarting(instance(1, "a:1001"))
    async with behind(dynamo) as found:
        first = await found.any_engine()
        dynamo.is_down = True
        assert first is not None and await found.any_engine() is first


async def test_all_who_ask_at_first_wait_for_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_end, "_FRESH_SECONDS", 60.0)
    asked = 0

    class Slow(Dynamo):
        async def ask(self, method: str, path: str, answer: Any, body: Any) -> Any:
            nonlocal asked
            asked += 1
            await anyio.lowlevel.checkpoint()
            return await super().ask(method, path, answer, body)

    engines: list[Worker | None] = []
    async with behind(Slow(instance(1, "a:1001"))) as found:

        async def ask() -> None:
            engines.append(await found.any_engine())

        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(ask)
        assert [engine and engine.url for engine in engines] == ["http://a:1000"] * 3
    assert asked == 2


async def test_a_worker_that_does_not_answer_holds_up_the_first_who_asks_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may be a machine that is gone, or one whose ports are closed to clients."""
    assert front_end._INFO_SECONDS < SOON_SECONDS
    monkeypatch.setattr(front_end, "_INFO_SECONDS", 0.01)
    asked: list[str] = []

    class Silent(Worker):
        async def info(self) -> EngineInfo:
            asked.append(self.url)
            if "silent" in self.url:
                await anyio.sleep_forever()
            return await super().info()

    dynamo = Dynamo(instance(1, "silent:1001"), instance(2, "decodes:1001"))
    found = FrontEnd(dynamo.ask, Silent)
    assert await found.any_engine() is None
    # It is not taken for a server without workers, which is left alone for another time.
    assert found._fresh_until > time.monotonic()
    dynamo.instances.append(instance(3, "a:1001"))
    found._fresh_until = 0.0
    for _ in range(3):
        engine = await found.any_engine()
        assert engine is not None and engine.url == "http://a:1000"
    assert sorted(asked) == ["http://a:1000", "http://decodes:1000", "http://silent:1000"]
    found._left_out = {id_: each._replace(until=0.0) for id_, each in found._left_out.items()}
    await found.any_engine()
    assert asked.count("http://silent:1000") == 2
    await found.close()


async def test_streams_may_be_released_while_the_connections_are_closed() -> None:
    class Closing(Worker):
        async def close(self) -> None:
            found.find_stream("http://late 1")
            await super().close()

    found = FrontEnd(Dynamo(instance(1, "a:1001")).ask, Closing)
    assert await found.any_engine() is not None
    await found.close()


async def test_a_server_that_is_no_front_end_is_left_alone() -> None:
    class Other(Dynamo):
        async def ask(self, method: str, path: str, answer: Any, body: Any) -> Any:
            raise PluginMissing("no such route")

    stock = Dynamo(instance(1, "a:1001"))
    stock.owner = "sglang"
    for server in (Other(), stock):
        async with behind(server) as found:
            assert await found.any_engine() is None


class Failing(Dynamo):
    """A front end that answers to GET ``path`` with an error."""

    def __init__(self, path: str, error: EngineError) -> None:
        super().__init__()
        self.path, self.error = path, error
        self.asked = 0

    async def ask(self, method: str, path: str, answer: Any, body: Any) -> Any:
        self.asked += 1
        if path == self.path:
            raise self.error
        return await super().ask(method, path, answer, body)


BUSY = EngineDraining("model discovery in progress", 503, "error")


@pytest.mark.parametrize(
    "starting",
    [
        Failing("", BUSY),
        Failing("/health", BUSY),
        Failing("/v1/models", BUSY),
        Failing("/health", EngineTimeout("it did not answer in time")),
    ],
    ids=["lists none", "has found none", "has no models", "is silent"],
)
async def test_a_front_end_without_workers_yet_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, starting: Failing
) -> None:
    monkeypatch.setattr(front_end, "_NONE_SECONDS", 60.0)
    async with behind(starting) as found:
        assert await found.any_engine() is None
        assert found.expects_workers and not found.is_known
        starting.path, starting.instances = "", [instance(1, "a:1001")]
        engine = await found.any_engine()
        assert engine is not None and engine.url == "http://a:1000"


@pytest.mark.parametrize(
    "server",
    [
        Failing("/health", PluginMissing("no such route")),
        Failing("/health", BadAnswer("its health has no instances")),
        Failing("/health", RequestRefused("it needs a key", 401, "unauthorized")),
        Failing("/v1/models", PluginMissing("no such route")),
    ],
    ids=["no health", "another health", "a key", "no models"],
)
async def test_another_kind_of_server_is_not_asked_again_at_once(
    monkeypatch: pytest.MonkeyPatch, server: Failing
) -> None:
    monkeypatch.setattr(front_end, "_NONE_SECONDS", 60.0)
    async with behind(server) as found:
        assert await found.any_engine() is None
        assert not found.expects_workers
        asked = server.asked
        assert await found.any_engine() is None
        assert server.asked == asked


@pytest.mark.parametrize(("scheme", "sent"), [("http", {"Bearer k", "n"}), ("https", {None})])
async def test_keys_that_tls_keeps_secret_are_not_sent_to_workers_without(
    scheme: str, sent: set[str | None]
) -> None:
    url = f"{scheme}://front-end"
    async with EngineClient(url, api_key="k", headers={"Tenant": "n"}) as client:
        worker = client._front_end._engine("http://worker:30000")
        assert {worker._http.headers.get(name) for name in ("Authorization", "Tenant")} == sent


@asynccontextmanager
async def front_end_of(
    *workers: HungEngine,
    placed: dict[str, int] | None = None,
    instances: list[dict[str, Any]] | None = None,
) -> AsyncGenerator[EngineClient]:
    """Serve a front end with workers, whose engines have all of the plugin's routes.

    Args:
        placed: where prompts go, which may be changed: ``{"decode_worker_id": 0}``.
        instances: an empty list for what is listed, which may be changed, too.
    """
    instances = [] if instances is None else instances
    for number, worker in enumerate(workers):
        host, port = worker.url.removeprefix("http://").split(":")
        instances.append(instance(number, f"{host}:{int(port) + 1}"))
        worker.answers = {"/flashmoa/info": INFO}
    async with hung_engine() as server:
        server.lacks |= {"open", "render"}
        server.answers = {
            "/health": {"instances": instances},
            "/v1/completions": {"nvext": {"worker_id": placed or {"decode_worker_id": 0}}},
            "/v1/models": {"data": [{"id": "m", "owned_by": "nvidia"}]},
        }
        async with EngineClient(server.url, model="m") as client:
            yield client


INFO = {
    "plugin": {"name": "p", "version": "1"}, "sglang": {"version": "1"}, "model": {},
    "capabilities": ["render", "prompt_streams"], "context_length": 9, "prompt_streams": 0,
    "kv": [], "tokenizer": {},
}  # fmt: skip


async def test_a_link_through_a_front_end_sends_the_whole_prompt_to_the_worker() -> None:
    """Its request names no stream, so the stream must have all of the prompt to be found by it."""
    events: list[Event] = []
    async with hung_engine() as worker, front_end_of(worker) as client:
        assert await client.render([{"role": "user", "content": "x"}]) == "x"
        prompt = Prompt(["known", slot := Slot("writer"), "rest"])
        link = Link(client, prompt, agent="reader", listener=events.append)
        async with anyio.create_task_group() as group:
            group.start_soon(link.run)
            await until(lambda: link.stream_id is not None)
            link.feed("writer", "text")
            link.close_slot("writer")
            assert link.claim() is None
            assert link.used_id is not None and worker.url in link.used_id
        assert slot.is_open is False
        sent = [body for route, body in worker.requests if route in ("open", "append")]
        assert "".join(body.get("text") or "" for body in sent) == "knowntextrest"
        assert sent[-1]["end"]
        assert "delete" not in worker.routes()
        # Once the call has ended, the stream is freed if its request went to another worker, also
        # while the team is being closed.
        assert link.is_unnamed
        await run_cancelled(link.delete_stream)
        assert not link.is_unnamed
        assert worker.routes().count("delete") == 1
        (found,) = [event for event in events if isinstance(event, StreamFound)]
        assert (found.stream_id, found.figures) == (link.stream_id, None)


async def test_a_stream_that_its_request_cannot_find_is_released() -> None:
    """A request that comes while a text is open brings another prompt than was expected."""
    events: list[Event] = []
    async with hung_engine() as worker, front_end_of(worker) as client:
        prompt = Prompt(["known", Slot("writer"), "rest"])
        link = Link(client, prompt, agent="reader", listener=events.append)
        async with anyio.create_task_group() as group:
            group.start_soon(link.run)
            await until(lambda: link.stream_id is not None)
            assert link.claim() is None
        assert worker.routes().count("delete") == 1
        assert not link.is_unnamed
    (closed,) = [event for event in events if isinstance(event, LinkClosed)]
    assert closed.reason == "unfinished"
    # The call's events name the stream, so that reports say why it had no use of it.
    assert link.used_id == closed.stream_id


@pytest.mark.parametrize("fault", ["ends its streams", "hangs", "leaves"])
async def test_a_stream_whose_worker_fails_is_opened_on_another_one(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_feed, "WORKER_TIMEOUT_SECONDS", 0.1)
    monkeypatch.setattr(front_end, "_FRESH_SECONDS", 0.0)
    instances: list[dict[str, Any]] = []
    placed = {"decode_worker_id": 0}
    events: list[Event] = []
    async with (
        hung_engine() as first,
        hung_engine() as second,
        front_end_of(first, second, placed=placed, instances=instances) as client,
    ):
        prompt = Prompt(["known", slot := Slot("writer"), "rest"])
        link = Link(client, prompt, agent="reader", listener=events.append)
        async with anyio.create_task_group() as group:
            group.start_soon(link.run)
            await until(lambda: link.stream_id is not None)
            placed["decode_worker_id"] = 1
            assert link.stream_id is not None
            if fault == "hangs":
                first.hangs.add("append")
            elif fault == "leaves":
                del instances[0]
            else:
                first.gone.add(link.stream_id.split()[-1])
            link.feed("writer", "some ")
            await second.until("open")
            link.feed("writer", "text")
            link.close_slot("writer")
            await until(lambda: any(body.get("end") for _, body in second.requests))
            assert link.claim() is None
        assert not slot.is_open
        sent = [body.get("text") or "" for route, body in second.requests if route != "other"]
        assert "".join(sent) == "knownsome textrest"
        assert "delete" in first.routes()
        # These engines answer each append as they answered the opening.
        streams = [event.stream_id for event in events if isinstance(event, LinkOpened)]
        opened = list(dict.fromkeys(streams))
        assert [stream_id.split()[0] for stream_id in opened] == [first.url, second.url]
        (closed,) = [event for event in events if isinstance(event, LinkClosed)]
        assert (closed.stream_id, closed.reason) == (opened[-1], "used")


@pytest.mark.parametrize("looks_again", [True, False])
async def test_what_is_being_sent_to_a_worker_that_leaves_arrives(looks_again: bool) -> None:
    """Other links may hold its client, in other event loops, too."""
    instances: list[dict[str, Any]] = []
    async with hung_engine() as worker, front_end_of(worker, instances=instances) as client:
        stream = await client.open_stream(text="a prompt")
        engine, own_id = client._find_stream(stream.id)
        instances.clear()
        assert not await client.takes_requests(stream.id)
        assert (await engine.append(own_id, 0, text="a text")).next_seq == 0
        await (client.takes_requests(stream.id) if looks_again else client.close())
        assert engine._http.is_closed


async def test_links_wait_for_workers_that_all_restart() -> None:
    """Their front end has no prompt streams itself, and is not taken for a plain server."""
    instances: list[dict[str, Any]] = []
    async with hung_engine() as worker, front_end_of(worker, instances=instances) as client:
        await client.render([{"role": "user", "content": "x"}])
        (listed,) = instances
        instances.clear()
        client._front_end._fresh_until = 0.0
        with pytest.raises(EngineUnreachable, match="no worker"):
            await client.open_stream(text="a prompt")
        assert client.is_front_end
        client._front_end._fresh_until = 0.0
        instances.append(listed)
        assert (await client.open_stream(text="a prompt")).id.startswith(worker.url)


async def test_nothing_is_remembered_of_a_front_end_without_workers_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(front_end, "_NONE_SECONDS", 60.0)
    instances: list[dict[str, Any]] = []
    listed = Models.model_validate({"data": [{"id": "served", "max_model_len": 9}]})
    asked: list[str] = []
    async with hung_engine() as worker, front_end_of(worker, instances=instances) as client:
        (first,) = instances
        instances.clear()
        client.plain = PlainServer(client.ask, None)
        models = Models()

        async def ask(method: str, path: str, answer: Any, body: Any = None) -> Any:
            asked.append(path)
            return (
                models
                if path == "/v1/models"
                else await EngineClient.ask(client, method, path, answer, body)
            )

        monkeypatch.setattr(client.plain, "_call", ask)
        for _ in range(2):
            with pytest.raises(EngineUnreachable, match="no worker"):
                await client.render([{"role": "user", "content": "x"}])
            with pytest.raises(EngineUnreachable, match="no worker"):
                await client.open_stream(text="a prompt")
            assert await client.context_length("served") is None
            assert await client.plain.model() == "default"
        instances.append(first)
        models = listed
        assert await client.render([{"role": "user", "content": "x"}]) == "x"
        assert (await client.open_stream(text="a prompt")).id.startswith(worker.url)
        assert await client.context_length("served") == 9
        assert await client.plain.model() == "served"
