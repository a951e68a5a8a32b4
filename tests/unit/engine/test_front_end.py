"""The engines behind a front end of Dynamo: finding them, and placing prompt streams on them."""

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from flashmoa import errors
from flashmoa._concurrency import all_of, run_cancelled
from flashmoa.engine import EngineClient, EngineInfo, front_end, soon
from flashmoa.engine.front_end import FrontEnd
from flashmoa.engine.plain import Models, PlainServer
from flashmoa.link import prompt_feed
from flashmoa.link.link import Link
from flashmoa.link.prompt import Prompt, Slot
from flashmoa.observe import Event, LinkClosed, LinkOpened, StreamFound
from tests.unit.events import of_kind
from tests.unit.link.hung_engine import HungEngine, hung_engine
from tests.waiting import until

MESSAGES = [{"role": "user", "content": "x"}]


def instance(id_: int, address: str, endpoint: str = "generate") -> dict[str, Any]:
    transport = {"tcp": f"{address}/7f/dynamo/backend/{endpoint}"}
    return {"component": "backend", "endpoint": endpoint, "namespace": "dynamo",
            "instance_id": id_, "transport": transport}  # fmt: skip


class Worker(EngineClient):
    """An engine whose URL says whether it is dead, silent or has no prompt streams."""

    asked: list[str]

    async def info(self) -> EngineInfo:
        self.asked.append(self.url)
        if "dead" in self.url:
            raise errors.EngineUnreachable(f"{self.url} cannot be reached")
        if "silent" in self.url:
            await anyio.sleep_forever()
        names = ["render"] if "decodes" in self.url else ["render", "prompt_streams"]
        return EngineInfo.model_construct(capabilities=names)


class Dynamo:
    """A front end with the given instances. It places prompts on a chosen instance.

    Attributes:
        fails: the errors that requests raise, by path.
    """

    def __init__(self, *instances: dict[str, Any], owner: str = "nvidia") -> None:
        self.instances = list(instances)
        self.owner = owner
        self.places: dict[str, Any] = {}
        self.placed: list[Mapping[str, Any]] = []
        self.fails: dict[str, errors.EngineError] = {}
        self.asked = 0

    async def ask(self, method: str, path: str, answer: Any, body: Any) -> Any:
        self.asked += 1
        await anyio.lowlevel.checkpoint()
        if path in self.fails:
            raise self.fails[path]
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
    monkeypatch.setattr(front_end, "_LIST_LIFETIME_SECONDS", 0.0)
    monkeypatch.setattr(front_end, "_OTHER_SERVER_SECONDS", 0.0)
    monkeypatch.setattr(Worker, "asked", [], raising=False)


@asynccontextmanager
async def behind(dynamo: Dynamo) -> AsyncGenerator[FrontEnd[Worker]]:
    found = FrontEnd(dynamo.ask, Worker)
    yield found
    await found.close()


async def any_url(found: FrontEnd[Worker]) -> str | None:
    engine = await found.any_engine()
    return engine and engine.url


async def test_a_stream_is_put_where_its_request_goes() -> None:
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
        for decodes, prefills, url in (1, None, "10.0.0.1"), (4, large, "[fd00::2]"):
            dynamo.places = {"decode_worker_id": decodes, "prefill_worker_id": prefills}
            engine = await found.place("The plan so far", "m")
            assert engine is not None and engine.url == f"http://{url}:30000"
        assert found.is_known
        assert {body["prompt"] for body in dynamo.placed} == {"The plan so far"}
        for id_ in (3, 4, 5):
            dynamo.places = {"decode_worker_id": id_}
            with pytest.raises(errors.EngineUnreachable, match="serve --dynamo"):
                await found.place("", "m")


async def test_workers_that_come_and_go_are_noticed() -> None:
    dynamo = Dynamo()
    async with behind(dynamo) as found:
        assert await any_url(found) is None
        assert await found.place("", "m") is None
        a, b = instance(1, "a:1001"), instance(2, "b:1001")
        for listed, url in ([a, b], "http://a:1000"), ([b], "http://b:1000"), ([], None):
            dynamo.instances = listed
            assert await any_url(found) == url and found.is_known == bool(url)
        # They stay known during a restart of the front end.
        dynamo.instances = [a]
        first = await found.any_engine()
        dynamo.fails = {"/v1/models": errors.EngineUnreachable("it cannot be reached")}
        assert first is not None and await found.any_engine() is first


async def test_an_unreachable_worker_is_left_out() -> None:
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


async def test_all_who_ask_at_first_wait_for_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_end, "_LIST_LIFETIME_SECONDS", 60.0)
    dynamo = Dynamo(instance(1, "a:1001"))
    async with behind(dynamo) as found:
        urls = await all_of([lambda: any_url(found)] * 3)
    assert urls == ["http://a:1000"] * 3 and dynamo.asked == 2


