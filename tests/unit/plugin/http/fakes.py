"""The engine as prompt streams in the HTTP process see it, for tests without SGLang."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from flashmoa_sglang.costs import UNMEASURED
from flashmoa_sglang.http.stream import PromptStream
from flashmoa_sglang.http.streams import StreamTable
from flashmoa_sglang.messages import StreamProgress, StreamTokens


class FakeEngine:
    """An engine that notes its calls.

    Attributes:
        opened, released, cancelled: ids of streams. Cancelled is a stream's opening.
        handed: the messages with tokens.
        refusal, mistake: raised when a stream is opened, or when tokens are handed over.
    """

    max_prompt_tokens = 1000
    data_parallel_ranks = 1
    costs = UNMEASURED
    draining = False
    refusal: Exception | None = None
    mistake: Exception | None = None
    reports = 0

    def __init__(self) -> None:
        self.lacks = set[str]()
        self.opened, self.released, self.cancelled = list[str](), list[str](), list[str]()
        self.handed: list[StreamTokens] = []
        # Tests clear it if opening a stream takes long.
        self.opens = asyncio.Event()
        self.opens.set()
        self._handlers: dict[type, Callable[[Any], None]] = {}

    def handle(self, kind: type, handler: Callable[[Any], None]) -> None:
        self._handlers[kind] = handler

    def reports_progress(self, progress: StreamProgress) -> None:
        self._handlers[StreamProgress](progress)

    async def open_stream(self, stream: str, _terms: object) -> None:
        self.opened.append(stream)
        try:
            await self.opens.wait()
        except asyncio.CancelledError:
            self.cancelled.append(stream)
            raise
        if self.refusal is not None:
            raise self.refusal

    def send(self, tokens: StreamTokens) -> None:
        if self.mistake is not None:
            raise self.mistake
        self.handed.append(tokens)

    def release(self, stream: str) -> None:
        self.released.append(stream)

    @asynccontextmanager
    async def change(self) -> AsyncGenerator[None]:
        yield

    async def kv(self) -> list[Any]:
        self.reports += 1
        return []

    def tokens_of(self, stream: str) -> list[int]:
        """Return all tokens of a stream that were handed over and not taken back."""
        found: list[int] = []
        for message in self.handed:
            for id_, kept in message.kept:
                if id_ == stream:
                    del found[kept:]
            for id_, tokens, _ in message.tokens:
                if id_ == stream:
                    found += memoryview(tokens).cast("q").tolist()
        return found


def open_stream(
    table: StreamTable, ttl: float = 60.0, ids: Sequence[int] = range(100), **fields: Any
) -> PromptStream:
    """Open a stream of token ids."""
    stream = PromptStream(ttl, buffer=None, **fields)
    table.add(stream, ids)
    table.open(stream)
    return stream


def generation(ids: Any, **fields: Any) -> Any:
    """Return the fields of a ``GenerateReqInput``."""
    names = "text session_params image_data video_data audio_data cache_salt extra_key lora_path"
    none = dict.fromkeys([*names.split(), "sampling_params"])
    return SimpleNamespace(**{**none, "input_ids": ids, **fields})


def decode(ids: Sequence[int], **_: Any) -> str:
    """Decode bytes; a text has no space at its beginning, as sentencepiece has none."""
    return bytes([*ids]).decode(errors="replace").removeprefix(" ")
