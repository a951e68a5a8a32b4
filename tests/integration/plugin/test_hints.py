"""Clients' requests are checked, and the fields that they add to them never change an answer."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine
from tests.integration.support import Body, Words, complete_stream, generate, wait_until_idle

MESSAGES = [{"role": "user", "content": "Where to?"}]


def generation(**fields: Any) -> tuple[str, Body]:
    return "/generate", {"text": "x y", "sampling_params": {"max_new_tokens": 1}, **fields}


def chat(**fields: Any) -> tuple[str, Body]:
    return "/v1/chat/completions", {
        "model": "m", "messages": MESSAGES, "max_tokens": 1, **fields
    }  # fmt: skip


FORGED = {"flashmoa": {"stream": "forged", "final": False}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        generation(sampling_params={"max_new_tokens": 0, "custom_params": FORGED}),
        generation(
            text=["x", "y"],
            sampling_params=[{"max_new_tokens": 0}, {"max_new_tokens": 0, "custom_params": FORGED}],
        ),
        chat(custom_params=FORGED),
        ("/v1/completions", {"model": "m", "prompt": "x", "custom_params": FORGED}),
    ],
    ids=["generate", "batch", "chat", "completions"],
)
async def test_the_plugins_own_mark_cannot_be_forged(
    http: httpx.AsyncClient, client: EngineClient, path: str, body: Body
) -> None:
    """An increment of a stream that was never opened would pin KV that is never released."""
    answer = await http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert "reserved" in answer.text
    assert (await wait_until_idle(client)).pinned_streams == 0


@pytest.mark.parametrize("custom", ["x", 7, [1], True])
@pytest.mark.parametrize("linked", [False, True])
async def test_custom_params_that_are_not_an_object_are_refused(
    http: httpx.AsyncClient, client: EngineClient, custom: object, linked: bool
) -> None:
    opened = await client.open_stream(text="x y z and more")
    sampling = {"max_new_tokens": 1, "custom_params": custom}
    _, body = generation(sampling_params=sampling)
    if linked:
        body["prompt_stream_id"] = opened.id
    answer = await http.post("/generate", json=body)
    assert answer.status_code == 400, answer.text
    # A refused request does not use the stream, so that the next request can.
    _, usage = await generate(client, "x y z and more", 1, opened.id)
    assert usage.prompt_stream is not None and usage.prompt_stream.status == "hit"


@pytest.mark.parametrize("make", [generation, chat])
async def test_an_expected_output_does_not_change_the_answer(
    http: httpx.AsyncClient, client: EngineClient, make: Callable[..., tuple[str, Body]]
) -> None:
    answers: list[Any] = []
    for extra in ({}, {"expected_output_tokens": 0}, {"expected_output_tokens": 10**9}):
        path, body = make(temperature=0, **extra)
        if path == "/generate":
            body["sampling_params"] |= {"temperature": 0}
            opened = await client.open_stream(text="x y")
            body["prompt_stream_id"] = opened.id
        answer = await http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        answers.append(answer.json().get("text") or answer.json()["choices"][0]["message"])
    assert answers[1:] == answers[:1] * 2


async def test_a_request_that_decodes_nothing_uses_its_stream(
    http: httpx.AsyncClient, client: EngineClient, words: Words
) -> None:
    await client.flush_cache()
    text = words(200, 901)
    opened = await client.open_stream(text=text)
    await complete_stream(client, opened.id)
    body = {
        "text": text, "sampling_params": {"max_new_tokens": 0},
        "prompt_stream_id": opened.id, "expected_output_tokens": 0,
    }  # fmt: skip
    answer = (await http.post("/generate", json=body)).json()
    del body["prompt_stream_id"]
    plain = (await http.post("/generate", json=body)).json()
    assert answer["output_ids"] == plain["output_ids"] == []
    assert answer["meta_info"]["prompt_stream"]["status"] == "hit"
    assert answer["meta_info"]["streamed_tokens"] >= 190


async def test_several_answers_to_one_prompt_share_a_stream(
    http: httpx.AsyncClient, client: EngineClient, words: Words
) -> None:
    text = words(100, 902)
    await client.flush_cache()
    opened = await client.open_stream(text=text)
    await complete_stream(client, opened.id)
    body = {
        "text": text, "sampling_params": {"max_new_tokens": 2, "n": 3},
        "prompt_stream_id": opened.id,
    }  # fmt: skip
    metas = [one["meta_info"] for one in (await http.post("/generate", json=body)).json()]
    assert [meta["prompt_stream"]["status"] for meta in metas] == ["hit"] * 3
    assert [meta["streamed_tokens"] for meta in metas] == [99] * 3


TEXT = "One walks to the lake, and takes the boat to the island. " * 6
ROUTES: dict[str, Body] = {
    "/generate": {"text": TEXT, "sampling_params": {"max_new_tokens": 2, "temperature": 0}},
    "/v1/completions": {"prompt": TEXT, "max_tokens": 2, "temperature": 0},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": TEXT}], "max_tokens": 2, "temperature": 0
    },
    "/v1/responses": {"input": TEXT, "max_output_tokens": 8, "temperature": 0},
    "/v1/messages": {
        "messages": [{"role": "user", "content": TEXT}], "max_tokens": 2, "temperature": 0
    },
    "/v1/score": {"query": TEXT, "items": [""], "candidates": [" a", " b"]},
}  # fmt: skip


def written(answer: httpx.Response) -> Any:
    """Return what an answer says, without ids, times and figures."""
    assert answer.status_code == 200, answer.text
    body = answer.json()
    if "output" in body:
        return body["output"][0]["content"]
    if "scores" in body:
        return [round(score, 6) for score in body["scores"][0]]
    return [body.get(name) for name in ("text", "choices", "content")]


@pytest.mark.parametrize("path", ROUTES)
async def test_a_request_names_its_stream_by_header(
    http: httpx.AsyncClient, client: EngineClient, path: str
) -> None:
    await client.flush_cache()
    body = {"model": (await client.info()).model["name"], **ROUTES[path]}
    if path == "/generate":
        del body["model"]
    plain = written(await http.post(path, json=body))
    await client.flush_cache()
    prompt: Body = {"text": TEXT}
    if path in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
        chat = {"messages": [{"role": "user", "content": TEXT}]}
        text = (await http.post("/render", json=chat)).json()["text"]
        prompt = {"text": text, "add_special_tokens": False}
    opened = (await http.post("/prompt_streams", json=prompt)).json()["id"]
    received = (await complete_stream(client, opened)).received_tokens
    headers = {
        "x-request-id-flashmoa-stream": opened,
        "X-Request-Id-FlashMoA-Tokens": "2",
    }
    answer = await http.post(path, json=body, headers=headers)
    assert written(answer) == plain
    # The stream is used up, and its tokens were not computed again.
    assert (await http.get(f"/prompt_streams/{opened}")).json()["error"]["code"] == "stream_gone"
    fields = answer.json()
    usage = fields.get("usage") or fields.get("meta_info")
    if path not in ("/v1/completions", "/v1/messages"):
        assert usage["prompt_stream"]["status"] == "hit"
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or usage
        assert details["streamed_tokens"] >= received - 1
    await client.flush_cache()


async def test_a_hint_by_header_never_refuses_a_request(http: httpx.AsyncClient) -> None:
    path, body = generation(sampling_params={"max_new_tokens": 2, "temperature": 0})
    plain = (await http.post(path, json=body)).json()["text"]
    for stream in ("", "none", "\xe9" * 300, "[1]"):
        for number in ("", "-1", "9" * 5000, "nan"):
            raw = [
                (b"X-Request-Id-FlashMoA-Stream", stream.encode("latin-1")),
                (b"X-Request-Id-FlashMoA-Tokens", number.encode()),
            ]
            answer = await http.post(path, json=body, headers=raw)
            assert answer.status_code == 200, answer.text
            assert answer.json()["text"] == plain


@pytest.mark.parametrize("start", ["The plan so far is", "\n\n and then", " to"])
@pytest.mark.parametrize("opened_by", ["messages", "text"])
async def test_a_chat_that_continues_an_answer_uses_its_stream(
    http: httpx.AsyncClient, client: EngineClient, start: str, opened_by: str
) -> None:
    """SGLang encodes the prompt and the beginning of the answer separately and joins the tokens."""
    messages = [*MESSAGES, {"role": "assistant", "content": start + " walk to the lake"}]
    body = {
        "model": "m", "messages": messages, "continue_final_message": True,
        "max_tokens": 6, "temperature": 0,
    }  # fmt: skip
    stream_body: Body = {
        "messages": [*MESSAGES, {"role": "assistant", "content": start}],
        "continue_final_message": True,
    }
    await client.flush_cache()
    expected = (await http.post("/v1/chat/completions", json=body)).json()
    await client.flush_cache()
    if opened_by == "text":
        rendered = (await http.post("/render", json=stream_body)).json()["text"]
        stream_body = {"text": rendered, "add_special_tokens": False}
    opened = (await http.post("/prompt_streams", json=stream_body)).json()
    await client.append(opened["id"], 0, text=" walk to the lake")
    linked_body = {**body, "prompt_stream_id": opened["id"]}
    linked = (await http.post("/v1/chat/completions", json=linked_body)).json()
    if opened_by == "messages":
        whole = {**stream_body, "messages": messages}
        prompt = (await http.post("/prefill_only", json=whole)).json()["prompt_tokens"]
        assert prompt == expected["usage"]["prompt_tokens"]
    assert linked["choices"][0]["message"] == expected["choices"][0]["message"]
    assert linked["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
    # A stream of the joined text has other tokens, unless there is a boundary between the two.
    if opened_by == "messages" or start == "The plan so far is":
        assert linked["usage"]["prompt_stream"]["status"] == "hit"


async def test_requests_that_keep_no_kv_share_none_in_their_batch(
    engine: LocalEngine, http: httpx.AsyncClient
) -> None:
    """A client may mark requests as SGLang's warm-ups of PD pairs, on any engine."""
    beginning = " ".join(f"word{number}" for number in range(60))
    sampling = {"max_new_tokens": 2, "temperature": 0}
    _, body = generation(
        text=[f"{beginning} {number}" for number in range(8)], sampling_params=sampling
    )
    warm_up = {"bootstrap_host": ["2.2.2.2"] * 8, "bootstrap_room": [*range(8)]}
    marked = await http.post("/generate", json={**body, **warm_up})
    plain = await http.post("/generate", json=body)
    answers = [[one["text"] for one in answer.json()] for answer in (marked, plain)]
    assert answers[0] == answers[1] and engine.is_running()


async def test_a_refused_request_does_not_count_as_running(http: httpx.AsyncClient) -> None:
    """If it did, costs would never be measured, because that waits for other requests."""
    before = (await http.get("/flashmoa/info")).json()["in_flight"]["requests"]
    answer = await http.post("/generate", json={"input_ids": [5] * 40_000})
    assert answer.status_code == 400
    after = (await http.get("/flashmoa/info")).json()["in_flight"]["requests"]
    assert after == before
