"""Links: from upstream text to the KV of a downstream prompt.

While upstream agents write into a prompt's slots, its link sends whatever the stable
frontier passes to the downstream engine, which prefills it (FlashAgents §3.1). A link never
raises into the agents it serves: a failure ends the link and is reported as an event, and the
downstream request is computed as it would have been without the link.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Literal

import anyio

from flashmoa.engine import EngineClient, PluginMissing, StreamState
from flashmoa.linking.failure_policy import Failure, FailurePolicy, OnFailure
from flashmoa.linking.prompt import Prompt, Slot
from flashmoa.linking.prompt_feed import PromptFeed
from flashmoa.observe import (
    LinkAdvanced,
    LinkClosed,
    LinkOpened,
    Listener,
    UpstreamFailed,
    contained,
    ignore,
)

logger = logging.getLogger(__name__)

# What is sent ahead of a request: nothing, what is known of its prompt beforehand, or also the
# text of its upstream agents as they write it.
Ahead = Literal["nothing", "known", "text"]

_LATE = "too late"
_plain_engines: set[str] = set()
# Which kinds of failure of which engine have been logged; each is logged once as a warning.
_said: set[tuple[str, type[Exception]]] = set()


class Link:
    """One downstream prompt and the prompt stream it is sent to.

    Args:
        engine: the downstream agent's engine.
        prompt: the agent's future prompt; feed it through :meth:`feed` and :meth:`close_slot`.
        agent: the downstream agent's name, for events.
        on_failure: what happens to the link when an upstream agent fails.
        unused_seconds: how long to wait for the downstream request once the prompt is
            complete; then the KV is released.
        stream_ttl_seconds: after what time the engine releases the KV if this process vanishes;
            by default the engine client's.
        namespace: the namespace of the downstream request's KV; by default the engine client's.
        listener: receives the link's events.

    Run :meth:`run` in a task group; cancelling it closes the stream.
    """

    def __init__(  # noqa: PLR0913 - users set them by name
        self,
        engine: EngineClient,
        prompt: Prompt,
        *,
        agent: str,
        on_failure: OnFailure = "abort",
        unused_seconds: float = 30.0,
        stream_ttl_seconds: float | None = None,
        namespace: Mapping[str, str] | None = None,
        listener: Listener = ignore,
    ) -> None:
        self.engine = engine
        self.prompt = prompt
        self.agent = agent
        self._policy = FailurePolicy.of(on_failure)
        self._unused_seconds = unused_seconds
        self._listener = contained(listener)
        self._feed = PromptFeed(
            engine, prompt, self._advance, ttl_seconds=stream_ttl_seconds, namespace=namespace
        )
        self._over: str | None = None
        # When each slot last received text, by the event loop's clock.
        self._heard: dict[str, float] = {}

    @property
    def is_over(self) -> bool:
        return self._over is not None

    @property
    def is_late(self) -> bool:
        """Whether its request came before its stream was open."""
        return self._over == _LATE

    @property
    def stream_id(self) -> str | None:
        """The prompt stream's id, once it is open."""
        return self._feed.stream_id

    def waits_for(self, name: str) -> bool:
        """Return whether a slot of that name is still open."""
        return any(slot.name == name and slot.is_open for slot in self.prompt.slots)

    def feed(self, name: str, text: str) -> None:
        """Add text to the open slot ``name``, if there is one."""
        for slot in self._open_slots(name):
            slot.append(text)
        self._heard[name] = anyio.current_time()
        self._feed.changed()

    def close_slot(self, name: str) -> None:
        """Close the slot ``name``: its text is complete."""
        for slot in self._open_slots(name):
            slot.close()
        self._feed.changed()

    def fail_slot(self, name: str, failure: Failure = "error") -> None:
        """Act by the link's policy: the agent that writes slot ``name`` failed."""
        if self.is_over or not self.waits_for(name):
            return
        action = self._policy.action(failure)
        self._listener(
            UpstreamFailed(
                agent=self.agent,
                engine=self.engine.url,
                upstream=name,
                failure=failure,
                action=action,
            )
        )
        if action == "finalize":
            self.close_slot(name)
        else:
            self.end("abort")

    def become(self, prompt: Prompt) -> bool:
        """Go on with a prompt in which more is certain; returns whether that was possible."""
        if self.is_over or self.prompt.is_complete:
            return False
        try:
            self.prompt.become(prompt)
        except ValueError:
            return False
        self._feed.changed()
        return True

    def claim(self) -> str | None:
        """Return the stream's id for the downstream request, which goes out now, if there is one.

        The link sends nothing more; the request carries the whole prompt.
        """
        if self.is_over:
            return None
        # A stream that is still being opened comes too late for its request.
        self.end("used" if self.stream_id is not None else _LATE)
        return self.stream_id

    def end(self, reason: str) -> None:
        """End the link."""
        if not self.is_over:
            self._over = reason
            self._feed.stop()

    async def run(self) -> None:
        """Open the stream, follow the frontier, and close the stream on every path."""
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._watch_stalls)
                await self._send()
                group.cancel_scope.cancel()
        except BaseException:
            self._over = self._over if self.is_over else "closed"
            raise
        finally:
            await self._release()

    async def _send(self) -> None:
        try:
            await self._feed.run()
            if self.stream_id is not None:
                await self._await_use()
        except PluginMissing as error:
            self._over = "plain engine"
            report_plain_engine(self.engine.url, error)
        except Exception as error:
            # An append that arrives after the request finds the stream used; that is no failure.
            if not self.is_over:
                self._over = f"{type(error).__name__}: {error}"
                known = (self.engine.url, type(error)) in _said
                _said.add((self.engine.url, type(error)))
                level = logging.DEBUG if known else logging.WARNING
                logger.log(level, "Link to %s ends: %s", self.agent, error)

    async def _watch_stalls(self) -> None:
        allowed = self._policy.stall_seconds
        while True:
            now = anyio.current_time()
            heard = {n: at for n, at in self._heard.items() if self.waits_for(n)}
            for name, at in heard.items():
                if now - at >= allowed:
                    self.fail_slot(name, "stall")
            waiting = [at for at in heard.values() if now - at < allowed]
            # A slot that gets its first text from now on cannot stall before this sleep ends.
            await anyio.sleep(min(waiting, default=now) + allowed - now)

    def _advance(self, state: StreamState) -> None:
        """Report an answer of the engine; the first one says that the stream is open."""
        if state.next_seq == 0:
            upstream = tuple(slot.name for slot in self.prompt.slots)
            opened = LinkOpened(
                agent=self.agent, engine=self.engine.url, upstream=upstream, stream_id=state.id
            )
            self._listener(opened)
            return
        advanced = LinkAdvanced(
            agent=self.agent,
            engine=self.engine.url,
            stream_id=state.id,
            received_tokens=state.received_tokens,
            prefilled_tokens=state.prefilled_tokens,
        )
        self._listener(advanced)

    async def _await_use(self) -> None:
        with anyio.move_on_after(self._unused_seconds):
            await self._feed.hold()
        self.end("unused")

    async def _release(self) -> None:
        reason = self._over or "closed"
        try:
            # A used stream is closed by its request.
            if reason != "used":
                await self.delete_stream()
        finally:
            stream_id, url = self.stream_id, self.engine.url
            closed = LinkClosed(agent=self.agent, engine=url, stream_id=stream_id, reason=reason)
            self._listener(closed)

    async def delete_stream(self) -> None:
        """Delete the stream and release its KV, even when cancelled; harmless to repeat."""
        try:
            await self._feed.delete()
        except Exception as error:  # Even one of a client that has been closed.
            logger.debug("The engine will expire stream %s: %s", self.stream_id, error)

    def _open_slots(self, name: str) -> list[Slot]:
        return [slot for slot in self.prompt.slots if slot.name == name and slot.is_open]


def report_plain_engine(url: str, problem: PluginMissing) -> None:
    """Log, once for each engine, that an engine without the plugin is used unlinked."""
    if url not in _plain_engines:
        _plain_engines.add(url)
        logger.warning("%s. Its agents run unlinked.", problem)
