"""Prefill the prompt of a request while the texts in it are written (:class:`PendingRequest`)."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import anyio

from flashmoa._concurrency import all_of, run_cancelled
from flashmoa.engine import EngineClient
from flashmoa.errors import PluginMissing
from flashmoa.link.expected import ChatRequest, ExpectedRequest, Turn
from flashmoa.link.failure_policy import Failure, FailurePolicy
from flashmoa.link.link import Link, report_no_link
from flashmoa.link.prompt import Placeholders, Prompt
from flashmoa.link.prompt_feed import report_plain_engine
from flashmoa.link.reasons import NO_PLUGIN
from flashmoa.link.streamed_text import StreamedText, replace_marks
from flashmoa.observe import Listener, UpstreamFailed
from flashmoa.observe.events import LATE, WHOLE, ignore

Messages = list[dict[str, Any]]
# Work to run in the background while a request waits.
Background = Callable[[], Coroutine[Any, Any, None]]


class PendingRequest:
    """A request that will be sent, whose prompt is prefilled as the texts in it are written.

    Args:
        messages: the request's messages, with marks for the texts.
        texts: every text whose mark is in the messages; their names must differ.
        policy: the actions when a text fails.
        agent: the name of the agent that will send the request.
        listener: receives the events of the request's link.
        streams: whether texts are prefilled as they are written. ``False`` prefills only the
            prompt before the first unfinished text.
    """

    def __init__(
        self,
        messages: Messages,
        texts: Sequence[StreamedText],
        policy: FailurePolicy,
        agent: str,
        listener: Listener = ignore,
        *,
        streams: bool = True,
    ) -> None:
        self._messages = messages
        self._streams = streams
        self._texts = texts
        self._policy = policy
        self._agent = agent
        self._listener = listener
        self._link: Link | None = None
        self._engine = ""
        # Set while the prompt is rendered.
        self._rendering: anyio.CancelScope | None = None
        # Why there is no link, for reports.
        self._unlinked = WHOLE
        # The strings that messages() has read, by mark.
        self._read_texts: dict[str, str] = {}

    @property
    def is_waiting(self) -> bool:
        return not all(text.is_complete for text in self._texts)

    @property
    def unlinked(self) -> str:
        """Why the claimed request uses no link, in words; empty if it uses one."""
        return self._unlinked if self._link is None else self._link.unused_reason

    @property
    def used_id(self) -> str | None:
        """The id of the claimed link, for events."""
        return self._link.used_id if self._link is not None else None

    async def messages(self) -> Messages:
        """Wait for the texts, and return the messages to send.

        Raises: the exception that a text failed with, unless the policy is to finalize.
        """

        async def read(text: StreamedText) -> None:
            self._read_texts[text._mark] = await text._read(self._policy)

        # A failure ends the wait at once, also for the texts before the failed one.
        await all_of([partial(read, text) for text in self._texts])
        for text in self._texts:
            if text.failure is not None:
                self._finalize(text, text.failure)
        return replace_marks(self._messages, self._read_texts)

    def claim(self) -> dict[str, Any]:
        """Return the fields to add to the request's body (``extra_body`` of OpenAI's client).

        Call this just before the request is sent; the link then sends nothing more.
        """
        if self._stop_rendering():
            self._unlinked = LATE
        stream_id = self._link.claim() if self._link is not None else None
        return {"prompt_stream_id": stream_id} if stream_id is not None else {}

    async def release(self) -> None:
        """Release the prompt stream of a request that failed or will not be sent.

        If the engine does not answer within 0.3 s, it lets the stream expire.
        """
        await run_cancelled(self.release_and_wait)

    async def release_and_wait(self) -> None:
        """Release the stream as :meth:`release` does, but give the engine time to answer."""
        self._stop_rendering()
        if self._link is not None:
            self._link.end("abort")
            await self._link.delete_stream()

    @property
    def is_unnamed(self) -> bool:
        return self._link is not None and self._link.is_unnamed

    async def delete_claimed_stream(self) -> None:
        """Delete a claimed stream whose request will not be sent, or was answered.

        A link that has not ended deletes its stream itself.
        """
        if self._link is not None and self._link.is_over:
            await self._link.delete_stream()

    def prepare_link(self, engine: EngineClient, fields: Mapping[str, Any]) -> Background:
        """Return a function to run in the background, which links the prompt to the texts.

        The request does not wait for the link: if it is claimed before its prompt is rendered, it
        is sent unlinked. If there can be no link, the reason is logged.

        Args:
            engine: the engine that the request will be sent to.
            fields: the request's other fields, with the namespace of its KV.
        """
        self._engine = engine.url
        self._rendering = rendering = anyio.CancelScope()
        unfinished = [text for text in self._texts if not text.is_complete]
        placeholders = Placeholders(text.name for text in unfinished)
        replacements = {text._mark: f"{text}" for text in self._texts}
        replacements |= {text._mark: placeholders.padded(text.name) for text in unfinished}
        body = {**fields, "messages": replace_marks(self._messages, replacements)}
        requests = [ChatRequest(engine, body)]
        expected = ExpectedRequest(Turn(self._agent), requests, placeholders)

        async def render_and_link() -> None:
            prompt: Prompt | None = None
            with rendering:
                try:
                    prompt = await expected.prompt()
                except PluginMissing as problem:
                    self._unlinked = NO_PLUGIN
                    report_plain_engine(engine, problem)
                except Exception as error:  # Linking must not cost the request.
                    self._unlinked = f"{error}"
                    report_no_link(self._agent, engine.url, error, self._listener)
            if rendering.cancel_called:
                return
            self._rendering = None
            if prompt is not None:
                self._link = Link(
                    engine,
                    prompt,
                    agent=self._agent,
                    on_failure=self._policy,
                    namespace=expected.namespace,
                    listener=self._listener,
                )
                self._feed(self._link, unfinished if self._streams else ())
                await self._link.run()

        return render_and_link

    def _feed(self, link: Link, texts: Iterable[StreamedText]) -> None:
        for text in texts:
            if text._mark in self._read_texts:
                # The request has this string, even if the text continues after a stall.
                link.feed(text.name, self._read_texts[text._mark])
                link.close_slot(text.name)
            else:
                text._feed_to(link)

    def _stop_rendering(self) -> bool:
        """Stop rendering the prompt. Return whether it was being rendered."""
        if self._rendering is None:
            return False
        self._rendering.cancel()
        self._rendering = None
        return True

    def _finalize(self, text: StreamedText, failure: Failure) -> None:
        """End a failed text where it is: let the link do so, or report it if there is no link."""
        if self._link is not None:
            self._link.fail_slot(text.name, failure)  # Does nothing if the slot is closed already.
            return
        self._listener(
            UpstreamFailed(
                agent=self._agent,
                engine=self._engine,
                upstream=text.name,
                failure=failure,
                action="finalize",
            )
        )
