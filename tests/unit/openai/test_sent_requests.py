"""Test that links ask servers as the client of a request does."""

from collections import Counter
from dataclasses import replace
from typing import Any

import httpx
import pytest

import flashmoa.openai.runs
from flashmoa.engine import EngineClient, EngineSettings
from flashmoa.link.learned_links import SentInPlace
from flashmoa.link.learned_runs import RecordedRequest
from flashmoa.observe import Event, LinkDeclined, LinkOpened
from flashmoa.openai import AsyncOpenAI, instrument, run
from flashmoa.openai.sent_requests import headers_now, read_request, settings_for
from tests.unit.events import of_kind
from tests.unit.openai.fake_server import URL, FakeServer, ask
from tests.waiting import until

BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Go."}]}


def sent(**headers: str) -> RecordedRequest:
    """Return the record of a request with headers, ``_`` for ``-`` in their names."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = httpx.Request("POST", f"{URL}/v1/chat/completions", headers=named, json=BODY)
    return read_request(request, BODY)


def test_connections_headers_are_not_recorded() -> None:
    found = sent(
        Accept_Encoding="zstd",
        Connection="keep-alive",
        Proxy_Authorization="Basic x",
        Content_Encoding="gzip",
        Idempotency_Key="k",
        X_Stainless_Retry_Count="1",
        Traceparent="00-1-2-01",
        X_Request_Id_FlashMoA="the call",
        X_Request_Id_FlashMoA_Stream="the stream",
        X_Dynamo_Request_Id="the call",
        X_Tenant="a",
    )
    assert found.headers == {"x-tenant": "a"}
    assert (found.url, found.model, found.messages) == (URL, "m", BODY["messages"])


def test_a_request_with_other_headers_is_the_same() -> None:
    assert sent(X_Attempt="1") == sent(X_Attempt="2")
    assert "secret" not in repr(sent(Cookie="secret"))


async def play_linked(name: str, *clients: AsyncOpenAI) -> None:
    """Run a chain of reviews twice, the second time linked: each call waits for its link."""
    for is_linked in (False, True):
        links: list[Event] = []
        async with run(name, listener=links.append):
            text = "a plan"
            for number, client in enumerate(clients):
                if is_linked:
                    await seen(links, LinkOpened, number)
                text = (await ask(client, f"Review: {text}")).message.content


async def seen(events: list[Event], kind: type[Event], times: int = 1) -> None:
    """Wait for N events of a kind."""
    await until(lambda: len(of_kind(events, kind)) >= times)


@pytest.mark.parametrize(
    ("own", "sent"), [({}, "Bearer secret"), ({"Authorization": "Basic x"}, "Basic x")]
)
async def test_links_send_the_clients_headers(server: FakeServer, own: Any, sent: str) -> None:
    headers = {"X-Tenant": "a", **own}
    async with server.client(api_key="secret", default_headers=headers) as client:
        await play_linked(f"headers {own}", client, client)
    found = {(each["x-tenant"], each["authorization"]) for each in headers_of_links(server)}
    assert found == {("a", sent)}


def headers_of_links(server: FakeServer) -> list[httpx.Headers]:
    """Return the headers of the requests other than chat completions, and forget all requests."""
    found = [headers for path, _, headers in server.requests if "chat" not in path]
    server.forget()
    return found


async def test_links_send_the_headers_of_this_run(server: FakeServer) -> None:
    """The calls are known from another user's run."""
    for user in ("first", "second"):
        events: list[Event] = []
        headers = {"X-Session": user, "X-Trace": f"run of {user}"}
        client, body = server.client(api_key=user, default_headers=headers), {"cache_salt": user}
        async with client, run("users", listener=events.append):
            await ask(client, "Review: a plan", extra_body=body)
            if user == "second":
                await seen(events, LinkOpened)
            span = {"X-Span": f"span of {user}"}
            await ask(client, "Review again", extra_headers=span, extra_body=body)
    (opened,) = server.bodies("/prompt_streams")
    assert opened["cache_salt"] == "second"
    of_links = headers_of_links(server)
    assert of_links
    for each in of_links:
        assert (each["authorization"], each["x-session"]) == ("Bearer second", "second")
        assert each["x-trace"] == "run of second" and "x-span" not in each


