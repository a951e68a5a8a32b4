"""A request that waits for texts, and the link that prefills its prompt meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

import anyio

from flashmoa.engine import EngineClient, PluginMissing
from flashmoa.linking.failure_policy import Failure, FailurePolicy
from flashmoa.linking.link import Link, report_plain_engine
from flashmoa.linking.placeholders import StandIns
from flashmoa.linking.prompt import Prompt
from flashmoa.linking.streamed_text import Text
from flashmoa.observe import Listener, UpstreamFailed, ignore

logger = logging.getLogger(__name__)

# Given a text for each mark: the prompt as its engine will render it.
Render = Callable[[Mapping[str, str]], Awaitable[str]]

# What is to be run while a request waits.
Run = Callable[[], Coroutine[Any, Any, None]]


class Reading:
    """What one request reads.

    Args:
        texts: all that its messages mention; no two of a name.
        policy: what becomes of it when one fails.
        agent: who will send the request.
        listener: is told what happens to its link.
        streams: whether the texts go into its prompt as they are written, or only what stands
            before the first of them is prefilled.
        stream_ttl_seconds: see :class:`Link`.
    """

    def __init__(
        self,
        texts: Sequence[Text],
        policy: FailurePolicy,
        agent: str,
        listener: Listener = ignore,
        *,
        streams: bool = True,
        stream_ttl_seconds: float | None = None,
    ) -> None:
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

    def link(
        self, engine: EngineClient, render: Render, namespace: Mapping[str, str] | None = None
    ) -> Run:
        """Link its prompt to the texts; returns what to run meanwhile.

        Nothing waits for that: a request that comes before its prompt is rendered goes out
        unlinked. Where there can be no link, why is logged.

        Args:
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
        self, engine: EngineClient, render: Render, waiting: Sequence[Text]
    ) -> Prompt | None:
        stand_ins = StandIns(text.name for text in waiting)
        shown = {text.mark: f"{text}" for text in self._texts}
        shown |= {text.mark: stand_ins.padded(text.name) for text in waiting}
        try:
            return Prompt(stand_ins.segments(await render(shown)))
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

    async def whole(self) -> dict[str, str]:
        """Every text by its mark, once it is there. Raises: what a text failed with."""
        for text in self._texts:
            self._found[text.mark] = await text.read(self._policy)
            if text.failure is not None:
                self._go_on_without(text, text.failure)
        return self._found

    def take_over(self) -> str | None:
        """The request goes out: the prompt stream it is to use, if there is one."""
        self._is_late = self._stop_rendering()
        return self._link.take_over() if self._link is not None else None

    @property
    def is_late(self) -> bool:
        """Whether the request came before its stream was open."""
        return self._is_late or (self._link is not None and self._link.is_late)

    async def give_back(self) -> None:
        """The request failed or will not be sent: its stream is not to wait for it."""
        self._stop_rendering()
        if self._link is not None:
            self._link.end("abort")
            await self._link.delete_stream()

    async def release(self) -> None:
        """No request will come any more: a stream that was taken over for one is nobody's.

        A link that is not over gives its own back as it ends.
        """
        if self._link is not None and self._link.is_over:
            await self._link.delete_stream()

    def _stop_rendering(self) -> bool:
        """Whether there was anything to stop."""
        if self._rendering is None:
            return False
        self._rendering.cancel()
        self._rendering = None
        return True

    def _go_on_without(self, text: Text, failure: Failure) -> None:
        """What there is of a text is all of it for this reader."""
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
