"""AutoGen's own events about model calls, with what the engine says of the prompt.

The stock client logs an ``LLMCallEvent`` or an ``LLMStreamEndEvent`` from within its methods,
with the tokens of the prompt and of the answer. A filter of its logger adds ``cached_tokens``,
``streamed_tokens`` and ``late_tokens`` (see ``EngineUsage``) to that event, on its way to whoever
listens; events of other clients pass as they are.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, contextmanager
from contextvars import ContextVar

from autogen_core import EVENT_LOGGER_NAME
from autogen_core.logging import LLMCallEvent, LLMStreamEndEvent
from autogen_core.models import CreateResult

from flashmoa.completions import Watch

_current: ContextVar[Watch | None] = ContextVar("flashmoa_call", default=None)


@contextmanager
def current(watch: Watch) -> Generator[None]:
    """What AutoGen logs of a call meanwhile is about this one."""
    before = _current.get()
    _current.set(watch)
    try:
        yield
    finally:
        # Not by token: a coroutine that is thrown away is closed in another context.
        _current.set(before)


async def each(
    stream: AsyncGenerator[str | CreateResult, None], watch: Watch
) -> AsyncGenerator[str | CreateResult, None]:
    """The items of a stream, each made while its call is the :func:`current` one: whoever reads
    them may do other calls in between."""
    async with aclosing(stream):
        while True:
            with current(watch):
                item = await anext(stream, None)
            if item is None:
                return
            yield item


class _PromptTokens(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        watch, event = _current.get(), record.msg
        if watch is None or watch.usage is None:
            return True
        if isinstance(event, LLMCallEvent | LLMStreamEndEvent):
            event.kwargs["cached_tokens"] = watch.usage.cached_tokens
            event.kwargs["streamed_tokens"] = watch.usage.streamed_tokens
            event.kwargs["late_tokens"] = watch.usage.late_tokens
        return True


logging.getLogger(EVENT_LOGGER_NAME).addFilter(_PromptTokens())
