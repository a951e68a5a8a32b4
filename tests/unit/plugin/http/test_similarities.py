"""The route that compares texts bounds its memory, and says why it compares nothing."""

import sys
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import anyio
import httpx
import pytest
from fastapi import FastAPI
from flashmoa_sglang.http import engine as engine_module
from flashmoa_sglang.http.bodies import PromptReader
from flashmoa_sglang.http.engine import Engine
from flashmoa_sglang.http.errors import EngineFailed
from flashmoa_sglang.http.similarities import SimilarityApi
from flashmoa_sglang.http.stream import Terms
from flashmoa_sglang.messages import CompareTexts, Similarities


class FakeEngine:
    """Knows the sizes of a model, and compares one request at a time."""

    def __init__(self, **different: Any) -> None:
        self.hidden_size, self.max_prompt_tokens, self.data_parallel_ranks = 2560, 100, 1
        self.model, self.draining, self.rows = {"name": "m"}, False, [[1.0]]
        self.busy = False
        vars(self).update(different)

    async def compare(self, texts: list[str], terms: Any, http_request: Any) -> Similarities:
        assert not self.busy
        self.busy = True
        await anyio.sleep(0.01)
        self.busy = False
        return Similarities(0, (3,) * len(texts), self.rows)


async def post(engine: FakeEngine, *bodies: dict[str, Any]) -> list[httpx.Response]:
    """Send requests at once."""
    app, reader = FastAPI(), PromptReader(engine, SimpleNamespace(), 64)  # type: ignore[arg-type]
    SimilarityApi(engine, reader).add_to(app)  # type: ignore[arg-type]
    answers: list[httpx.Response] = []
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://engine"
    ) as client:

        async def send(body: dict[str, Any]) -> None:
            answers.append(await client.post("/flashmoa/similarities", json=body))

        async with anyio.create_task_group() as group:
            for body in bodies:
                group.start_soon(send, body)
    return answers


async def test_one_request_is_compared_at_a_time() -> None:
    answers = await post(FakeEngine(), *[{"texts": ["a", "b"]}] * 3)
    assert [answer.json() for answer in answers] == [
        {"similarities": [[1.0]], "prompt_tokens": 6}
    ] * 3


@pytest.mark.parametrize(
    ("different", "texts", "status", "problem"),
    [
        ({}, ["a"] * 21, 400, "the server compares at most 10"),
        ({"hidden_size": 20_000}, ["a"] * 3, 400, "the server compares at most 2"),
        ({}, ["a", ""], 400, "texts.1 is empty"),
        ({}, [], 400, "texts: List should have at least 1 item"),
        ({}, ["a" * 6401], 413, "this server takes at most 100 tokens"),
        ({"data_parallel_ranks": 2}, ["a"], 400, "without --dp-size"),
        ({"draining": True}, ["a"], 503, "shutting down"),
        ({"rows": []}, ["a"], 500, "could not read the states of all tokens"),
    ],
)
async def test_refused_texts(
    different: dict[str, Any], texts: list[str], status: int, problem: str
) -> None:
    [answer] = await post(FakeEngine(**different), {"texts": texts})
    assert answer.status_code == status
    assert problem in answer.json()["error"]["message"]


async def test_a_scheduler_that_does_not_answer_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[CompareTexts] = []

    async def generate(request: Any, _: Any) -> AsyncGenerator[list[dict[str, Any]]]:
        yield [{"meta_info": {"prompt_tokens": 3}} for _ in request.rid]

    manager = SimpleNamespace(
        tokenizer=None,
        _result_dispatcher=SimpleNamespace(_mapping={}),
        auto_create_handle_loop=lambda: None,
        generate_request=generate,
    )
    requests = SimpleNamespace(EmbeddingReqInput=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", requests)
    release = SimpleNamespace(to_scheduler=lambda _, message: sent.append(message))
    monkeypatch.setattr(engine_module, "RELEASE", release)
    with pytest.raises(EngineFailed, match=r"did not compare the texts within 0\.01 s"):
        await Engine(manager).compare(["a", "b"], Terms(), None, within=0.01)
    # The scheduler forgets the texts.
    assert [message.query is None for message in sent] == [False, True]
