"""Prefill a downstream prompt while upstream agents write texts in it (:class:`Link`).

A link sends the prompt's text before the stable frontier to the downstream engine, which prefills
it (FlashAgents §3.1). A link never raises an exception in the agents that it serves: a failure ends
the link and is reported as an event, and the downstream request is computed as without a link.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, TypedDict

import anyio

from flashmoa._concurrency import TaskHost
from flashmoa.engine import EngineClient, StreamState
from flashmoa.engine.front_end import is_behind
from flashmoa.errors import (
    EngineDraining,
    EngineTimeout,
    EngineUnreachable,
    PluginMissing,
    StreamGone,
    StreamUnknown,
)
from flashmoa.link.failure_policy import Failure, FailurePolicy, OnFailure
from flashmoa.link.prompt import Prompt, Slot
from flashmoa.link.prompt_feed import (
    Feed,
    PlainFeed,
    PromptFeed,
    level_once,
    report_plain_engine,
)
from flashmoa.link.reasons import describe_end
from flashmoa.observe import (
    LinkAdvanced,
    LinkClosed,
    LinkDeclined,
    LinkOpened,
    Listener,
    StreamFound,
    UpstreamFailed,
)
from flashmoa.observe.events import contained, ignore

logger = logging.getLogger(__name__)

# How much of a prompt is sent before its request: nothing, the known text, or also the texts of its
# upstream agents as they write them.
Ahead = Literal["nothing", "known", "text"]

# How long to wait for the downstream request once the prompt is complete; then the KV is released.
UNUSED_SECONDS = 30.0
_LATE, _PLAIN, _UNFINISHED = "too late", "plain engine", "unfinished"
_WORKER_FAILURES = (EngineUnreachable, EngineTimeout, EngineDraining, StreamGone, StreamUnknown)


def kind_of(problem: BaseException) -> str:
    """Return a name for the kind of a problem, whatever its wording."""
    return f"{type(problem).__name__} {getattr(problem, 'code', '')}"


def log_unlinked(problem: Exception) -> None:
    """Log an error of FlashMoA itself that costs links only; each kind is shown once."""
    level = level_once("", kind_of(problem), logging.ERROR)
    logger.log(level, "A call runs unlinked because of the error below", exc_info=problem)


def report_no_link(agent: str, engine_url: str, problem: Exception, listener: Listener) -> None:
    """Log and report that an agent has no link this time, since its engine has a problem."""
    level = level_once(engine_url, kind_of(problem))
    logger.log(level, "No link to %s this time: %s", agent, problem)
    listener(LinkDeclined(agent=agent, engine=engine_url, reason=f"{problem}"))


class _LinkNames(TypedDict):
    agent: str
    engine: str


class Link:
    """Sends one downstream prompt to a prompt stream while upstream agents write texts in it.

    On an engine without the plugin it prefills the prompt in a few steps instead, unless the engine
    client says otherwise.

    Args:
        engine: the downstream agent's engine.
        prompt: the agent's future prompt; feed it through :meth:`feed` and :meth:`close_slot`.
        agent: the downstream agent's name, for events.
        on_failure: the action when an upstream agent fails.
        namespace: the namespace of the downstream request's KV; by default the engine client's.
        expected_output_tokens: the likely length of the agent's answer, if it is known.
        expect: returns the likely length in tokens of an upstream agent's text, if it is known.
        follows: whether the engine adds the text of its own calls by itself.
        listener: receives the link's events.

    Attributes:
        has_expired: whether the link has ended because no request came in time.

    Run :meth:`run` in a task group; cancelling it deletes the stream.
    """

    def __init__(  # noqa: PLR0913 - all but the first three have a default
        self,
        engine: EngineClient,
        prompt: Prompt,
        *,
        agent: str,
        on_failure: OnFailure = "abort",
        namespace: Mapping[str, str] | None = None,
        expected_output_tokens: int | None = None,
        expect: Callable[[str], int | None] = lambda _: None,
        follows: bool = False,
        listener: Listener = ignore,
    ) -> None:
        self.engine = engine
        self.prompt = prompt
        self.agent = agent
        self._names = _LinkNames(agent=agent, engine=engine.url)
        self._policy = FailurePolicy.of(on_failure)
        self._listener = contained(listener)
        self._namespace = namespace
        self._expect = expect
        self._follows = follows
        self._make_feed = partial(
            PromptFeed,
            engine,
            prompt,
            self._report_state,
            namespace=namespace,
            expected_output_tokens=expected_output_tokens,
        )
        self._feed: Feed = self._make_feed()
        self._end_reason: str | None = None
        # Set when the stream is open, or there will be none.
        self._begun = anyio.Event()
        self.has_expired = False
        # Whether a request that did not name the stream was reported.
        self._is_found = False
        # When each slot last received text, by the event loop's clock.
        self._last_text_at: dict[str, float] = {}

    @property
    def is_over(self) -> bool:
        return self._end_reason is not None

    @property
    def stream_id(self) -> str | None:
        """The prompt stream's id, once it is open; without the plugin, an id for events only."""
        return self._feed.stream_id

    @property
    def used_id(self) -> str | None:
        """The stream's id in the request's events, if there was a stream when the request came."""
        return self.stream_id if self._end_reason in ("used", _UNFINISHED) else None

    @property
    def unused_reason(self) -> str:
        """Why the request uses no stream, in words; empty if it uses one, or has not come."""
        if self._end_reason is None or self.used_id is not None:
            return ""
        return describe_end(self._end_reason)

    @property
    def is_unnamed(self) -> bool:
        """Whether a request was sent that finds the stream by its prompt instead of its id.

        Delete the stream when the call has ended: the engine then reports how the request used it,
        or frees it if the request has gone to another engine.
        """
        return self._end_reason == "used" and not self._feed.is_named and not self._is_found

    def waits_for(self, name: str) -> bool:
        """Return whether a slot of that name is still open."""
        return bool(self._open_slots(name))

    def feed(self, name: str, text: str) -> None:
        """Add text to the open slot ``name``, if there is one."""
        for slot in self._open_slots(name):
            slot.append(text)
        self._last_text_at[name] = anyio.current_time()
        self._feed.changed()

    def follow(self, name: str, engine_url: str, call_id: str) -> None:
        """Let the engine add the text of slot ``name`` by itself, if it is the writer's engine."""
        if self._follows and engine_url == self.engine.url and not self.is_over:
            for slot in self._open_slots(name):
                self.prompt.follow(slot, call_id)
            self._feed.changed()

    def replace(self, name: str, text: str) -> None:
        """Replace the text of the open slot ``name``."""
        for slot in self._open_slots(name):
            self.prompt.replace(slot, text)
        self._feed.changed()

    def close_slot(self, name: str) -> None:
        """Close the slot ``name``: its text is complete."""
        for slot in self._open_slots(name):
            slot.close()
        self._feed.changed()

    def fail_slot(self, name: str, failure: Failure = "error") -> None:
        """Act by the link's policy after the agent that writes slot ``name`` failed."""
        if self.is_over or not self.waits_for(name):
            return
        action = self._policy.action(failure)
        self._listener(UpstreamFailed(**self._names, upstream=name, failure=failure, action=action))
        if action == "finalize":
            self.close_slot(name)
        else:
            self.end("abort")

    def become(self, prompt: Prompt) -> bool:
        """Replace the prompt by a prompt with more certain text.

        Return whether that was possible: not if the link has ended, the prompt is complete, or the
        new prompt does not begin with the sent text.
        """
        if self.is_over or self.prompt.is_complete:
            return False
        try:
            self.prompt.become(prompt)
        except ValueError:
            return False
        self._feed.changed()
        return True

    def claim(self) -> str | None:
        """Return the id of the stream, if it is open, for the downstream request.

        Call this just before the request is sent. The link then sends nothing more: the request
        carries the whole prompt.
        """
        if self.is_over:
            return None
        if self.stream_id is None:
            # A stream that is still being opened is too late for the request.
            self.end(_PLAIN if self._feed.is_plain else _LATE)
        elif is_behind(self.stream_id) and not self.prompt.is_complete:
            # The request could only find a stream with its whole prompt.
            self.end(_UNFINISHED)
        else:
            self.end("used")
        return self.stream_id if self._feed.is_named else None

    def end(self, reason: str) -> None:
        """End the link, with this reason in its ``LinkClosed`` event."""
        if not self.is_over:
            self._end_reason = reason
            self._feed.stop()

    async def start(self, host: TaskHost) -> None:
        """Run the link in a task of ``host``; wait a moment for its stream to be open.

        Engines prefill streams in opening order, and requests that are sent together arrive in any
        order.
        """
        host.start(self.run)
        if not self.prompt.stable():
            return  # It is opened once its first text is written.
        with anyio.move_on_after(0.1):
            await self._begun.wait()

    async def run(self) -> None:
        """Open the stream, append to it, and delete it in the end unless a request uses it."""
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._watch_stalls)
                await self._feed_engine()
                group.cancel_scope.cancel()
        except BaseException:
            self._end_reason = self._end_reason or "closed"
            raise
        finally:
            self._begun.set()
            await self._release()

    async def _feed_engine(self) -> None:
        """Send the prompt, and wait for its request. On any failure the link ends."""
        try:
            try:
                await self._feed_workers()
            except PluginMissing as problem:
                report_plain_engine(self.engine, problem)
                if self.engine.settings.without_plugin == "off" or self.is_over:
                    raise
                self._begun.set()
                self._follows = False
                self.prompt.restart()
                self._feed = PlainFeed(
                    self.engine,
                    self.prompt,
                    self._report_state,
                    namespace=self._namespace,
                    expect=self._expect,
                )
                await self._feed.run()
                await self._wait_for_request()
        except PluginMissing:
            self._end_reason = _PLAIN
        except Exception as error:
            # If the link has ended, its request overtook an append. That is not a failure.
            if not self.is_over:
                self._end_reason = f"{type(error).__name__}: {error}"
                level = level_once(self.engine.url, kind_of(error))
                text = "The link to %s has ended: %s. Its request is sent all the same."
                logger.log(level, text, self.agent, str(error).removesuffix("."))

    async def _feed_workers(self) -> None:
        """Feed a prompt stream until its request comes.

        Behind a front end it is opened elsewhere if its worker dies, hangs or drains.
        """
        for tries_left in reversed(range(8)):
            try:
                await self._feed.run()
                if self.stream_id is not None:
                    await self._wait_for_request()
                return
            except _WORKER_FAILURES as problem:
                if self.is_over or not tries_left or not self.engine.is_front_end:
                    raise
                text = "The prompt stream of %s is opened on another worker: %s"
                logger.debug(text, self.agent, problem)
            async with anyio.create_task_group() as group:
                # A worker that hangs may continue later.
                group.start_soon(self.delete_stream)
                # A front end needs a moment to notice that a worker has died.
                await anyio.sleep(0.25)
                group.cancel_scope.cancel()
            if self.is_over:
                return
            self.prompt.restart()
            self._feed = self._make_feed()

    async def _watch_stalls(self) -> None:
        stall_seconds = self._policy.stall_seconds
        while True:
            now = anyio.current_time()
            # If the engine adds a text by itself, the link may receive less of the text.
            begun = {name: at for name, at in self._last_text_at.items() if self._may_stall(name)}
            for name, at in begun.items():
                if now - at >= stall_seconds:
                    self.fail_slot(name, "stall")
            pausing = [at for at in begun.values() if now - at < stall_seconds]
            # A slot that gets its first text from now on cannot stall before this sleep ends.
            await anyio.sleep(min(pausing, default=now) + stall_seconds - now)

    def _report_state(self, state: StreamState) -> None:
        """Report an answer of the engine as an event; the first answer opened the stream."""
        self._begun.set()
        if state.next_seq == 0:
            event = LinkOpened(
                **self._names,
                upstream=tuple(slot.name for slot in self.prompt.slots),
                stream_id=state.id,
                plain=self._feed.is_plain,
            )
        else:
            event = LinkAdvanced(
                **self._names,
                stream_id=state.id,
                received_tokens=state.received_tokens,
                prefilled_tokens=state.prefilled_tokens,
            )
        self._listener(event)

    async def _wait_for_request(self) -> None:
        with anyio.move_on_after(UNUSED_SECONDS):
            await self._feed.keep()
        self.has_expired = not self.is_over
        self.end("unused")

    async def _release(self) -> None:
        reason = self._end_reason or "closed"
        try:
            # The engine itself ends a stream that a request uses.
            if reason != "used":
                await self.delete_stream()
        finally:
            self._listener(LinkClosed(**self._names, stream_id=self.stream_id, reason=reason))

    async def delete_stream(self) -> None:
        """Delete the stream and release its KV, even if cancelled (see ``prompt_feed``).

        Repeating this is harmless. Failures are only logged, since the stream expires anyway.
        """
        try:
            await self._feed.delete()
        except Exception as error:  # Not only EngineError: the HTTP client may be closed already.
            text = "Stream %s could not be deleted, so the engine lets it expire: %s"
            logger.debug(text, self.stream_id, error)
        finally:
            if self.is_unnamed and self._feed.is_deleted and self.stream_id is not None:
                self._is_found = True
                figures = self._feed.figures
                self._listener(
                    StreamFound(**self._names, stream_id=self.stream_id, figures=figures)
                )

    def _may_stall(self, name: str) -> bool:
        return any(slot.call is None for slot in self._open_slots(name))

    def _open_slots(self, name: str) -> list[Slot]:
        return [slot for slot in self.prompt.slots if slot.name == name and slot.is_open]
