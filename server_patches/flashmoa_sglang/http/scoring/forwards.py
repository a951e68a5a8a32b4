"""Computes the log-probabilities of answers after prompts, each by a prefill of its own.

The prefills of a list are sent in batches, so that the engine computes a common beginning once. A
batch is one message to the scheduler, which can fill a forward with it. The first forward begins
with the first batch, and the scheduler gets the other batches while this forward runs.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from flashmoa_sglang.http.client_requests import StreamRequest, using_stream
from flashmoa_sglang.http.engine import PREFILL_ONLY, new_rid
from flashmoa_sglang.http.errors import ApiError, EngineBusy, EngineFailed
from flashmoa_sglang.http.stream import Terms
from flashmoa_sglang.messages import RequestMark, unsent

if TYPE_CHECKING:
    from flashmoa_sglang.http.engine import Engine

# Enough to fill a forward with short prompts. A long list's other prefills stay in this process, so
# that other clients' requests do not queue behind the whole list.
_MAX_PREFILLS_IN_FLIGHT = 256


@dataclass(slots=True)
class ScoredPrompt:
    """A prompt, the tokens of the candidates that may follow it, and the results of its prefills.

    Attributes:
        name: the item's name in messages, such as ``documents[3]``.
        left: number of prefills without a result.
        computed: number of prefills with a result. ``prompt_tokens`` and ``cached_tokens`` count
            the tokens of their prompts.
    """

    index: int
    name: str
    ids: Sequence[int]
    candidates: list[list[int]]
    left: int = 0
    computed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    _found: dict[tuple[int, ...], float] = field(default_factory=dict[tuple[int, ...], float])

    @property
    def logprobs(self) -> list[float]:
        """The natural logarithm of each candidate's probability, once no prefill is left."""
        return [self._found[tuple(tokens)] for tokens in self.candidates]

    def prefills(self) -> list[_Prefill]:
        """Return one prefill for all single tokens, and one for each longer candidate."""
        single = [tokens[0] for tokens in self.candidates if len(tokens) == 1]
        longer = [_Prefill(self, tokens) for tokens in self.candidates if len(tokens) > 1]
        prefills = [_Prefill(self, [], single), *longer] if single else longer
        self.left = len(prefills)
        return prefills

    def keep(self, prefill: _Prefill, meta: dict[str, Any]) -> None:
        """Keep the log-probabilities in SGLang's ``meta_info``.

        Raises: EngineBusy or EngineFailed if SGLang has aborted the prefill.
        """
        reason = meta["finish_reason"]
        if reason["type"] == "abort":
            refusal = EngineBusy if reason.get("status_code") == EngineBusy.status else EngineFailed
            raise refusal(f"SGLang has aborted this prefill: {reason.get('message', 'aborted')}")
        if prefill.candidate:
            values = [value for value, *_ in meta["input_token_logprobs"][1:]]
            self._found[tuple(prefill.candidate)] = math.fsum(map(_to_float, values))
        else:
            found = {token: value for value, token, *_ in meta["output_token_ids_logprobs"][0]}
            self._found |= {(token,): _to_float(found[token]) for token in prefill.single}
        self.computed += 1
        self.prompt_tokens += meta["prompt_tokens"]
        self.cached_tokens += meta["cached_tokens"]
        self.left -= 1


@dataclass(frozen=True, slots=True)
class _Prefill:
    """A prefill of a prompt and perhaps a candidate of several tokens.

    Attributes:
        single: tokens whose log-probabilities after the prompt are wanted; empty with a candidate.
            In one forward, SGLang 0.5.12 takes prefills without such tokens only if their list is
            empty, and not if it is missing.
        stream: the prompt stream that the prefill uses, if any.
    """

    prompt: ScoredPrompt
    candidate: list[int]
    single: list[int] = field(default_factory=list[int])
    stream: StreamRequest | None = None


@contextmanager
def name_item(name: str, index: int) -> Generator[None]:
    """Name the item in the message of an :class:`ApiError`, and its index in ``item``."""
    try:
        yield
    except ApiError as error:
        details = {**error.details, "item": index}
        raise type(error)(f"{name}: {error}", **details) from error