async def test_a_key_of_another_run_is_not_used(server: FakeServer) -> None:
    """The key may be another user's, unless a client sends it with each request."""
    for user in ("first", "second"):
        events: list[Event] = []
        key = {"Authorization": f"Bearer {user}"}
        async with server.client(api_key="own") as client, run("keys", listener=events.append):
            await ask(client, "Is this allowed?")
            if user == "second":
                await seen(events, LinkDeclined)
                assert not headers_of_links(server)
            await ask(client, "Answer.", extra_headers=key)
            if user == "second":
                await seen(events, LinkOpened)
            await ask(client, "Say it again.", extra_headers=key)
        assert all("another user's" in each.reason for each in of_kind(events, LinkDeclined))
    of_links = headers_of_links(server)
    assert of_links and {each["authorization"] for each in of_links} == {"Bearer second"}


def test_a_key_is_not_sent_to_another_server() -> None:
    before, now = sent(Authorization="Bearer EMPTY"), sent(Authorization="Bearer secret")
    elsewhere = replace(before, url="http://other:30000")
    assert headers_now(before, [(before, now)]) == {"authorization": "Bearer secret"}
    assert headers_now(elsewhere, [(before, now)]) == {}
    assert headers_now(elsewhere, [(before, before)]) == {"authorization": "Bearer EMPTY"}
    without_key = replace(elsewhere, headers={})
    assert headers_now(without_key, [(before, now)]) == {}


def test_new_headers_are_sent_and_old_ones_not() -> None:
    before, now = sent(X_Old="a", X_Same="b"), sent(X_New="c", X_Same="b")
    assert headers_now(before, [(before, now)]) == {"x-new": "c", "x-same": "b"}


async def test_calls_with_equal_headers_share_a_client(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A header that differs between the server's clients is sent once this run has sent it."""
    made: Counter[str | None] = Counter()

    def make(url: str, *, headers: dict[str, str], **more: Any) -> EngineClient:
        made[headers.get("x-tenant")] += 1
        return EngineClient(url, headers=headers, **more)

    monkeypatch.setattr(flashmoa.openai.runs, "EngineClient", make)
    async with (
        server.client(default_headers={"X-Tenant": "a"}) as first,
        server.client(default_headers={"X-Tenant": "b"}) as second,
        server.client(default_headers={"X-Tenant": "b"}) as third,
    ):
        await play_linked("tenants", first, first, second, third, third, third)
    # The first client of a run hears the calls with its key.
    assert made == {"a": 2, None: 1, "b": 1}


async def test_requests_with_equal_headers_are_one(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run may have thousands of requests, and each link looks through all."""
    looked: list[int] = []

    def look(request: RecordedRequest, sent: SentInPlace) -> dict[str, str]:
        looked.append(len(sent))
        return headers_now(request, sent)

    monkeypatch.setattr(flashmoa.openai.runs, "headers_now", look)
    async with server.client() as client:
        await play_linked("alike", *[client] * 4)
    assert set(looked) == {1}


async def test_links_use_a_server_as_its_client_says(server: FakeServer) -> None:
    settings = EngineSettings(stream_ttl_seconds=7.0)
    async with server.client(engine_settings=settings) as client:
        # A copy of the client, as frameworks make for each request, has the same settings.
        await play_linked("settings", client, client.with_options(timeout=9))
        (opened,) = server.bodies("/prompt_streams")
        assert opened["ttl_seconds"] == 7.0
        with instrument(client, EngineSettings(stream_ttl_seconds=8.0)):
            assert settings_for(URL) == EngineSettings(stream_ttl_seconds=8.0)
        assert settings_for(URL) == settings
    assert settings_for(URL) is None
