"""Promised answers: marks that stand for text while it is being written.

For agents written by hand on autogen-core, whose next prompt cannot be told: what they pass on
is a mark, which travels through messages and f-strings as the text would. The client that is
asked to answer messages with marks in them links its prompt to the texts, and sends it when they
are complete.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, cast

from autogen_core import CancellationToken
from autogen_core.models import (
    CreateResult,
    FunctionExecutionResult,
    LLMMessage,
    RequestUsage,
)

from flashmoa._concurrency import TaskHost
from flashmoa.engine import EngineClient
from flashmoa.linking.failure_policy import FailurePolicy, UpstreamCancelled
from flashmoa.linking.observed_call import CallObserver
from flashmoa.linking.pending_request import PendingRequest
from flashmoa.linking.streamed_text import Text, find_marks, find_texts, replace_marks
from flashmoa.observe import Listener

logger = logging.getLogger(__name__)

# Finished texts are kept for later readers; the oldest are dropped first.
_KEPT = 4096
# Marks of all clients of this process: one model's answer may be another one's prompt.
_texts: dict[str, Text] = {}
_finished: dict[str, None] = {}
_numbers = itertools.count(1)

# Renders messages as the engine will, for a call with these tools.
Render = Callable[[Sequence[LLMMessage]], Awaitable[str]]


Pending = PendingRequest[Sequence[LLMMessage]]


class PromisedCall(CallObserver):
    """A call that reads promised texts, or writes one.

    Args:
        pending: what it reads, if anything; its prompt stream is claimed.
        text: what it writes, if others read it.
        held: why its text is not given to others as it arrives, if so.
    """

    def __init__(
        self, promises: Promises, pending: Pending | None, text: Text | None, held: str | None
    ) -> None:
        claimed = pending.claim() if pending is not None else {}
        self.prompt_stream_id = claimed.get("prompt_stream_id")
        self._promises = promises
        self._pending = pending
        self._text = text if held is None else None

    def on_text(self, text: str) -> None:
        if self._text is not None:
            self._text.write(text)

    def on_failure(self, error: BaseException) -> None:
        # The request may not have reached the engine, which then still keeps its stream.
        self.release_stream()

    def release_stream(self) -> None:
        if self._pending is not None:
            self._promises.release(self._pending)


class Promises:
    """The promises of one client, and the links to prompts that wait for any.

    Args:
        engine: where the client's requests go.
        policy: what happens to its prompts when a text in them fails.
        listener: receives the links' events.
    """

    def __init__(self, engine: EngineClient, policy: FailurePolicy, listener: Listener) -> None:
        self._engine = engine
        self._policy = policy
        self._listener = listener
        self._host = TaskHost("A link failed; the request that reads the promise runs unlinked")
        self._writing: set[Text] = set()

    def make(self, name: str, write: Callable[[Text], Awaitable[CreateResult]]) -> CreateResult:
        """Return an answer that ``write`` is about to write: its content is a mark.

        Raises: RuntimeError where the client has been closed.
        """
        if self._host.is_closed:
            raise RuntimeError("this client is closed and cannot promise an answer; make a new one")
        text = Text(f"{name}-{next(_numbers)}")
        _texts[text.mark] = text
        self._writing.add(text)

        async def run() -> None:
            try:
                result = await write(text)
                if not isinstance(result.content, str):
                    raise TypeError("a promised answer became a tool call; ask for it with create")
                text.finish(result.content)
            except Exception as error:
                text.fail(error)
            finally:
                self._end(text)

        self._host.start(run)
        usage = RequestUsage(prompt_tokens=0, completion_tokens=0)
        return CreateResult(finish_reason="stop", content=text.mark, usage=usage, cached=False)

    async def resolve(
        self,
        messages: Sequence[LLMMessage],
        render: Render | None,
        agent: str,
        cancellation_token: CancellationToken | None = None,
    ) -> tuple[Sequence[LLMMessage], Pending | None]:
        """Return messages with texts for marks, once these are complete, and the pending request
        whose prompt was prefilled meanwhile; the call of ``agent`` claims its stream.

        Raises: what a text failed with.
        """
        texts = _known(_contents(messages))
        if not texts:
            return messages, None
        # Cancelled with the task that waits for it, or by the token.
        waiting = asyncio.ensure_future(self._read(texts, messages, render, agent))
        if cancellation_token is not None:
            cancellation_token.link_future(waiting)
        return await waiting

    async def result(self, content: str) -> str:
        """Return a string with texts for marks. Raises: what a text failed with."""
        reading = PendingRequest(content, _known(content), replace_marks, self._policy, "result")
        return await reading.messages()

    def release(self, pending: Pending) -> None:
        """Release the stream of a request that failed or will not be sent, in the background."""
        self._host.start_cleanup(pending.release_and_wait)

    async def close(self) -> None:
        """End what is being written and linked."""
        await self._host.close()
        for text in list(self._writing):  # Those whose writing had not even begun.
            self._end(text)

    def _end(self, text: Text) -> None:
        text.fail(UpstreamCancelled(f"{text.name} was cancelled"))  # Unless it is over.
        self._writing.discard(text)
        _finished[text.mark] = None
        while len(_finished) > _KEPT:
            oldest = next(iter(_finished))
            del _finished[oldest], _texts[oldest]

    async def _read(
        self,
        texts: Sequence[Text],
        messages: Sequence[LLMMessage],
        render: Render | None,
        agent: str,
    ) -> tuple[Sequence[LLMMessage], Pending]:
        pending: Pending = PendingRequest(
            messages, texts, _filled, self._policy, agent, self._listener
        )
        if pending.is_waiting and render is not None:
            self._host.start(pending.prepare_link(self._engine, render))
        try:
            return await pending.messages(), pending
        except BaseException:
            self.release(pending)
            raise


def _known(value: Any) -> list[Text]:
    """Return the texts that a value mentions; log those that are not known any more."""
    if lost := [mark for mark in find_marks(value) if mark not in _texts]:
        logger.warning(
            "%s stays as it is: the promised text is not known in this process any more. "
            "Keep `await client.result(...)` instead of what promise() returns.",
            ", ".join(lost),
        )
    return find_texts(value, _texts)


def _contents(messages: Sequence[LLMMessage]) -> list[Any]:
    """Return the strings of messages in which marks may stand."""
    return [_plain(message.content) for message in messages]


def _plain(content: Any) -> Any:
    if isinstance(content, list):
        return [_plain(one) for one in cast("list[Any]", content)]
    return content.content if isinstance(content, FunctionExecutionResult) else content


def _filled(messages: Sequence[LLMMessage], by: Mapping[str, str]) -> Sequence[LLMMessage]:
    return [
        message.model_copy(update={"content": _with_texts(message.content, by)})
        for message in messages
    ]


def _with_texts(content: Any, by: Mapping[str, str]) -> Any:
    if isinstance(content, list):
        return [_with_texts(one, by) for one in cast("list[Any]", content)]
    if isinstance(content, FunctionExecutionResult):
        return content.model_copy(update={"content": replace_marks(content.content, by)})
    return replace_marks(content, by)