class PrefillRoom:
    """Bounds how many prefills of all lists are in flight. Lists take turns, batch by batch.

    Args: queue: the most requests that may wait in the engine (``--max-queued-requests``), if there
        is a limit. Lists fill half of the queue, since a full queue refuses their own prefills.
    """

    def __init__(self, queue: int | None) -> None:
        limit = _MAX_PREFILLS_IN_FLIGHT
        if queue is not None:
            limit = max(1, min(limit, queue // 2))
        # Smaller batches would not fill a GPU's forward; with larger batches it would begin later.
        self.batch_size = min(16, limit)
        self._turn = asyncio.Lock()
        self._room = asyncio.Semaphore(limit)

    async def enter(self, prefills: int) -> None:
        """Wait for one's turn, and until there is room for a number of prefills."""
        async with self._turn:
            for entered in range(prefills):
                try:
                    await self._room.acquire()
                except BaseException:
                    self.leave(entered)
                    raise

    def leave(self, prefills: int) -> None:
        """Give the room of a number of prefills back."""
        for _ in range(prefills):
            self._room.release()


@dataclass(slots=True)
class ListScorer:
    """Scores the prompts of one request.

    Attributes:
        room: the room for the prefills of this list and all other lists.
        shares: whether the engine computes a common prefix once if its requests come together.
        on_scores: gets each prompt when the prompt is scored.
        stream: the prompt stream of the only prompt. The prompt's first prefill uses it.
    """

    engine: Engine
    terms: Terms
    http_request: Any
    room: PrefillRoom
    shares: bool
    on_scores: Callable[[ScoredPrompt], None] = lambda _: None
    stream: StreamRequest | None = None

    async def run(self, prompts: Sequence[ScoredPrompt]) -> None:
        """Score all prompts.

        Raises: ApiError if the engine cannot compute one; the others are aborted.
        """
        items = [prompt.prefills() for prompt in prompts]
        if self.stream is None:
            await self._compute_items(items)
            return
        items[0][0] = replace(items[0][0], stream=self.stream)
        # If a prefill is refused, the whole request is refused, and leaves the stream.
        async with using_stream(self.stream, self.http_request):
            await self._compute_items(items)

    async def _compute_items(self, items: Sequence[Sequence[_Prefill]]) -> None:
        if self.shares:
            await self._compute([*chain(*items)])
            return
        # A common prefix must be in the radix cache before later prefills can use it.
        await self._compute([prefills[0] for prefills in items[:1]])
        await self._compute([prefills[0] for prefills in items[1:]])
        await self._compute([*chain(*(prefills[1:] for prefills in items))])

    async def _compute(self, prefills: Sequence[_Prefill]) -> None:
        room = self.room
        try:
            async with asyncio.TaskGroup() as group:
                for batch in self._batches(prefills):
                    await room.enter(len(batch))
                    task = group.create_task(self._compute_batch(batch))
                    # A task that is cancelled before it begins gives its room back, too.
                    task.add_done_callback(lambda _, batch=batch: room.leave(len(batch)))
                    # The batch is sent now, and other requests have their turn before the next.
                    await asyncio.sleep(0)
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    def _batches(self, prefills: Sequence[_Prefill]) -> Iterator[Sequence[_Prefill]]:
        # Only a request that is no batch can use a prompt stream.
        if prefills and prefills[0].stream is not None:
            yield prefills[:1]
            prefills = prefills[1:]
        for start in range(0, len(prefills), self.room.batch_size):
            yield prefills[start : start + self.room.batch_size]

    async def _compute_batch(self, prefills: Sequence[_Prefill]) -> None:
        request, stream = self._request(prefills), prefills[0].stream
        if stream is not None:
            stream.use(request, multimodal=False)
        async with aclosing(self.engine.run(request, self.http_request)) as outputs:
            async for output in outputs:
                # SGLang also streams an output if it retracts a prefill, which runs again later.
                if output["meta_info"]["finish_reason"] is None:
                    continue
                if stream is not None:
                    stream.annotate(output)
                prefill = prefills[output.get("index", 0)]
                prompt = prefill.prompt
                with name_item(prompt.name, prompt.index):
                    prompt.keep(prefill, output["meta_info"])
                if not prompt.left:
                    self.on_scores(prompt)

    def _request(self, prefills: Sequence[_Prefill]) -> Any:
        """Return SGLang's request for log-probabilities: a batch, unless it uses a stream."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        own: dict[str, list[Any]] = {
            "input_ids": [[*prefill.prompt.ids, *prefill.candidate] for prefill in prefills],
            # SGLang gives log-probabilities of the prefilled tokens after this position.
            "logprob_start_len": [
                len(prefill.prompt.ids) - 1 if prefill.candidate else -1 for prefill in prefills
            ],
            "token_ids_logprob": [prefill.single for prefill in prefills],
            "rid": [new_rid() for _ in prefills],
        }
        uses_stream = prefills[0].stream is not None
        return GenerateReqInput(
            **({name: value for name, (value,) in own.items()} if uses_stream else own),
            # If another request of the batch decodes, SGLang applies each request's temperature to
            # its log-probabilities. With the mark, results go past the detokenizer.
            sampling_params={
                **PREFILL_ONLY,
                "temperature": 1.0,
                "custom_params": RequestMark(own=True).to_custom_params(),
            },
            return_logprob=True,
            stream=True,
            priority=self.terms.priority,
            routed_dp_rank=self.terms.dp_rank,
            **self.terms.namespace(),
            **(unsent() if self.engine.role == "prefill" else {}),
        )


def _to_float(value: float | None) -> float:
    return -math.inf if value is None else value
