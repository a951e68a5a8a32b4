"""A request that waits for texts, and the link that prefills its prompt meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Generic, TypeVar

import anyio

from flashmoa._concurrency import run_cancelled
from flashmoa.engine import EngineClient, PluginMissing
from flashmoa.linking.failure_policy import Failure, FailurePolicy
from flashmoa.linking.link import Link, report_plain_engine
from flashmoa.linking.placeholders import Placeholders
from flashmoa.linking.prompt import Prompt
from flashmoa.linking.streamed_text import Text
from flashmoa.observe import Listener, UpstreamFailed, ignore

logger = logging.getLogger(__name__)

Messages = TypeVar("Messages")

# What is to be run while a request waits.
Run = Callable[[], Coroutine[Any, Any, None]]


class PendingRequest(Generic[Messages]):
    """A request that will be sent, whose prompt is prefilled as the texts in it are written.

    Args:
        given: the request's messages, with marks for the texts.
        texts: all that the messages mention; no two of a name.
        fill: returns messages with a string in place of each mark.
        policy: what becomes of the request when a text fails.
        agent: who will send the request.
        listener: is told what happens to its link.
        streams: whether the texts go into its prompt as they are written, or only what stands
            before the first of them is prefilled.
        stream_ttl_seconds: see :class:`Link`.
    """

    def __init__(  # noqa: PLR0913 - two places make it
        self,
        given: Messages,
        texts: Sequence[Text],
        fill: Callable[[Messages, Mapping[str, str]], Messages],
        policy: FailurePolicy,
        agent: str,
        listener: Listener = ignore,
        *,
        streams: bool = True,
        stream_ttl_seconds: float | None = None,
    ) -> None:
        self._given = given
        self._fill = fill
        self._streams = streams
        self._stream_ttl_seconds = stream_ttl_seconds
        self._texts = texts
        self._policy = policy
        self._agent = agent
        self._listener = listener
        self._link: Link | None = None
        self._engine = ""
        # Until its prompt is rendered.
        self._rendering: anyio.CancelScope | None = None
        self._is_late = False
        # What it goes on with, by mark.
        self._found: dict[str, str] = {}

    @property
    def is_waiting(self) -> bool:
        """Whether any of its texts is still being written."""
        return not all(text.is_complete for text in self._texts)

    @property
    def is_late(self) -> bool:
        """Whether it was claimed before its prompt stream was open."""
        return self._is_late or (self._link is not None and self._link.is_late)

    async def messages(self) -> Messages:
        """Return the messages to send, once every text in them is there.

        Raises: what a text failed with.
        """
        for text in self._texts:
            self._found[text.mark] = await text.read(self._policy)
            if text.failure is not None:
                self._go_on_without(text, text.failure)
        return self._fill(self._given, self._found)

    def claim(self) -> dict[str, Any]:
        """Return what to add to the request's body (``extra_body`` of OpenAI's client).

        Call it when the request goes out: the link sends nothing more then.
        """
        self._is_late = self._stop_rendering()
        stream_id = self._link.claim() if self._link is not None else None
        return {"prompt_stream_id": stream_id} if stream_id is not None else {}

    async def release(self) -> None:
        """Release the prompt stream of a request that failed or will not be sent.

        An engine that does not answer within 0.3 s lets the stream expire.
        """
        await run_cancelled(self.abandon)

    async def abandon(self) -> None:
        """Release as :meth:`release`, but wait for the engine."""
        self._stop_rendering()
        if self._link is not None:
            self._link.end("abort")
            await self._link.delete_stream()

    async def delete_claimed_stream(self) -> None:
        """Delete a stream that was claimed for a request that will not come any more.

        A link that is not over deletes its own as it ends.
        """
        if self._link is not None and self._link.is_over:
            await self._link.delete_stream()

    def link(
        self,
        engine: EngineClient,
        render: Callable[[Messages], Awaitable[str]],
        namespace: Mapping[str, str] | None = None,
    ) -> Run:
        """Link its prompt to the texts; returns what to run meanwhile.

        Nothing waits for that: a request that comes before its prompt is rendered goes out
        unlinked. Where there can be no link, the reason is logged.

        Args:
            render: the prompt of messages as their engine will render it.
            namespace: of the request's KV; by default the engine client's.
        """
        self._engine = engine.url
        self._rendering = rendering = anyio.CancelScope()
        waiting = [text for text in self._texts if not text.is_complete]

        async def run() -> None:
            prompt: Prompt | None = None
            with rendering:
                prompt = await self._rendered(engine, render, waiting)
            if rendering.cancel_called:
                return
            self._rendering = None
            if prompt is not None:
                self._link = self._linked(engine, prompt, waiting, namespace)
                await self._link.run()

        return run

    async def _rendered(
        self,
        engine: EngineClient,
        render: Callable[[Messages], Awaitable[str]],
        waiting: Sequence[Text],
    ) -> Prompt | None:
        placeholders = Placeholders(text.name for text in waiting)
        shown = {text.mark: f"{text}" for text in self._texts}
        shown |= {text.mark: placeholders.padded(text.name) for text in waiting}
        try:
            return placeholders.build_prompt(await render(self._fill(self._given, shown)))
        except PluginMissing as problem:
            report_plain_engine(engine.url, problem)
        except Exception as error:  # Linking must not cost the request.
            logger.warning("No link to %s this time: %s", self._agent, error)
        return None

    def _linked(
        self,
        engine: EngineClient,
        prompt: Prompt,
        waiting: Sequence[Text],
        namespace: Mapping[str, str] | None,
    ) -> Link:
        link = Link(
            engine,
            prompt,
            agent=self._agent,
            on_failure=self._policy,
            stream_ttl_seconds=self._stream_ttl_seconds,
            namespace=namespace,
            listener=self._listener,
        )
        for text in waiting if self._streams else ():
            if text.mark in self._found:  # Be it complete or not, nothing more of it is read.
                link.feed(text.name, self._found[text.mark])
                link.close_slot(text.name)
            else:
                text.follow(link)
        return link

    def _stop_rendering(self) -> bool:
        """Stop rendering the prompt; returns whether it was being rendered."""
        if self._rendering is None:
            return False
        self._rendering.cancel()
        self._rendering = None
        return True

    def _go_on_without(self, text: Text, failure: Failure) -> None:
        """Take what has arrived of a text for all of it."""
        if self._link is not None:
            self._link.fail_slot(text.name, failure)  # Unless it has noticed by itself.
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