async def test_a_silent_worker_delays_the_first_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be a machine that is gone, or one whose ports are closed to clients."""
    monkeypatch.setattr(front_end, "SOON_SECONDS", 0.02)
    dynamo = Dynamo(instance(1, "silent:1001"), instance(2, "decodes:1001"))
    async with behind(dynamo) as found:
        assert await any_url(found) is None
        # It is not taken for a server without workers, which is left alone for another time.
        assert found._fresh_until > time.monotonic()
        dynamo.instances.append(instance(3, "a:1001"))
        found._fresh_until = 0.0
        for _ in range(3):
            assert await any_url(found) == "http://a:1000"
        assert sorted(Worker.asked) == [f"http://{one}:1000" for one in ("a", "decodes", "silent")]
        found._left_out = {id_: each._replace(until=0.0) for id_, each in found._left_out.items()}
        await found.any_engine()
        assert Worker.asked.count("http://silent:1000") == 2


async def test_streams_may_be_released_while_closing() -> None:
    class Closing(Worker):
        async def close(self) -> None:
            found.find_stream("http://late 1")
            await super().close()

    found = FrontEnd(Dynamo(instance(1, "a:1001")).ask, Closing)
    assert await found.any_engine() is not None
    await found.close()


BUSY = errors.EngineDraining("model discovery in progress", 503, "error")


@pytest.mark.parametrize(
    ("path", "error", "may_start"),
    [
        ("", BUSY, True),  # It lists no workers.
        ("/health", BUSY, True),
        ("/v1/models", BUSY, True),
        ("/health", errors.EngineTimeout("it did not answer in time"), True),
        ("/health", errors.PluginMissing("no such route"), False),
        ("/health", errors.BadAnswer("its health has no instances"), False),
        ("/health", errors.RequestRefused("it needs a key", 401, "unauthorized"), False),
        ("/v1/models", errors.PluginMissing("no such route"), False),
        ("an engine", BUSY, False),
    ],
)
async def test_a_front_end_that_may_start_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, path: str, error: errors.EngineError, may_start: bool
) -> None:
    monkeypatch.setattr(front_end, "_OTHER_SERVER_SECONDS", 60.0)
    dynamo = Dynamo(owner="sglang" if path == "an engine" else "nvidia")
    dynamo.fails = {path: error}
    async with behind(dynamo) as found:
        assert await any_url(found) is None
        assert (found.expects_workers, found.is_known) == (may_start, False)
        dynamo.fails, dynamo.instances = {}, [instance(1, "a:1001")]
        asked = dynamo.asked
        assert await any_url(found) == ("http://a:1000" if may_start else None)
        assert (dynamo.asked > asked) == may_start


@pytest.mark.parametrize(("scheme", "sent"), [("http", {"Bearer k", "n"}), ("https", {None})])
async def test_secrets_are_not_sent_without_tls(scheme: str, sent: set[str | None]) -> None:
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
        instances: an empty list for the listed workers, which may be changed, too.
    """
    instances = [] if instances is None else instances
    for number, worker in enumerate(workers):
        host, port = worker.url.removeprefix("http://").split(":")
        instances.append(instance(number, f"{host}:{int(port) + 1}"))
        worker.answers = {"/flashmoa/info": INFO}
    async with hung_engine() as server, EngineClient(server.url, model="m") as client:
        server.lacks |= {"open", "render"}
        server.answers = {
            "/health": {"instances": instances},
            "/v1/completions": {"nvext": {"worker_id": placed or {"decode_worker_id": 0}}},
            "/v1/models": {"data": [{"id": "m", "owned_by": "nvidia"}]},
        }
        yield client


INFO = {
    "plugin": {"name": "p", "version": "1"}, "sglang": {"version": "1"}, "model": {},
    "capabilities": ["render", "prompt_streams"], "context_length": 9, "prompt_streams": 0,
    "kv": [], "tokenizer": {},
}  # fmt: skip


@asynccontextmanager
async def linking(client: EngineClient, events: list[Event]) -> AsyncGenerator[Link]:
    """Link a prompt that reads a writer's text. The link has a stream and must end by itself."""
    prompt = Prompt(["known", Slot("writer"), "rest"])
    link = Link(client, prompt, agent="reader", listener=events.append)
    async with anyio.create_task_group() as group:
        group.start_soon(link.run)
        await until(lambda: link.stream_id is not None)
        yield link


def sent_to(worker: HungEngine) -> list[dict[str, Any]]:
    return [body for route, body in worker.requests if route in ("open", "append")]


def texts_of(worker: HungEngine) -> str:
    return "".join(body.get("text") or "" for body in sent_to(worker))


