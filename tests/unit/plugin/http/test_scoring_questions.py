"""The prompts and candidates of lists that are scored, without an engine."""

from collections.abc import Sequence
from typing import Any

import pytest
from flashmoa_sglang.http.errors import CandidateRefused, MalformedRequest
from flashmoa_sglang.http.scoring import questions
from flashmoa_sglang.http.scoring.questions import RerankBody, ScoreBody
from flashmoa_sglang.http.scoring.routes import check_size
from flashmoa_sglang.http.streams import Limits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.plugin.http.tokens import families

RERANKER = 'The answer can only be "yes" or "no". {{ messages[0].content }}'
BODY: dict[str, Any] = {"query": "q", "documents": ["one", "two"]}


def reranked(template: str, **fields: Any) -> Any:
    """Return the question of a list of two documents."""
    body = RerankBody(**{**BODY, **fields})
    return questions.rerank_question(body, questions.document_texts(body), template)


def test_a_rerankers_template_gets_two_messages() -> None:
    question = reranked(RERANKER, instruct="Find trips.")
    assert question.answers == ["yes", "no"]
    messages = question.prompts[1].messages
    assert messages == [{"role": "user", "content": "q"}, {"role": "user", "content": "two"}]
    assert question.prompts[1].chat_template_kwargs == {"instruct": "Find trips."}


def test_models_think_only_if_the_client_says_so() -> None:
    for kwargs, expected in [(None, False), ({"enable_thinking": True}, True)]:
        question = reranked("{{ messages }}", chat_template_kwargs=kwargs)
        assert question.prompts[0].chat_template_kwargs == {"enable_thinking": expected}
        assert question.answers == ["Yes", "No"]


def test_model_without_a_chat_template_continues_a_text() -> None:
    body = questions.ClassifyBody(input="Cold tea.", labels=["praise", "complaint"])
    question = questions.classify_question(body, "")
    text = question.prompts[0].text
    assert text is not None and text.endswith("Answer with the letter of one label.\nAnswer:")
    assert question.answers == [" A", " B"]


def test_query_may_be_an_object_with_a_text() -> None:
    assert "Query: lakes\n" in reranked("", query={"text": "lakes"}).prompts[0].text
    for query in ("  ", {"text": " "}, {"title": "lakes"}):
        with pytest.raises(MalformedRequest, match="query"):
            reranked("", query=query)


def test_prompts_begin_with_their_common_part() -> None:
    first, second = (prompt.text for prompt in reranked("").prompts)
    assert first.index("one") == second.index("two")
    assert first[: first.index("one")] == second[: second.index("two")]


def test_a_query_is_a_prompt_and_items_may_be_first() -> None:
    alone = ScoreBody(query="One", candidates=[" two"])
    assert [prompt.text for prompt in questions.score_question(alone).prompts] == ["One"]
    ids = ScoreBody(query=[1, 2], items=[[3], [4]], label_token_ids=[5], item_first=True)
    question = questions.score_question(ids)
    assert [prompt.input_ids for prompt in question.prompts] == [[3, 1, 2], [4, 1, 2]]
    assert question.answers == [[5]] and question.may_repeat


def test_item_continues_the_users_last_message_or_is_one() -> None:
    parts = [{"type": "text", "text": "Hi"}]
    for content, expected in [
        ("Hi", "Hi there"),
        (None, " there"),
        (parts, [*parts, {"type": "text", "text": " there"}]),
    ]:
        messages = [{"role": "user", "content": content}]
        body = ScoreBody(messages=messages, items=[" there"], candidates=["x"])
        assert questions.score_question(body).prompts[0].messages == [
            {"role": "user", "content": expected}
        ]
    model = {"role": "assistant", "content": "Hello."}
    body = ScoreBody(messages=[model], items=["Go"], candidates=["x"])
    added = {"role": "user", "content": "Go"}
    assert questions.score_question(body).prompts[0].messages == [model, added]


def test_a_document_is_a_text_or_has_one() -> None:
    documents: list[Any] = [{"text": "T", "title": "A"}, "plain"]
    assert questions.document_texts(RerankBody(query="q", documents=documents)) == ["T", "plain"]
    with pytest.raises(MalformedRequest, match=r"documents\[1\] has no text"):
        questions.document_texts(RerankBody(query="q", documents=["a", {"title": "A"}]))


def test_top_k_is_another_name_of_top_n() -> None:
    """And 0 asks for all."""
    for top_n, top_k, best in (
        (2, None, 2),
        (None, 2, 2),
        (0, None, None),
        (0, 2, 2),
        (None, 0, None),
    ):
        assert RerankBody(**BODY, top_n=top_n, top_k=top_k).best == best


def test_candidates_that_are_the_same_tokens_are_refused() -> None:
    questions.refuse_duplicates(["a", "b"], [[1], [2]])
    with pytest.raises(CandidateRefused, match=r"among \['a', \[1\]\]"):
        questions.refuse_duplicates(["a", [1], "b"], [[1], [1], [2]])


