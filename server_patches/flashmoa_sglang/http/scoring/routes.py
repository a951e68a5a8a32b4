"""``ScoringApi``: answers /v1/score, /rerank, /v1/rerank, /v2/rerank and /v1/classify.

SGLang has /v1/score, /v1/rerank and /v1/classify itself. On a model that generates text, its rerank
and classify routes do nothing useful, or answer in a form of its own. On other models the plugin
adds no routes.
"""

from __future__ import annotations

import asyncio
import json
import logging
from array import array
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect

from flashmoa_sglang.http import bodies
from flashmoa_sglang.http.client_requests import StreamRequest
from flashmoa_sglang.http.errors import (
    ApiError,
    CandidateRefused,
    EngineFailed,
    MalformedRequest,
)
from flashmoa_sglang.http.hints import named_stream
from flashmoa_sglang.http.scoring import questions
from flashmoa_sglang.http.scoring.answers import (
    ClassifyForm,
    Form,
    RerankForm,
    ScoreForm,
    usage_fields,
)
from flashmoa_sglang.http.scoring.forwards import (
    ListScorer,
    PrefillRoom,
    ScoredPrompt,
    name_item,
)
from flashmoa_sglang.http.tokens.token_buffer import common_length, tokenize_aside

if TYPE_CHECKING:
    from fastapi import Request

    from flashmoa_sglang.http.bodies import PromptReader
    from flashmoa_sglang.http.engine import Engine
    from flashmoa_sglang.http.rendering import ChatRenderer
    from flashmoa_sglang.http.streams import Limits, StreamTable
    from flashmoa_sglang.http.tokens.token_buffer import TokenBuffer

logger = logging.getLogger(__name__)

T = TypeVar("T")