async def test_a_link_through_a_front_end_sends_all() -> None:
    """Its request names no stream, so the stream must have all of the prompt to be found by it."""
    events: list[Event] = []
    async with hung_engine() as worker, front_end_of(worker) as client:
        assert await client.render(MESSAGES) == "x"
        async with linking(client, events) as link:
            link.feed("writer", "text")
            link.close_slot("writer")
            assert link.claim() is None
            assert link.used_id is not None and worker.url in link.used_id
        assert link.prompt.slots[0].is_open is False
        assert texts_of(worker) == "knowntextrest"
        assert sent_to(worker)[-1]["end"] and "delete" not in worker.routes()
        # Once the call has ended, the stream is freed if its request went to another worker, also
        # while the team is being closed.
        assert link.is_unnamed
        await run_cancelled(link.delete_stream)
        assert not link.is_unnamed
        assert worker.routes().count("delete") == 1
        (found,) = of_kind(events, StreamFound)
        assert (found.stream_id, found.figures) == (link.stream_id, None)


async def test_another_worker_renders_in_a_slow_ones_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soon, "SOON_SECONDS", 0.5)
    async with hung_engine() as one, hung_engine() as two, front_end_of(one, two) as client:
        slow, other = sorted((one, two), key=lambda worker: worker.url)
        slow.hangs.add("render")
        for _ in range(2):
            assert await client.render(MESSAGES) == "x"
        assert [worker.routes().count("render") for worker in (slow, other)] == [1, 2]
        # None is left.
        other.hangs.add("render")
        with pytest.raises(errors.EngineTimeout):
            await client.render(MESSAGES)


async def test_a_stream_that_cannot_be_found_is_released() -> None:
    """A request that comes while a text is open brings another prompt than was expected."""
    events: list[Event] = []
    async with hung_engine() as worker, front_end_of(worker) as client:
        async with linking(client, events) as link:
            assert link.claim() is None
        assert worker.routes().count("delete") == 1
        assert not link.is_unnamed
    (closed,) = of_kind(events, LinkClosed)
    # The call's events name the stream, so that reports say why the call did not use it.
    assert (closed.reason, closed.stream_id) == ("unfinished", link.used_id)


@pytest.mark.parametrize("fault", ["ends its streams", "hangs", "leaves"])
async def test_a_failed_workers_stream_moves(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "hangs":
        monkeypatch.setattr(prompt_feed, "WORKER_TIMEOUT_SECONDS", 1.0)
    instances: list[dict[str, Any]] = []
    placed = {"decode_worker_id": 0}
    events: list[Event] = []
    async with (
        hung_engine() as first,
        hung_engine() as second,
        front_end_of(first, second, placed=placed, instances=instances) as client,
    ):
        async with linking(client, events) as link:
            placed["decode_worker_id"] = 1
            if fault == "hangs":
                first.hangs.add("append")
            elif fault == "leaves":
                del instances[0]
            else:
                first.gone.add(str(link.stream_id).split()[-1])
            link.feed("writer", "some ")
            await second.until("open")
            link.feed("writer", "text")
            link.close_slot("writer")
            await until(lambda: any(body.get("end") for body in sent_to(second)))
            assert link.claim() is None
        assert not link.prompt.slots[0].is_open
        assert texts_of(second) == "knownsome textrest"
        assert "delete" in first.routes()
    # These engines answer each append as they answered the opening.
    opened = list(dict.fromkeys(event.stream_id for event in of_kind(events, LinkOpened)))
    assert [stream_id.split()[0] for stream_id in opened] == [first.url, second.url]
    (closed,) = of_kind(events, LinkClosed)
    assert (closed.stream_id, closed.reason) == (opened[-1], "used")


@pytest.mark.parametrize("looks_again", [True, False])
async def test_requests_to_a_worker_that_leaves_arrive(looks_again: bool) -> None:
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
        await client.render(MESSAGES)
        listed = instances.pop()
        with pytest.raises(errors.EngineUnreachable, match="no worker"):
            await client.open_stream(text="a prompt")
        assert client.is_front_end
        instances.append(listed)
        assert (await client.open_stream(text="a prompt")).id.startswith(worker.url)


async def test_a_starting_front_end_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_end, "_OTHER_SERVER_SECONDS", 60.0)
    instances: list[dict[str, Any]] = []
    models = Models()

    async def ask(method: str, path: str, answer: Any, body: Any = None) -> Any:
        return models if path == "/v1/models" else await client.ask(method, path, answer, body)

    async with hung_engine() as worker, front_end_of(worker, instances=instances) as client:
        first = instances.pop()
        client.plain = PlainServer(ask, None)
        for _ in range(2):
            for asked in client.render(MESSAGES), client.open_stream(text="a prompt"):
                with pytest.raises(errors.EngineUnreachable, match="no worker"):
                    await asked
            assert await client.context_length("served") is None
            assert await client.plain.model() == "default"
        instances.append(first)
        models = Models.model_validate({"data": [{"id": "served", "max_model_len": 9}]})
        assert await client.render(MESSAGES) == "x"
        assert (await client.open_stream(text="a prompt")).id.startswith(worker.url)
        assert await client.context_length("served") == 9
        assert await client.plain.model() == "served"
