"""The plugin's scoring routes: exact scores in the forms that clients know, and refusals."""

import json
import math
from typing import Any

import anyio
import httpx
import pytest

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine
from tests.integration.scoring.conftest import EXACT, Logprobs
from tests.integration.support import Words, post_json, wait_until_idle

DOCUMENTS = ["Pokhara lies at a lake.", "Tea is grown in Ilam.", "Lukla has an airport."]


def chat_ids(tokenizer: Any, text: str) -> list[int]:
    messages = [{"role": "user", "content": text}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(prompt, add_special_tokens=False)


def share(logprobs: list[float]) -> float:
    """Return the first probability over the sum of all."""
    return math.exp(logprobs[0]) / sum(map(math.exp, logprobs))


async def test_score_answers_what_stock_sglang_answers(
    http: httpx.AsyncClient, plain_engine: LocalEngine, tokenizer: Any
) -> None:
    (the,), (and_,) = tokenizer.encode(" the"), tokenizer.encode(" and")
    texts: dict[str, Any] = {"query": "We walk to", "items": [" a lake near", " Pokhara, where"]}
    ids = {
        "query": tokenizer.encode(texts["query"]),
        "items": [tokenizer.encode(item) for item in texts["items"]],
    }
    async with httpx.AsyncClient(base_url=plain_engine.url, timeout=60) as stock:
        prompts: list[dict[str, Any]] = [
            texts, ids, {**texts, "items": " a lake"}, {**texts, "items": []}
        ]  # fmt: skip
        for prompt in prompts:
            for more in ({}, {"apply_softmax": True}, {"item_first": True}):
                body = {**prompt, **more, "label_token_ids": [the, and_], "model": "m"}
                ours = await post_json(http, "/v1/score", **body)
                theirs = await post_json(stock, "/v1/score", **body)
                assert ours["object"] == theirs["object"] and ours["model"] == "m"
                assert len(ours["scores"]) == len(theirs["scores"])
                for own, their in zip(ours["scores"], theirs["scores"], strict=True):
                    assert own == pytest.approx(their, abs=EXACT)
                assert ours["usage"]["prompt_tokens"] == theirs["usage"]["prompt_tokens"]
                assert ours["usage"]["completion_tokens"] == 0


async def test_score_appends_items_to_the_last_message_of_the_user(
    http: httpx.AsyncClient, tokenizer: Any, reference: Logprobs
) -> None:
    messages = [{"role": "user", "content": "Is it"}]
    items = [" far?", " near?"]
    found = await post_json(
        http, "/v1/score", messages=messages, items=items, candidates=["Y", "N"], apply_softmax=True
    )
    for item, scores in zip(items, found["scores"], strict=True):
        labels = [tokenizer.encode("Y"), tokenizer.encode("N")]
        expected = share(reference(chat_ids(tokenizer, f"Is it{item}"), labels))
        assert scores[0] == pytest.approx(expected, abs=EXACT)


async def test_rerank_asks_the_documented_question(
    http: httpx.AsyncClient, tokenizer: Any, reference: Logprobs
) -> None:
    found = await post_json(
        http, "/v2/rerank", model="m", query="Where is a lake?", documents=DOCUMENTS
    )
    expected: list[float] = []
    for document in DOCUMENTS:
        text = (
            "Judge whether the document is relevant to the query.\n\nQuery: Where is a lake?\n\n"
            f"Document: {document}\n\nIs the document relevant? Answer Yes or No."
        )
        labels = [tokenizer.encode("Yes"), tokenizer.encode("No")]
        expected.append(share(reference(chat_ids(tokenizer, text), labels)))
    by_index = {one["index"]: one["relevance_score"] for one in found["results"]}
    assert [by_index[index] for index in range(3)] == pytest.approx(expected, abs=EXACT)
    ranked = [one["relevance_score"] for one in found["results"]]
    assert ranked == sorted(ranked, reverse=True)
    other = await post_json(
        http, "/v1/rerank", query="Where?", documents=DOCUMENTS, instruct="Judge."
    )
    assert other["results"] != found["results"]


# The bodies that these clients send, and the fields that they read.
async def test_rerank_serves_the_clients_of_cohere_and_jina(http: httpx.AsyncClient) -> None:
    cohere_v2 = {"model": "m", "query": "lake", "documents": DOCUMENTS, "top_n": 2}
    langchain = {**cohere_v2, "max_tokens_per_doc": None, "priority": None}
    jina = {**cohere_v2, "return_documents": True, "truncation": True}
    objects = [{"text": text, "title": "T"} for text in DOCUMENTS]
    cohere_v1 = {"query": "lake", "documents": objects, "return_documents": True}
    vllm = {"query": "lake", "documents": DOCUMENTS, "top_n": 0}
    voyage = {"query": "lake", "documents": DOCUMENTS, "top_k": 1}
    for path, body in [
        ("/v2/rerank", cohere_v2), ("/v2/rerank", langchain), ("/v1/rerank", jina),
        ("/v1/rerank", cohere_v1), ("/rerank", vllm), ("/v1/rerank", voyage),
    ]:  # fmt: skip
        found = await post_json(http, path, **body)
        assert isinstance(found["id"], str)
        assert len(found["results"]) == (body.get("top_n") or body.get("top_k") or 3)
        for one in found["results"]:
            assert 0 <= one["relevance_score"] <= 1
            text = one.get("document", {}).get("text")
            assert text == (DOCUMENTS[one["index"]] if body.get("return_documents") else None)
        assert found["usage"]["total_tokens"] > 0


async def test_rerank_cuts_documents_at_max_tokens_per_doc(http: httpx.AsyncClient) -> None:
    long, short = "One two three four five six", "One two three"
    whole = await post_json(http, "/v1/rerank", query="q", documents=[long])
    cut = await post_json(http, "/v1/rerank", query="q", documents=[long], max_tokens_per_doc=3)
    alone = await post_json(http, "/v1/rerank", query="q", documents=[short])
    assert cut["usage"]["prompt_tokens"] < whole["usage"]["prompt_tokens"]
    score = cut["results"][0]["relevance_score"]
    assert score == pytest.approx(alone["results"][0]["relevance_score"], abs=EXACT)


async def test_classify_letters_the_labels(
    http: httpx.AsyncClient, tokenizer: Any, reference: Logprobs
) -> None:
    labels = ["praise", "complaint", "question"]
    texts = ["Cold tea.", "Where?"]
    found = await post_json(http, "/v1/classify", input=texts, labels=labels, model="m")
    assert [one["index"] for one in found["data"]] == [0, 1]
    text = (
        "Which of these labels fits the text best?\n\nA. praise\nB. complaint\nC. question\n\n"
        "Text: Where?\n\nAnswer with the letter of one label."
    )
    letters = [tokenizer.encode(letter) for letter in "ABC"]
    logprobs = reference(chat_ids(tokenizer, text), letters)
    one: dict[str, Any] = found["data"][1]
    expected = [math.exp(logprob) for logprob in logprobs]
    assert one["mass"] == pytest.approx(sum(expected), abs=EXACT)
    assert one["probs"] == pytest.approx([each / sum(expected) for each in expected], abs=EXACT)
    assert one["num_classes"] == 3
    assert one["label"] == labels[one["probs"].index(max(one["probs"]))]


LISTS: list[tuple[str, str, dict[str, Any]]] = [
    ("/v1/score", "results", {"query": "We walk", "items": [" a", " b"], "candidates": [" the"]}),
    ("/v1/rerank", "results", {"query": "q", "documents": DOCUMENTS, "return_documents": True}),
    ("/v1/classify", "data", {"input": ["Cold.", "Hot."], "labels": ["a", "b"]}),
]


@pytest.mark.parametrize(("path", "list_name", "body"), LISTS)
async def test_streamed_results_are_those_of_the_whole_answer(
    http: httpx.AsyncClient, path: str, list_name: str, body: dict[str, Any]
) -> None:
    whole = await post_json(http, path, **body)
    events: list[str] = []
    async with http.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        async for line in answer.aiter_lines():
            events += [line.removeprefix("data: ")] if line else []
    *results, end = [json.loads(event) for event in events[:-1]]
    assert events[-1] == "[DONE]"
    assert end["usage"]["prefills"] == whole["usage"]["prefills"] and list_name not in end
    by_index = {one["index"]: one for one in whole[list_name]}
    assert sorted(one["index"] for one in results) == sorted(by_index)
    for result in results:
        other = by_index[result["index"]]
        assert result.keys() == other.keys()
        for name in ("scores", "logprobs", "relevance_score", "probs"):
            assert result.get(name) == pytest.approx(other.get(name), abs=EXACT)
        for name in ("candidate_tokens", "document", "label"):
            assert result.get(name) == other.get(name)


@pytest.mark.slow
async def test_list_is_not_computed_to_its_end_for_a_client_that_has_left(
    http: httpx.AsyncClient, client: EngineClient, words: Words
) -> None:
    async def in_flight() -> int:
        return (await http.get("/flashmoa/info")).json()["in_flight"]["requests"]

    documents = [words(200, number) for number in range(3000)]
    async with anyio.create_task_group() as tasks:
        body = {"query": "lake", "documents": documents}
        tasks.start_soon(lambda: http.post("/v1/rerank", json=body))
        while await in_flight() < 200:  # noqa: ASYNC110 - only the engine knows
            await anyio.sleep(0.01)
        tasks.cancel_scope.cancel()
    await wait_until_idle(client)
    last = await post_json(http, "/v1/rerank", query="lake", documents=documents[-1:])
    # Two prefills have this prompt, and a token or two more.
    usage = last["usage"]
    assert usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"] > 200


async def test_client_that_leaves_a_stream_leaves_nothing_behind(
    http: httpx.AsyncClient, client: EngineClient, words: Words
) -> None:
    documents = [words(2000, 800 + number) for number in range(8)]
    body = {"query": "lake", "documents": documents, "stream": True}
    async with http.stream("POST", "/v1/rerank", json=body) as answer:
        async for _ in answer.aiter_lines():
            break
    await wait_until_idle(client)
    assert (await http.get("/flashmoa/info")).json()["in_flight"]["requests"] == 0


@pytest.mark.parametrize("items", [[], ["b", "c"]])
async def test_other_than_one_prompt_ignores_a_prompt_stream(
    http: httpx.AsyncClient, client: EngineClient, items: list[str]
) -> None:
    opened = await client.open_stream(text="a")
    body = {"query": "a", "items": items, "candidates": [" x", " y"]}
    plain = await http.post("/v1/score", json=body)
    hinted = await http.post("/v1/score", json={**body, "prompt_stream_id": opened.id})
    assert plain.status_code == hinted.status_code == 200, hinted.text
    assert hinted.json()["scores"] == plain.json()["scores"]
    await client.delete_stream(opened.id)  # It fails if the stream is used up.


LONG = "word " * 13_000
SCORE, RERANK, CLASSIFY = "/v1/score", "/v1/rerank", "/v1/classify"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (SCORE, {"query": "a", "items": ["b"]}, "exactly one of label_token_ids, candidates"),
    (SCORE, {"items": ["b"], "candidates": [" a"]}, "exactly one of query, messages"),
    (SCORE, {"query": "a", "items": [[1]], "candidates": [" a"]}, "both be text, or both be token"),
    (SCORE, {"query": "a", "label_token_ids": [9_999_999]}, "label_token_ids must be in"),
    (SCORE, {"query": "a", "candidates": [[9_999_999]]}, "items[0]: candidates must be in"),
    (SCORE, {"query": [9_999_999], "items": [[1]], "label_token_ids": [1]}, "items[0]: input_ids"),
    (SCORE, {"query": "a", "candidates": []}, "at least one candidate"),
    (RERANK, {"query": " ", "documents": ["a"]}, "query that is not empty"),
    (RERANK, {"query": "q", "documents": []}, "at least one document"),
    (RERANK, {"query": "q", "documents": ["a"], "top_n": -1}, "top_n: "),
    (RERANK, {"query": "q", "documents": ["a", {"x": 1}]}, "documents[1] has no text"),
    (RERANK, {"query": "q", "documents": ["a"] * 10_001}, "documents has 10,001 entries"),
    (RERANK, {"query": {"title": "q"}, "documents": ["a"]}, "query has no text"),
    (CLASSIFY, {"input": ["a"] * 10_001, "labels": ["x", "y"]}, "input has 10,001 entries"),
    (SCORE, {"query": "a", "items": ["b"] * 101, "candidates": [" a"] * 9_999}, "1,009,899 scores"),
    (
        RERANK,
        {"query": "q", "documents": ["a"] * 9_999, "instruct": "b" * 30_000},
        "characters in their prompts together",
    ),
    (
        CLASSIFY,
        {"input": ["a"] * 9_999, "labels": ["x", "y"], "instruct": "b" * 30_000},
        "characters in their prompts together",
    ),
    (
        RERANK,
        {"query": "q", "documents": [[{"type": "text"}]]},
        "documents.0: Input should be a valid string; documents.0: Input should be a valid object.",
    ),
    (
        SCORE,
        {"query": "a", "label_token_ids": [1], "return_pooled_hidden_states": True},
        "--flashmoa-scoring off",
    ),
    (SCORE, {"query": "a", "items": ["b"], "label_token_ids": [[1]]}, "label_token_ids.0: "),
    (CLASSIFY, {"input": "a"}, "labels: Field required"),
    (CLASSIFY, {"input": "a", "labels": ["x"]}, "2 to 26"),
    (CLASSIFY, {"input": "a", "labels": ["x", "x"]}, "not 2 with 1 different"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "problem"), REFUSED)
async def test_malformed_requests_are_refused_with_the_reason(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], problem: str, stream: bool
) -> None:
    answer = await http.post(path, json={**body, "stream": stream})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "malformed")
    assert problem in error["message"]


async def test_refused_item_is_named(http: httpx.AsyncClient) -> None:
    answer = await http.post(RERANK, json={"query": "q", "documents": ["a", LONG], "stream": True})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["item"]) == (413, "too_large", 1)
    assert error["message"].startswith("documents[1]: The prompt has ")
    body = {"query": "To", "items": [" One", " Nep"], "candidates": ["al"]}
    answer = await http.post(SCORE, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["item"]) == (400, "candidate_refused", 1)
    assert error["message"].startswith("items[1]: The candidate 'al' is tokenised together")
