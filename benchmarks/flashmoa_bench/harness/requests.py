"""Requests of a benchmark: random prompts, timed answers, prompts that are fed as they grow."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import anyio
import httpx

from flashmoa.engine import BadAnswer, EngineClient, PromptUsage
from flashmoa.linking.prompt_feed import PromptFeed

# Every vocabulary has these ids, and none has special tokens among them.
_IDS = (1000, 4000)
# Between two looks at what a source has written.
_LOOK_SECONDS = 0.01
_BATCH_SECONDS = 600.0


def random_ids(dice: random.Random, count: int) -> list[int]:
    """Return fresh random token ids, so that no prompt meets another one's cache by chance."""
    return dice.choices(range(*_IDS), k=count)


@dataclass(slots=True)
class TimedAnswer:
    """One generation; times in seconds of ``time.perf_counter``.

    Attributes:
        times: when each token arrived, one entry per token.
        begun: set with the first token.
    """

    ids: list[int] = field(default_factory=list[int])
    times: list[float] = field(default_factory=list[float])
    usage: PromptUsage | None = None
    begun: anyio.Event = field(default_factory=anyio.Event)

    @property
    def first(self) -> float:
        return self.times[0]

    @property
    def last(self) -> float:
        return self.times[-1]

    @property
    def late_tokens(self) -> int:
        """Return the prompt tokens computed after the request came."""
        if self.usage is None:
            return 0
        return self.usage.prompt_tokens - (self.usage.cached_tokens or 0)

    @property
    def ahead_tokens(self) -> int:
        """Return the prompt tokens that its prompt stream computed before it came."""
        stream = self.usage.prompt_stream if self.usage is not None else None
        return sum(span.tokens for span in stream.prefills) if stream is not None else 0


async def ask(
    engine: EngineClient,
    ids: Sequence[int],
    tokens: int,
    stream_id: str | None = None,
    into: TimedAnswer | None = None,
) -> TimedAnswer:
    """Generate exactly ``tokens`` tokens greedily; ``into`` can be watched as it grows."""
    answer = into if into is not None else TimedAnswer()
    sampling: dict[str, Any] = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    async with engine.generate(
        input_ids=ids,
        sampling=sampling,
        prompt_stream_id=stream_id,
        expected_output_tokens=tokens,
    ) as deltas:
        async for delta in deltas:
            now = time.perf_counter()
            answer.ids += delta.token_ids
            answer.times += [now] * len(delta.token_ids)
            answer.usage = delta.usage or answer.usage
            answer.begun.set()
    return answer


async def ask_batch(engine: EngineClient, prompts: Sequence[Sequence[int]]) -> list[TimedAnswer]:
    """Generate the first token of each prompt, sent as one batch request.

    They reach the scheduler at once.

    Raises: BadAnswer if the engine does not answer them all.
    """
    answers = [TimedAnswer() for _ in prompts]
    body = {
        "input_ids": [list(prompt) for prompt in prompts],
        "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
        "stream": True,
    }
    async with (
        httpx.AsyncClient(base_url=engine.url, timeout=_BATCH_SECONDS) as http,
        http.stream("POST", "/generate", json=body) as response,
    ):
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                _note(json.loads(line.removeprefix("data: ")), answers)
    if not all(answer.times for answer in answers):
        raise BadAnswer(f"{engine.url} did not answer every prompt of a batch")
    return answers


def _note(event: dict[str, Any], answers: Sequence[TimedAnswer]) -> None:
    if "index" not in event:
        return
    place: int = event["index"]
    answer = answers[place]
    if not answer.times:
        answer.times.append(time.perf_counter())
    answer.usage = PromptUsage.model_validate(event["meta_info"])


class _Written:
    """A prompt of token ids as its source writes it; never complete, its request says when."""

    is_complete = False

    def __init__(self, known: Sequence[int], source: Callable[[], Sequence[int]]) -> None:
        self._known = known
        self._source = source
        self._taken: int | None = None

    def take(self) -> Sequence[int]:
        if self._taken is None:
            self._taken = 0
            return self._known
        fresh = self._source()[self._taken :]
        self._taken += len(fresh)
        return fresh


class Feeder:
    """Feeds a prompt stream of token ids what its source has, at the engine's pace.

    Args:
        known: what the prompt begins with; sent when the feeder is entered.
        source: all tokens there are so far beyond ``known``.

    A context manager: it opens the stream in the background, and gives it back unless
    :meth:`take_over` has handed it to its request.
    """

    def __init__(
        self, engine: EngineClient, known: Sequence[int], source: Callable[[], Sequence[int]]
    ) -> None:
        self._feed = PromptFeed(engine, _Written(known, source))
        self._group = anyio.create_task_group()
        self._over = anyio.Event()
        self._taken = False

    @property
    def stream_id(self) -> str | None:
        return self._feed.stream_id

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        self._group.start_soon(self._run)
        self._group.start_soon(self._look)
        return self

    async def __aexit__(self, *problem: Any) -> bool | None:
        self._feed.stop()
        self._over.set()
        return await self._group.__aexit__(*problem)

    def take_over(self) -> str | None:
        """Hand the stream to its request: return its id, or ``None`` if it is not open yet."""
        self._feed.stop()
        self._taken = self.stream_id is not None
        return self.stream_id

    async def _run(self) -> None:
        try:
            await self._feed.run()
            await self._feed.hold()
        finally:
            if not self._taken:
                await self._feed.delete()

    async def _look(self) -> None:
        """Look at the source at intervals.

        Clocks and other requests do not tell when they have more.
        """
        while not self._over.is_set():
            with anyio.move_on_after(_LOOK_SECONDS):
                await self._over.wait()
            self._feed.changed()
