"""Test that links ask servers as the client of a request does."""

from __future__ import annotations

from collections import Counter
from typing import Any

import anyio
import httpx
import pytest

import flashmoa.openai._runs
from flashmoa.engine import EngineClient
from flashmoa.observe import Event, LinkOpened
from flashmoa.openai import AsyncOpenAI, run
from flashmoa.openai._sent_requests import SentRequest, read_request
from tests.unit.openai.fake_server import URL, FakeServer, ask

pytestmark = pytest.mark.anyio
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Go."}]}


def sent(**headers: str) -> SentRequest:
    """Return what is recorded of a request with these headers, ``_`` for ``-`` in their names."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = httpx.Request("POST", f"{URL}/v1/chat/completions", headers=named, json=BODY)
    return read_request(request, BODY)


def test_headers_of_a_connection_a_body_or_one_request_are_not_those_of_its_client() -> None:
    found = sent(
        Accept_Encoding="zstd",
        Connection="keep-alive",
        Proxy_Authorization="Basic x",
        Content_Encoding="gzip",
        Idempotency_Key="k",
        X_Stainless_Retry_Count="1",
        Traceparent="00-1-2-01",
        X_Tenant="a",
    )
    assert found.headers == {"x-tenant": "a"}
    assert (found.url, found.model, found.messages) == (URL, "m", BODY["messages"])


@pytest.mark.parametrize(
    ("authorization", "key"),
    [("Bearer secret", "secret"), ("bearer secret", "secret"), ("Basic x", None), ("", None)],
)
def test_only_a_bearer_token_is_a_key(authorization: str, key: str | None) -> None:
    found = sent(Authorization=authorization)
    assert found.api_key == key and found.headers == {"authorization": authorization}


def test_a_request_that_is_sent_again_with_other_headers_is_the_same() -> None:
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
                    await until_opened(links, number)
                text = (await ask(client, f"Review: {text}")).message.content


async def until_opened(events: list[Event], links: int) -> None:
    with anyio.fail_after(10):
        while sum(isinstance(event, LinkOpened) for event in events) < links:  # noqa: ASYNC110
            await anyio.sleep(0.005)


@pytest.mark.parametrize("authorization", [None, "Basic x"])
async def test_links_send_the_headers_of_the_client(
    server: FakeServer, authorization: str | None
) -> None:
    headers = {"X-Tenant": "a"}
    if authorization is not None:
        headers["Authorization"] = authorization
    async with server.client(api_key="secret", default_headers=headers) as client:
        await play_linked(f"headers {authorization}", client, client)
    of_links = [headers for path, _, headers in server.requests if "chat" not in path]
    assert of_links
    for each in of_links:
        assert each["x-tenant"] == "a"
        assert each["authorization"] == (authorization or "Bearer secret")


async def test_calls_share_a_client_of_their_server_if_their_headers_are_the_same(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: Counter[str] = Counter()

    def make(url: str, *, headers: dict[str, str], **more: Any) -> EngineClient:
        made[headers["x-tenant"]] += 1
        return EngineClient(url, headers=headers, **more)

    monkeypatch.setattr(flashmoa.openai._runs, "EngineClient", make)
    async with (
        server.client(default_headers={"X-Tenant": "a"}) as first,
        server.client(default_headers={"X-Tenant": "b"}) as second,
        server.client(default_headers={"X-Tenant": "b"}) as third,
    ):
        await play_linked("tenants", first, first, second, third)
    assert made == {"a": 1, "b": 1}
