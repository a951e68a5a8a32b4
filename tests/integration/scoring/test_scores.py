"""Scores on a real engine are exact, come from prefills alone, and share their prefixes."""

import math
from typing import Any

import anyio
import httpx
import pytest

from flashmoa import Workflow
from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine
from flashmoa.errors import EngineUnreachable, MalformedRequest, PluginMissing, PromptTooLarge
from flashmoa.observe import Event, LinkOpened
from flashmoa.scoring import CandidateRefused, Scorer, Scores
from flashmoa.scoring.contexts import answer_candidate, append_item, question_item
from flashmoa.scoring.scorer import YES_OR_NO
from flashmoa.scoring.scores import probability_mass, softmax
from tests.integration.scoring.conftest import CHAT, EXACT, Logprobs
from tests.integration.support import (
    Words,
    generate,
    wait_until_idle,
    wait_until_prefilled,
)


def assert_exact(found: Scores, expected: list[float], lengths: list[int] | None = None) -> None:
    assert found.logprobs == pytest.approx(expected, abs=EXACT)
    assert found.mass == pytest.approx(probability_mass(expected), abs=EXACT)
    weights = expected
    if lengths is not None:
        weights = [total / length for total, length in zip(expected, lengths, strict=True)]
    assert found.probabilities == pytest.approx(softmax(weights), abs=EXACT)
    assert math.isclose(sum(found.probabilities), 1)


@pytest.mark.parametrize(
    ("length", "candidates"),
    [
        (1, [" the", " and", " of"]),
        (2, [" Nepal", " a lake", " Kathmandu and Pokhara"]),
        (40, [" the", " and", " of", " Nepal", " lake"]),
        (41, [" a lake", " Kathmandu and Pokhara"]),
        (42, [" trek"]),
        (700, [" trek", " walk", " Kathmandu and Pokhara"]),
    ],
)
async def test_probabilities_equal_hugging_face(
    scorer: Scorer,
    words: Words,
    tokenizer: Any,
    reference: Logprobs,
    length: int,
    candidates: list[str],
) -> None:
    context = words(length, length)
    tokens = [tokenizer.encode(one) for one in candidates]
    expected = reference(tokenizer.encode(context), tokens)
    cold = await scorer.score(context, candidates)
    warm = await scorer.score(tokenizer.encode(context), tokens)
    by_length = await scorer.score(context, candidates, length_normalised=True)
    assert_exact(cold, expected)
    assert_exact(warm, expected)
    assert_exact(by_length, expected, list(map(len, tokens)))
    assert cold.best == candidates[expected.index(max(expected))]


async def test_messages_are_scored_as_the_chat_template_renders_them(
    scorer: Scorer, tokenizer: Any, reference: Logprobs
) -> None:
    prompt = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    labels = {"positive": "Y", "negative": "N"}
    found = await scorer.classify(CHAT, labels)
    assert found.candidates == list(labels)
    assert_exact(found, reference(ids, [tokenizer.encode("Y"), tokenizer.encode("N")]))
    assert found.usage.requests == 1
    with pytest.raises(CandidateRefused, match=r"'Melbourne' has \d tokens .*, \['M"):
        await scorer.classify(CHAT, ["Melbourne", "N"])


async def test_choose_needs_one_prefill(
    scorer: Scorer, tokenizer: Any, reference: Logprobs
) -> None:
    options = ["Walk to the lake", "Fly home", "Stay"]
    found = await scorer.choose("What now?", options)
    question = (
        "What now?\n\nA. Walk to the lake\nB. Fly home\nC. Stay\n"
        "Answer with the letter of one option.\nAnswer:"
    )
    tokens = [tokenizer.encode(f" {letter}") for letter in "ABC"]
    assert_exact(found, reference(tokenizer.encode(question), tokens))
    assert found.candidates == options and found.best in options
    in_chat = await scorer.choose(CHAT, options)
    assert in_chat.usage.requests == 1
    with pytest.raises(ValueError, match="1 to 26 options, not for 27"):
        await scorer.choose("What now?", [str(number) for number in range(27)])
    with pytest.raises(ValueError, match="cannot follow token ids"):
        await scorer.choose([1, 2], options)


