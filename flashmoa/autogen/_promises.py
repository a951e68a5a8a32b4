"""Promise answers (``Promises``): pass on marks that stand for texts still being written.

This is for agents written by hand on autogen-core, whose next prompt cannot be predicted. They pass
on a mark, which travels through messages and f-strings as the text would. A client that is given
messages with marks in them links its prompt to the texts, and sends it when they are complete.
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
from flashmoa.linking.calls import CallObserver
from flashmoa.linking.failure_policy import FailurePolicy, UpstreamCancelled
from flashmoa.linking.pending_request import PendingRequest
from flashmoa.linking.streamed_text import Text, find_marks, find_texts, replace_marks
from flashmoa.observe import Listener

logger = logging.getLogger(__name__)

# Finished texts are kept for later readers, so many and so many characters; the oldest are dropped
# first.
_MAX_FINISHED = 4096
_MAX_CHARACTERS = 64_000_000
# The texts of all clients of this process, by their marks: one client's answer may be read by
# another client.
_texts: dict[str, Text] = {}
# The lengths of the texts that are finished, by their marks, the oldest first.
_finished: dict[str, int] = {}
_numbers = itertools.count(1)

# Returns the prompt of these messages as the engine will render it.
Render = Callable[[Sequence[LLMMessage]], Awaitable[str]]
Pending = PendingRequest[Sequence[LLMMessage]]


class PromisedCall(CallObserver):
    """Observes a call that reads promised texts, or writes one.

    Args:
        pending: the request with the texts it reads, if any; its prompt stream is claimed.
        text: the promised text it writes, if any.
        held: see :class:`CallRequest`.

    Attributes:
        used_id, is_late: what to report in ``CallStarted``.
    """

    def __init__(
        self, promises: Promises, pending: Pending | None, text: Text | None, held: str | None
    ) -> None:
        claimed = pending.claim() if pending is not None else {}
        self.prompt_stream_id = claimed.get("prompt_stream_id")
        self.used_id = pending.used_id if pending is not None else None
        self.is_late = pending is not None and pending.is_late
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
    """Holds the promises of one client, and the links to its prompts that wait for promised texts.

    Args:
        engine: the client's engine.
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
        """Start writing a text. Return an answer whose content is the text's mark.

        Args:
            name: the name of the agent that writes.
            write: makes the call, and writes its answer into the text as it arrives.

        Raises: RuntimeError if the client has been closed.
        """
        if self._host.is_closed:
            raise RuntimeError(
                "this client is closed and cannot promise an answer; make a new client"
            )
        text = Text(f"{name}-{next(_numbers)}")
        _texts[text.mark] = text
        self._writing.add(text)

        async def run() -> None:
            try:
                result = await write(text)
                if not isinstance(result.content, str):
                    raise TypeError(
                        "the model answered promise() with a tool call; use create() for calls "
                        "with tools"
                    )
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
        """Wait for the texts whose marks are in the messages of a call of ``agent``.

        Its prompt is prefilled while the texts are written.

        Returns: the messages with texts in place of marks, and the pending request whose prompt
            stream the call is to claim, if there were any marks.

        Raises: the error of the call that was to write a text, if that call failed.
        """
        texts = _find_texts(_get_contents(messages))
        if not texts:
            return messages, None
        # This future is cancelled with the task that waits for it, or by the token.
        read = asyncio.ensure_future(self._read(texts, messages, render, agent))
        if cancellation_token is not None:
            cancellation_token.link_future(read)
        return await read

    async def result(self, content: str) -> str:
        """Return a string with texts in place of marks. Raises: see :meth:`resolve`."""
        request = PendingRequest(
            content, _find_texts(content), replace_marks, self._policy, "result"
        )
        return await request.messages()

    def release(self, pending: Pending) -> None:
        """Release the stream of a request that failed or will not be sent, in the background."""
        self._host.start_cleanup(pending.release_and_wait)

    async def close(self) -> None:
        """Cancel the calls that write texts, and end the links."""
        await self._host.close()
        # Texts whose calls had not even begun are still among these.
        for text in list(self._writing):
            self._end(text)

    def _end(self, text: Text) -> None:
        # This does nothing if the text is complete or has failed already.
        text.fail(UpstreamCancelled(f"{text.name} was cancelled"))
        self._writing.discard(text)
        _finished[text.mark] = len(text.written)
        while len(_finished) > _MAX_FINISHED or sum(_finished.values()) > _MAX_CHARACTERS:
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
            messages, texts, _fill_in, self._policy, agent, self._listener
        )
        if pending.is_waiting and render is not None:
            self._host.start(pending.prepare_link(self._engine, render))
        try:
            return await pending.messages(), pending
        except BaseException:
            self.release(pending)
            raise


def _find_texts(value: Any) -> list[Text]:
    """Return the texts whose marks are in a value; warn of marks whose texts were dropped."""
    if lost := [mark for mark in find_marks(value) if mark not in _texts]:
        logger.warning(
            "%s stays as it is in the messages: this process no longer knows the text that it "
            "stands for. Keep `await client.result(...)` instead of what promise() returns.",
            ", ".join(lost),
        )
    return find_texts(value, _texts)


def _get_contents(messages: Sequence[LLMMessage]) -> list[Any]:
    """Return the strings of messages that may contain marks."""
    return [_get_strings(message.content) for message in messages]


def _get_strings(content: Any) -> Any:
    if isinstance(content, list):
        return [_get_strings(part) for part in cast("list[Any]", content)]
    return content.content if isinstance(content, FunctionExecutionResult) else content


def _fill_in(messages: Sequence[LLMMessage], by: Mapping[str, str]) -> Sequence[LLMMessage]:
    """Return messages with the strings ``by`` in place of their marks."""
    return [
        message.model_copy(update={"content": _replace_marks(message.content, by)})
        for message in messages
    ]


def _replace_marks(content: Any, by: Mapping[str, str]) -> Any:
    if isinstance(content, list):
        return [_replace_marks(part, by) for part in cast("list[Any]", content)]
    if isinstance(content, FunctionExecutionResult):
        return content.model_copy(update={"content": replace_marks(content.content, by)})
    return replace_marks(content, by)