class ScoringApi:
    """Answers the scoring routes.

    Args: table: the prompt streams. Their limits bound the size of a request, too.
    """

    def __init__(
        self, engine: Engine, reader: PromptReader, renderer: ChatRenderer, table: StreamTable
    ) -> None:
        self._engine = engine
        self._reader = reader
        self._renderer = renderer
        self._table, self._limits = table, table.limits
        self._candidates = questions.CandidateTokenizer(reader.require_tokenizer)
        self._room = PrefillRoom(engine.max_queued_requests)
        # Whether the engine computes a common prefix once; None until all schedulers have answered.
        self._shares: bool | None = None

    async def score(self, request: Request) -> Any:
        self._engine.require_prefills()
        body = await bodies.parse(request, questions.ScoreBody)
        body.check()
        items = body.items if isinstance(body.items, list) else [body.items]
        answers = body.candidates or body.labels
        shared = [body.query or body.messages, body.chat_template_kwargs, body.candidates]
        check_size(self._limits, "items", items, shared, len(answers))
        self._reader.check_ids(body.labels, "label_token_ids")
        with_tokens = body.candidates is not None
        form = ScoreForm(self._name(body), body.apply_softmax, with_tokens)
        question = questions.score_question(body)
        stream_id = body.prompt_stream_id or named_stream(request)
        stream: StreamRequest | None = None
        if stream_id is not None and len(items) == 1:
            stream = StreamRequest(self._table, stream_id)
        return await self._answer(request, body, form, question, stream)

    async def rerank(self, request: Request) -> Any:
        self._engine.require_prefills()
        body = await bodies.parse(request, questions.RerankBody)
        self._reader.require_tokenizer()
        if not body.documents:
            raise MalformedRequest("Give at least one document.")
        shared = [body.query, body.instruct, body.chat_template_kwargs]
        check_size(self._limits, "documents", body.documents, shared)
        texts = questions.document_texts(body)
        if (tokens := body.max_tokens_per_doc) is not None:
            cutting = self._cut(texts, min(tokens, self._engine.max_prompt_tokens))
            texts = await while_connected(request, cutting)
        form = RerankForm(self._name(body), body.best, questions.answered_documents(body))
        question = questions.rerank_question(body, texts, self._renderer.template)
        return await self._answer(request, body, form, question)

    async def classify(self, request: Request) -> Any:
        self._engine.require_prefills()
        body = await bodies.parse(request, questions.ClassifyBody)
        self._reader.require_tokenizer()
        shared = [body.labels, body.instruct, body.chat_template_kwargs]
        check_size(self._limits, "input", body.inputs, shared)
        question = questions.classify_question(body, self._renderer.template)
        form = ClassifyForm(self._name(body), body.labels)
        return await self._answer(request, body, form, question)

    async def _answer(
        self,
        request: Request,
        body: questions.ListBody,
        form: Form,
        question: questions.Question,
        prompt_stream: StreamRequest | None = None,
    ) -> Any:
        prompts = await while_connected(request, self._read(question))
        rank = self._table.named_rank(request)
        terms = replace(body.terms(self._engine.model["name"]), dp_rank=rank)
        shares = await self._are_shared()
        scorer = ListScorer(self._engine, terms, request, self._room, shares, stream=prompt_stream)
        if body.stream:
            events = stream(scorer, prompts, form)
            return StreamingResponse(events, media_type="text/event-stream")
        await while_connected(request, scorer.run(prompts))
        return {
            **form.rest(),
            **form.whole([form.item(prompt) for prompt in prompts]),
            "usage": usage_fields(prompts, prompt_stream),
        }

    async def _read(self, question: questions.Question) -> list[ScoredPrompt]:
        """Return the tokens of all prompts, so that none is computed if one is refused."""
        names = [f"{question.field}[{index}]" for index in range(len(question.prompts))]
        prompts: list[ScoredPrompt] = []
        all_ids = await self._tokenize(question.prompts, names)
        for index, (name, ids) in enumerate(zip(names, all_ids, strict=True)):
            with name_item(name, index):
                answers = await self._read_answers(question, ids)
            prompts.append(ScoredPrompt(index, name, ids, answers))
        return prompts

    async def _read_answers(
        self, question: questions.Question, ids: Sequence[int]
    ) -> list[list[int]]:
        if not ids:
            raise CandidateRefused("The context is empty; give a text that candidates can follow.")
        self._reader.check_room(len(ids))
        tokens: list[list[int]] = []
        for number, answer in enumerate(question.answers):
            is_long = len(answer) > questions.SHORT_CANDIDATE
            if isinstance(answer, str):
                self._reader.check_characters(answer)
            read = partial(self._candidates.tokenize, ids, answer)
            own = await tokenize_aside(len(answer), read)
            tokens.append(self._reader.check_ids(own, "candidates"))
            if is_long or number % 64 == 0:
                await asyncio.sleep(0)  # Thousands of candidates must not delay other requests.
        if not question.may_repeat:
            questions.refuse_duplicates(question.answers, tokens)
        longest = max(map(len, tokens))
        self._reader.check_room(len(ids) + (longest if longest > 1 else 0))
        return tokens

    async def _tokenize(
        self, prompts: Sequence[bodies.Prompt], names: Sequence[str]
    ) -> list[array[int]]:
        """Return the tokens of prompts. Their common beginning is tokenised once.

        A list of millions of token ids takes nine times the memory of an array.
        """
        ids: list[array[int]] = []
        if not prompts or prompts[0].input_ids is not None:
            for index, (name, prompt) in enumerate(zip(names, prompts, strict=True)):
                with name_item(name, index):
                    ids.append(array("i", await self._reader.tokenize(prompt)))
                await asyncio.sleep(0)
            return ids
        buffers: list[TokenBuffer] = []
        texts: list[str] = []
        for index, (name, prompt) in enumerate(zip(names, prompts, strict=True)):
            with name_item(name, index):
                buffer, text = await self._reader.new_buffer(prompt)
            buffers.append(buffer)
            texts.append(text)
            await asyncio.sleep(0)  # Long lists must not delay other requests.
        first, room = buffers[0], self._engine.max_prompt_tokens
        shared = texts[0][: common_length(min(texts), max(texts))]
        await tokenize_aside(len(shared), partial(first.append, shared, room))
        for index, (name, text) in enumerate(zip(names, texts, strict=True)):
            encode = partial(first.encode, text, first.add_special_tokens, room)
            ids.append(array("i", await tokenize_aside(len(text), encode)))
            with name_item(name, index):
                self._reader.check_room(len(ids[-1]), may_be_more=True)
            await asyncio.sleep(0)
        return ids

    async def _cut(self, texts: Sequence[str], tokens: int) -> list[str]:
        """Return the beginning of each text, with at most a number of tokens."""
        tokenizer = self._reader.require_tokenizer()
        cut: list[str] = []
        for index, text in enumerate(texts):
            # Most texts have a token for every eight characters. The head's last eight tokens may
            # differ in the whole text.
            head = text[: tokens * 8]
            ids = await tokenize_aside(len(head), partial(tokenizer.encode, head))
            if len(head) < len(text) and len(ids) < tokens + 8:
                with name_item(f"documents[{index}]", index):
                    self._reader.check_characters(text)
                read = partial(tokenizer.encode_from, text, 0, tokens)
                ids = await tokenize_aside(len(text), read)
            # A character of several tokens that is cut in two has no text.
            whole = len(ids) <= tokens
            cut.append(text if whole else tokenizer.decode(ids[:tokens]).rstrip("\ufffd"))
            await asyncio.sleep(0)
        return cut

    async def _are_shared(self) -> bool:
        if self._shares is None:
            reports = await self._engine.kv()
            shares = not any(report.shares is False for report in reports)
            if len(reports) < self._engine.data_parallel_ranks:
                return shares
            self._shares = shares
        return self._shares

    def _name(self, body: questions.ListBody) -> str:
        return body.model or self._engine.model["name"]