async def test_candidates_of_several_tokens_share_the_context(
    client: EngineClient, scorer: Scorer, words: Words
) -> None:
    context, candidates = words(1200, 32), [words(4, 600 + number)[3:] for number in range(6)]
    await client.flush_cache()
    found = await scorer.score(context, candidates)
    assert found.usage.requests == 6
    # Each request computes the context's last token again, to score its own first one.
    assert found.usage.computed_tokens <= 1200 + found.usage.requests * (1 + 4)


async def test_scores_do_not_depend_on_a_decoding_request(
    client: EngineClient, scorer: Scorer, words: Words
) -> None:
    context = words(50, 34)
    alone = await scorer.score(context, [" the", " and"])
    async with anyio.create_task_group() as group:
        group.start_soon(generate, client, words(60, 35), 60)
        for _ in range(5):
            together = await scorer.score(context, [" the", " and"])
            assert together.logprobs == pytest.approx(alone.logprobs, abs=EXACT)


async def test_context_is_prefilled_while_it_is_written(
    client: EngineClient, scorer: Scorer, words: Words
) -> None:
    written, opened = words(400, 38), anyio.Event()

    def listen(event: Event) -> None:
        if isinstance(event, LinkOpened):
            opened.set()

    async with Workflow(client, listener=listen) as flow:
        draft = flow.text("draft")
        expected = flow.expect([{"role": "user", "content": f"{draft}\nIs it done?"}])
        draft.write(written[:200])
        with anyio.fail_after(30):
            await opened.wait()
        draft.write(written[200:])
        draft.close()
        messages = await expected.messages()
        stream = expected.claim()["prompt_stream_id"]
        await wait_until_prefilled(client, stream, 200)
        found = await scorer.score(messages, ["Y", "N", "a lake"], prompt_stream_id=stream)
    assert found.usage.prompt_stream is not None
    assert found.usage.prompt_stream.status == "hit"
    # What the stream has prefilled is computed neither for the letters nor for the words.
    assert found.usage.requests == 2 and (found.usage.streamed_tokens or 0) >= 200
    assert found.usage.cached_tokens >= 2 * (found.usage.streamed_tokens or 0)
    again = await scorer.score(messages, ["Y", "N", "a lake"], prompt_stream_id="none")
    assert again.usage.prompt_stream is not None
    assert again.usage.prompt_stream.status == "unknown"
    assert again.logprobs == pytest.approx(found.logprobs, abs=EXACT)
    await wait_until_idle(client)


