"""Send a benchmark's requests: random prompts, timed answers, prompts that grow."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx

from flashmoa.engine import EngineClient, PromptUsage
from flashmoa.errors import BadAnswer
from flashmoa.link.prompt_feed import PromptFeed
from flashmoa_bench.harness import clock

# Every vocabulary has these ids, and no special token has one.
TOKEN_IDS = range(1000, 4000)


def random_ids(dice: random.Random, count: int) -> list[int]:
    """Return fresh random token ids, so that no prompt is cached by chance."""
    return dice.choices(TOKEN_IDS, k=count)


@dataclass(slots=True)
class TimedAnswer:
    """An answer with the time when each token arrived, in seconds of the benchmark's clock."""

    ids: list[int] = field(default_factory=list[int])
    times: list[float] = field(default_factory=list[float])
    usage: PromptUsage | None = None

    @property
    def first(self) -> float:
        return self.times[0]

    @property
    def last(self) -> float:
        return self.times[-1]

    @property
    def late_tokens(self) -> int:
        """Return the number of prompt tokens that were computed after the request came."""
        if self.usage is None:
            return 0
        return self.usage.prompt_tokens - (self.usage.cached_tokens or 0)

    @property
    def ahead_tokens(self) -> int:
        """Return the number of prompt tokens that a prompt stream computed before the request."""
        stream = self.usage.prompt_stream if self.usage is not None else None
        return sum(span.tokens for span in stream.prefills) if stream is not None else 0


async def ask(
    engine: EngineClient,
    ids: Sequence[int],
    tokens: int,
    stream_id: str | None = None,
    into: TimedAnswer | None = None,
) -> TimedAnswer:
    """Generate exactly ``tokens`` tokens greedily.

    Args:
        ids: token ids of the prompt.
        stream_id: id of the prompt stream with the prompt's beginning.
        into: answer to write into, so that a caller can watch it grow.
    """
    answer = into if into is not None else TimedAnswer()
    sampling: dict[str, Any] = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    async with engine.generate(
        input_ids=ids,
        sampling=sampling,
        prompt_stream_id=stream_id,
    ) as deltas:
        async for delta in deltas:
            now = clock.now()
            answer.ids += delta.token_ids
            answer.times += [now] * len(delta.token_ids)
            answer.usage = delta.usage or answer.usage
    return answer


async def ask_batch(engine: EngineClient, prompts: Sequence[Sequence[int]]) -> list[TimedAnswer]:
    """Generate the first token of each prompt, with one batch request.

    All prompts reach the scheduler at once.

    Raises: BadAnswer if a prompt gets no answer.
    """
    answers = [TimedAnswer() for _ in prompts]
    body = {
        "input_ids": [list(prompt) for prompt in prompts],
        "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
        "stream": True,
    }
    async with (
        httpx.AsyncClient(base_url=engine.url, timeout=clock.machine_seconds(600)) as http,
        http.stream("POST", "/generate", json=body) as response,
    ):
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                _record_event(json.loads(line.removeprefix("data: ")), answers)
    if not all(answer.times for answer in answers):
        raise BadAnswer(f"{engine.url} did not answer every prompt of a batch")
    return answers


def _record_event(event: dict[str, Any], answers: Sequence[TimedAnswer]) -> None:
    if "index" not in event:
        return
    index: int = event["index"]
    answer = answers[index]
    if not answer.times:
        answer.times.append(clock.now())
    answer.usage = PromptUsage.model_validate(event["meta_info"])


class _GrowingPrompt:
    """Hands a :class:`PromptFeed` the token ids that a source writes. The request completes it."""

    is_complete = False
    is_followed = False

    def __init__(self, known: Sequence[int], source: Callable[[], Sequence[int]]) -> None:
        self._known = known
        self._source = source
        self._taken_tokens: int | None = None

    def take(self) -> Sequence[int]:
        """Return the known tokens at the first call, then the tokens since the last call."""
        if self._taken_tokens is None:
            self._taken_tokens = 0
            return self._known
        fresh = self._source()[self._taken_tokens :]
        self._taken_tokens += len(fresh)
        return fresh

    def take_back(self) -> None:
        """Keep all tokens; they never change."""

    def followed(self) -> None:
        """Do nothing: the client sends all tokens itself."""

    def note_followed(self, call_id: str) -> None:
        """Do nothing."""


@asynccontextmanager
async def feeding(
    engine: EngineClient,
    known: Sequence[int],
    source: Callable[[], Sequence[int]],
    *,
    is_linked: bool = True,
) -> AsyncGenerator[Callable[[], str | None]]:
    """Feed the tokens that a source writes to a prompt stream, at the engine's pace.

    The stream opens in the background. Leaving the context deletes it unless it was claimed.

    Args:
        known: token ids at the prompt's beginning, which are sent at once.
        source: returns all token ids after ``known`` that are written so far.
        is_linked: whether there is a stream at all.

    Yields: a function that stops feeding and returns the stream's id for its request; ``None`` if
        the stream is not open.
    """
    if not is_linked:
        yield lambda: None
        return
    prompt = _GrowingPrompt(known, source)
    feed = PromptFeed(engine, prompt)
    is_claimed, has_ended = False, anyio.Event()

    def claim() -> str | None:
        nonlocal is_claimed
        feed.stop()
        is_claimed = feed.stream_id is not None
        return feed.stream_id

    async def feed_stream() -> None:
        try:
            await feed.run()
            await feed.keep()
        finally:
            if not is_claimed:
                await feed.delete()

    async def poll_source() -> None:
        while not has_ended.is_set():
            with anyio.move_on_after(clock.machine_seconds(0.01)):
                await has_ended.wait()
            feed.changed()

    async with anyio.create_task_group() as group:
        group.start_soon(feed_stream)
        group.start_soon(poll_source)
        try:
            yield claim
        finally:
            feed.stop()
            has_ended.set()