@pytest.mark.parametrize("picture", ["<|vision_start|>{{ query }}", "<|image_pad|>"])
def test_vision_rerankers_are_left_to_sglang(picture: str) -> None:
    with pytest.raises(MalformedRequest, match="--flashmoa-scoring off"):
        reranked(RERANKER + picture)
    assert reranked("{{ messages }}" + picture).prompts


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"temperature": 1.0, "return_token_logprobs": False, "item_embed_overrides": None}, False),
        ({"user": "a client's own field"}, False),
        ({"temperature": 0.5}, True),
        ({"return_token_logprobs": True}, True),
        ({"score_extraction_token": 7}, True),
    ],
)
def test_fields_of_sglangs_route_are_refused(fields: dict[str, Any], refused: bool) -> None:
    body = ScoreBody.model_validate(
        {"query": "q", "items": ["a"], "label_token_ids": [1, 2], **fields}
    )
    if refused:
        with pytest.raises(MalformedRequest, match="Only SGLang's own route has"):
            body.check()
    else:
        body.check()


@pytest.mark.parametrize(
    ("entries", "shared", "answers", "problem"),
    [
        (11, ["q"], 2, "items has 11 entries; this server takes at most 10. Send several"),
        (10, ["q"], 11, "10 items with 11 candidates each are 110 scores; this server takes at"),
        (10, ["q" * 101], 2, "would be 1,010 characters in their prompts together"),
        (5, [[{"role": "user", "content": "q" * 200}], None], 2, "What all 5 items share would"),
    ],
)
def test_lists_that_take_too_much_memory_are_refused(
    entries: int, shared: list[object], answers: int, problem: str
) -> None:
    limits = Limits(scored_items=10, scores=100, repeated_characters=1000)
    with pytest.raises(MalformedRequest, match="Send several requests") as raised:
        check_size(limits, "items", ["x"] * entries, shared, answers)
    assert problem in str(raised.value)
    check_size(limits, "items", ["x"] * 10, ["q\n" * 50, None], 10)


PIECES = [
    " the", " Nepal", "al", " lake", "Answer:", "\n", "\n\n", " ", "  ", ".", "12", "3", "é", "中",
    "<|im_start|>", "assistant", "🙂", "Yes", "No", "A", "'s", "\t",
]  # fmt: skip
texts = st.lists(st.sampled_from(PIECES), min_size=1, max_size=40).map("".join)
candidates = st.lists(st.sampled_from(PIECES), min_size=1, max_size=3).map("".join)


class CountingTokenizer:
    """Counts the texts that it tokenises, without the special tokens of whole prompts."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.count = 0

    def encode(self, text: str) -> list[int]:
        self.count += 1
        return self.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def after(self) -> questions.CandidateTokenizer:
        return questions.CandidateTokenizer(lambda: self)  # type: ignore[arg-type, return-value]


MAKERS = {
    "served": families.served, "llama 3": families.with_pattern, "llama 2": families.sentencepiece,
}  # fmt: skip


@pytest.fixture(scope="module", params=MAKERS.values(), ids=MAKERS)
def tokenizer(request: pytest.FixtureRequest) -> CountingTokenizer:
    return CountingTokenizer(request.param())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(prompt=texts, candidate=candidates)
def test_candidates_are_tokenised_as_after_the_prompt(
    tokenizer: CountingTokenizer, prompt: str, candidate: str
) -> None:
    before = tokenizer.tokenizer.encode(prompt)
    whole = tokenizer.tokenizer.encode(prompt + candidate)
    try:
        found = tokenizer.after().tokenize(before, candidate)
    except CandidateRefused as refused:
        joins = whole[: len(before)] != before
        assert joins or "give candidates as token ids" in str(refused)
        return
    assert [*before, *found] == whole


def test_ordinary_candidates_are_never_refused(tokenizer: CountingTokenizer) -> None:
    encode = tokenizer.tokenizer.encode
    for prompt in ("Is it good?\nAnswer:", "<|im_start|>assistant\n", "One two", "Hi"):
        for candidate in ["Yes", "No"] if prompt.endswith("\n") else [" Yes", " No"]:
            found = tokenizer.after().tokenize(encode(prompt), candidate)
            assert [*encode(prompt), *found] == encode(prompt + candidate)


def test_prompts_that_end_alike_are_tokenised_once(tokenizer: CountingTokenizer) -> None:
    after, encode = tokenizer.after(), tokenizer.tokenizer.encode
    ending = " Is it good? Please say so. Say it in one word.\nAnswer:"
    first = after.tokenize(encode("One" + ending), " Yes")
    count = tokenizer.count
    assert after.tokenize(encode("Another" + ending), " Yes") == first
    assert after.tokenize(encode("Another" + ending), [5]) == [5]
    assert tokenizer.count == count