@pytest.mark.parametrize(
    ("context", "candidates", "problem"),
    [
        ("To Nep", ["al", " the"], "tokenised together with the context's end, as ' Nepal'"),
        ("One ", ["two"], "Move white space"),
        ("One", [" two", " two"], "two candidates are the same tokens"),
        ("One", [""], "has no tokens"),
        ("One", [], "at least one candidate"),
        ("", [" two"], "context is empty"),
        ([], [" two"], "not empty"),
        ([5] * 20, ["two"], "give candidates as token ids"),
        ([1, 2.5], [" two"], "list of messages or of token ids"),
    ],
)
async def test_candidates_that_cannot_be_scored_are_refused_with_the_reason(
    scorer: Scorer, context: Any, candidates: list[str], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        await scorer.score(context, candidates)


async def test_engines_refusal_is_raised_unchanged(
    scorer: Scorer, client: EngineClient, words: Words
) -> None:
    with pytest.raises(PromptTooLarge, match=r"items\[0\]: The prompt has at least 13000 tokens"):
        await scorer.score(words(13000, 37), [" the", " a lake and"])
    with pytest.raises(MalformedRequest, match="candidates must be in"):
        await scorer.score("The", [[999_999]])
    async with EngineClient("http://127.0.0.1:9") as absent:
        with pytest.raises(EngineUnreachable):
            await Scorer(absent).score("The", [" the"])
    await wait_until_idle(client)


async def test_siblings_compute_their_prefix_once(client: EngineClient, words: Words) -> None:
    context, options = words(1500, 31), [words(8, 500 + number)[3:] for number in range(8)]
    alone = [await Scorer(client).select(context, [option]) for option in options]
    await client.flush_cache()
    found = await Scorer(client).select(context, options)
    assert found.options == options
    assert found.probabilities == pytest.approx([one.probabilities[0] for one in alone], abs=EXACT)
    own = found.usage.prompt_tokens - found.usage.requests * 1500
    assert found.usage.computed_tokens <= 1500 + own + found.usage.requests
    everything = await Scorer(client).select(context, options, threshold=0)
    assert everything.chosen == options
    await wait_until_idle(client)


async def test_a_list_is_scored_in_one_request(engine: LocalEngine, words: Words) -> None:
    paths: list[str] = []

    async def record(request: httpx.Request) -> None:
        paths.append(request.url.path)

    async with EngineClient(engine.url, timeout=60) as client:
        client._http.event_hooks = {"request": [record]}  # pyright: ignore[reportPrivateUsage]
        for context in (words(40, 41), CHAT, [*CHAT, {"role": "assistant", "content": "No."}]):
            found = await Scorer(client).select(context, ["lakes", "hills", "temples"])
            question = f"hills\n{YES_OR_NO}"
            direct = await Scorer(client).score(
                append_item(context, question_item(context, question)),
                [answer_candidate(context, answer) for answer in ("Yes", "No")],
            )
            assert found.answers[1].logprobs == pytest.approx(direct.logprobs, abs=EXACT)
            assert found.usage.requests == 3 * direct.usage.requests
        assert paths == ["/v1/score"] * 6


async def test_servers_own_routes_score_as_the_plugins_do(
    scorer: Scorer, plain_client: EngineClient, as_vllm: EngineClient, tokenizer: Any
) -> None:
    candidates: list[Any] = [" the", " Kathmandu and Pokhara", " a lake"]
    contexts: list[Any] = ["We walk to", tokenizer.encode("We walk to")]
    as_tokens = [tokenizer.encode(one) for one in candidates]
    for client in (plain_client, as_vllm):
        other = Scorer(client, concurrency=2)
        for context in contexts:
            for answers in (candidates, as_tokens) if isinstance(context, str) else (as_tokens,):
                found = await other.score(context, answers)
                expected = await scorer.score(context, answers)
                assert_exact(found, expected.logprobs)
                assert found.candidates == expected.candidates
        assert_exact(
            await other.classify(CHAT, ["Y"]), (await scorer.classify(CHAT, ["Y"])).logprobs
        )
        chosen = await other.select(CHAT, ["lakes", "hills"])
        expected_choice = await scorer.select(CHAT, ["lakes", "hills"])
        assert chosen.probabilities == pytest.approx(expected_choice.probabilities, abs=EXACT)
        with pytest.raises(CandidateRefused, match="tokenised together with the context's end"):
            await other.score("To Nep", ["al"])
        with pytest.raises(CandidateRefused, match="the same tokens"):
            await other.score("One", [" two", " two"])
        with pytest.raises(PluginMissing, match="has no scoring routes of the flashmoa-sglang"):
            await other.rerank("Where?", ["Here."])
        salted = EngineClient(client.url, namespace={"cache_salt": "s"})
        async with salted:
            with pytest.raises(PluginMissing, match="ignores cache_salt"):
                await Scorer(salted).score("One", [" two"])


async def test_vllm_cuts_no_prompt_unnoticed(as_vllm: EngineClient) -> None:
    with pytest.raises(PromptTooLarge, match="has room for"):
        await Scorer(as_vllm).score([5] * 20_000, [[6]])


async def test_rerank_puts_the_most_relevant_documents_first(
    scorer: Scorer,
) -> None:
    documents = ["Tea grows in Ilam.", "Pokhara has a lake.", "Lukla has an airport."]
    ranking = await scorer.rerank("Where is a lake?", documents)
    scores = [one.score for one in ranking.documents]
    assert scores == sorted(scores, reverse=True)
    assert sorted(one.index for one in ranking.documents) == [0, 1, 2]
    assert all(documents[one.index] == one.document for one in ranking.documents)
    assert ranking.usage.requests > 0
    best = await scorer.rerank("Where is a lake?", documents, top_n=1)
    assert [one.index for one in best.documents] == [ranking.documents[0].index]
    other = await scorer.rerank("Where is a lake?", documents, instruct="Judge.")
    assert [one.score for one in other.documents] != pytest.approx(scores, abs=1e-9)
    with pytest.raises(ValueError, match="at least one document"):
        await scorer.rerank("Where?", [])
