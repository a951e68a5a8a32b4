"""Requests to a served mixture that are refused before any model is asked."""

from __future__ import annotations

import httpx
import pytest

from flashmoa.moa.config import MixtureConfig
from flashmoa.moa.server import application

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"{}", "(KeyError: 'messages'); send an object with messages"),
        (b"[]", "; send an object with messages"),
        (b"no", "(JSONDecodeError: Expecting value"),
    ],
)
async def test_a_body_that_is_no_chat_request_is_named(body: bytes, problem: str) -> None:
    app = application(MixtureConfig.model_construct(name="three"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://moa") as http:
        answer = await http.post("/v1/chat/completions", content=body)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message.startswith("the body is not a chat completion request (") and problem in message