async def stream(
    scorer: ListScorer, prompts: Sequence[ScoredPrompt], form: Form
) -> AsyncGenerator[str]:
    """Yield an event for each result when it comes, and one with the rest at the end."""
    results: asyncio.Queue[ScoredPrompt | None] = asyncio.Queue()
    scorer.on_scores = results.put_nowait
    work = asyncio.create_task(scorer.run(prompts))
    work.add_done_callback(lambda _: results.put_nowait(None))
    try:
        while (scored := await results.get()) is not None:
            yield _event(form.item(scored))
        await work
        yield _event({**form.rest(), "usage": usage_fields(prompts, scorer.stream)})
    except ApiError as error:
        yield _event(error.body())
    except Exception:
        logger.exception("A list of scores has failed")
        yield _event(EngineFailed("The engine has failed; see its log").body())
    finally:
        work.cancel()
        await asyncio.wait([work])
    yield "data: [DONE]\n\n"


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Do work for a client, and return its result.

    Raises: ClientDisconnect if the client leaves first; the work is cancelled.
    """

    async def leave() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    done = asyncio.create_task(work)
    tasks: list[asyncio.Task[Any]] = [done, asyncio.create_task(leave())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            raise ClientDisconnect
        return done.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def _event(fields: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(fields)}\n\n"


def check_size(
    limits: Limits,
    field: str,
    entries: Sequence[object],
    shared: Sequence[object],
    answers: int = 2,
) -> None:
    """Raise MalformedRequest if a list is too long, or its prompts together would be.

    Args:
        field: the name of the list in the body, for messages.
        shared: the other parts of each entry's prompt, as texts or in JSON's types.
        answers: number of answers that are scored after each prompt.
    """
    count = len(entries)
    repeated = sum(len(str(part)) for part in shared if part) * count
    if count > limits.scored_items:
        problem = (
            f"{field} has {count:,} entries; this server takes at most {limits.scored_items:,}"
        )
    elif answers * count > limits.scores:
        problem = (
            f"{count:,} {field} with {answers:,} candidates each are {answers * count:,} scores; "
            f"this server takes at most {limits.scores:,}"
        )
    elif repeated > limits.repeated_characters:
        problem = (
            f"What all {count:,} {field} share would be {repeated:,} characters in their prompts "
            f"together; this server takes at most {limits.repeated_characters:,}"
        )
    else:
        return
    raise MalformedRequest(f"{problem}. Send several requests.")
