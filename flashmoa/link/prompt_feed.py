"""Send a growing prompt to its engine: to a prompt stream (:class:`PromptFeed`), or without the
plugin in a few requests (:class:`PlainFeed`).

How streams are released: a prompt stream holds KV in its engine until a request uses it, it is
deleted, or it expires. So the opener of a stream also deletes it, and does not wait long for an
engine that does not answer:

- Opening and deleting a stream are shielded from cancellation (``PromptFeed._run_shielded``), since
  a stream whose id never arrives could not be deleted. Once cancelled, both together may take
  ``_RELEASE_SECONDS``. If the engine has not answered by then, it lets the stream expire.
- A :class:`~flashmoa.link.link.Link` deletes its stream when it ends, also if it is cancelled,
  unless a request has claimed the stream.
- A request that claimed a stream and then failed or was never sent has the stream deleted: by
  :class:`~flashmoa.link.pending_request.PendingRequest`, or by the link's planner.
- Behind a front end a request does not name its stream, and may have gone to another engine. So
  when its call has ended, its planner or :class:`~flashmoa.workflow.Workflow` deletes the stream.
- Closing whatever runs them (``TaskHost.close``, leaving a ``Workflow``) cancels all links and
  deletions at once, so that closing takes ``_RELEASE_SECONDS`` however many streams there are.
"""

from __future__ import annotations

import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import anyio

from flashmoa.engine.client import EngineClient
from flashmoa.engine.front_end import is_behind
from flashmoa.engine.plain import tokens_to_come
from flashmoa.engine.wire import PromptUsage, StreamFigures, StreamState
from flashmoa.errors import (
    EngineError,
    EngineTimeout,
    EngineUnreachable,
    PluginMissing,
    StreamGone,
    StreamUnknown,
)
from flashmoa.link.prompt import Prompt

logger = logging.getLogger(__name__)

# The request usually follows as soon as the prompt is complete, and brings the rest of the prompt
# along. An append or a step just before it would only delay the request.
_GRACE_SECONDS = 0.01
_GRACE_SECONDS_OF_STEPS = 0.05
_OPEN_SECONDS = 10.0
# A worker behind a front end that has not taken a piece of text by then is taken to hang: its link
# is to have a stream on another one within 2 s.
_WORKER_SECONDS = 1.5
_DELETE_SECONDS = 5.0
_RELEASE_SECONDS = 0.3
# The engine receives something at least once in this part of a stream's time to live.
_KEEP_ALIVE_PART = 1 / 3
# Until a step has counted a prompt's tokens.
_CHARACTERS_PER_TOKEN = 4.0
# What has been logged for all to see, by the engine's URL and its kind; each only once.
# Kinds are few, but nothing limits the URLs of a long-lived process.
_logged: set[tuple[str, str]] = set()
_MOST_LOGGED = 1000


def level_once(engine_url: str, kind: str, first: int = logging.WARNING) -> int:
    """Return the level at which to log something of an engine: ``first``, later for debugging."""
    if (engine_url, kind) in _logged:
        return logging.DEBUG
    if len(_logged) >= _MOST_LOGGED:
        _logged.clear()
    _logged.add((engine_url, kind))
    return first


class PromptSource(Protocol):
    """A prompt that only grows: :class:`flashmoa.link.prompt.Prompt`, or one of token ids."""

    @property
    def is_complete(self) -> bool:
        """Return whether the prompt will not grow any more."""
        ...

    def take(self) -> str | Sequence[int]:
        """Return what was added since the last call; may be empty."""
        ...

    def take_back(self) -> int | None:
        """Return after how many characters what was taken may have been replaced.

        :meth:`take` then goes on from there. ``None`` if all of it is still right.
        """
        ...

    def followed(self) -> str | None:
        """Return the id of the call whose text the engine is to add now; ``None`` if it is none."""
        ...

    def note_followed(self, call_id: str) -> None:
        """Note that the engine adds a call's text from now on, right after what was taken."""
        ...

    @property
    def is_followed(self) -> bool:
        """Return whether the engine is adding by itself all the text that is to come next."""
        ...


class Feed(ABC):
    """Feeds one growing prompt to one engine.

    Run :meth:`run` in a task, and then :meth:`hold` if the prompt's request does not come at once.
    Call :meth:`changed` whenever the prompt has grown.

    Args:
        on_state: called with each answer of the engine.

    Attributes:
        stream_id: the id that events name, once the engine has something of the prompt.
        is_deleted: whether the engine has deleted the stream, or said that it has ended.
        figures: what the engine has then said of a request that did not name the stream.
    """

    def __init__(self, on_state: Callable[[StreamState], None]) -> None:
        self.stream_id: str | None = None
        self.is_deleted = False
        self.figures: StreamFigures | None = None
        self._on_state = on_state
        self._changed = anyio.Event()
        self._stopping = anyio.Event()

    @property
    def is_plain(self) -> bool:
        """Whether the engine has no prompt stream that a request could use."""
        return False

    @property
    def is_named(self) -> bool:
        """Whether the prompt's request names the stream."""
        return not self.is_plain

    @property
    def _stopped(self) -> bool:
        return self._stopping.is_set()

    def changed(self) -> None:
        """Note that the prompt has grown, or is complete."""
        self._changed.set()

    def stop(self) -> None:
        """Send nothing more: the request is about to be sent, or the stream is not needed."""
        self._stopping.set()
        self._changed.set()

    @abstractmethod
    async def run(self) -> None:
        """Send the prompt as it grows, until it is complete or the feed is stopped.

        Raises:
            EngineError: if a request to the engine fails; not if the feed was stopped and the
                stream is gone, since then its request has overtaken an append.
        """

    async def hold(self) -> None:
        """Keep what was sent until the feed is stopped.

        Raises:
            StreamGone, StreamUnknown: if the engine does not have the stream any more.
        """
        await self._stopping.wait()

    @abstractmethod
    async def delete(self) -> None:
        """Release what was sent, even if cancelled. Repeating this is harmless.

        Raises:
            EngineError: if the engine cannot be reached; the stream then expires.
        """

    async def _wait_for_change(self) -> None:
        await self._changed.wait()
        self._changed = anyio.Event()


class PromptFeed(Feed):
    """Feeds one growing prompt to one prompt stream.

    Args:
        engine: the engine that will use the prompt.
        prompt: text as a chat template renders it, special tokens included, or token ids.
        on_state: see :class:`Feed`; the first answer opens the stream.
        namespace: the namespace of the stream's KV; by default the client's.
        expected_output_tokens: how long the request's answer is likely to be, if that is known.

    Unless a request that uses the stream was sent, :meth:`delete` must be called after :meth:`run`.
    """

    def __init__(
        self,
        engine: EngineClient,
        prompt: PromptSource,
        on_state: Callable[[StreamState], None] = lambda _: None,
        *,
        namespace: Mapping[str, str] | None = None,
        expected_output_tokens: int | None = None,
    ) -> None:
        super().__init__(on_state)
        self._namespace = namespace
        self._expected_output_tokens = expected_output_tokens
        self._engine = engine
        self._ttl = engine.settings.stream_ttl_seconds
        # Both by the event loop's clock: when the engine must receive something again, and until
        # when a cancelled caller waits for the engine.
        self._keep_alive_at = float("inf")
        self._release_deadline = float("inf")
        self._prompt = prompt

    @property
    def is_named(self) -> bool:
        return self.stream_id is None or not is_behind(self.stream_id)

    async def run(self) -> None:
        first = self._prompt.take()
        while not first and not self._stopped and not self._prompt.is_complete:
            # The prompt begins with a text that is not written yet.
            await self._wait_for_change()
            first = self._prompt.take()
        if self._stopped or not first:
            return
        state = await self._open(first)
        self._on_state(state)
        try:
            await self._append_all(state)
        except StreamGone:
            if not self._stopped:
                raise

    async def hold(self) -> None:
        await self._keep_alive_during(self._stopping.wait)

    async def delete(self) -> None:
        if (stream_id := self.stream_id) is None:
            return

        async def delete() -> None:
            self.figures = await self._engine.delete_stream(stream_id)
            self.is_deleted = True

        await self._run_shielded(delete, _DELETE_SECONDS)

    async def _open(self, first: str | Sequence[int]) -> StreamState:
        states: list[StreamState] = []

        async def open_stream() -> None:
            state = await self._engine.open_stream(
                **_fields(first),
                add_special_tokens=False if isinstance(first, str) else None,
                ttl_seconds=self._ttl,
                expected_output_tokens=self._expected_output_tokens,
                namespace=self._namespace,
            )
            # From here on the stream is deleted on every path.
            self.stream_id = state.id
            states.append(state)

        await self._run_shielded(open_stream, _OPEN_SECONDS)
        if not states:
            raise EngineTimeout(
                f"{self._engine.url} did not open a prompt stream within {_OPEN_SECONDS:g} s; see "
                "the engine's log"
            )
        # The engine limits it.
        self._ttl = min(self._ttl, states[0].ttl_seconds)
        self._postpone_keep_alive()
        return states[0]

    async def _run_shielded(self, work: Callable[[], Awaitable[None]], seconds: float) -> None:
        """Run ``work`` for at most ``seconds``, and if cancelled, until the release deadline.

        Raises: the exception of ``work``.
        """
        deadline = min(anyio.current_time() + seconds, self._release_deadline)
        shield = anyio.CancelScope(deadline=deadline, shield=True)
        failures: list[Exception] = []

        async def run() -> None:
            try:
                with shield:
                    await work()
            except Exception as error:
                failures.append(error)
            is_done.set()

        is_done = anyio.Event()
        async with anyio.create_task_group() as group:
            group.start_soon(run)
            try:
                await is_done.wait()
            except anyio.get_cancelled_exc_class():
                release_deadline = anyio.current_time() + _RELEASE_SECONDS
                self._release_deadline = min(self._release_deadline, release_deadline)
                shield.deadline = min(deadline, self._release_deadline)
                raise
        if failures:
            raise failures[0]

    async def _append_all(self, state: StreamState) -> None:
        seq = 0
        # A request that cannot name the stream finds it by its prompt, which must be all there.
        while not self._stopped or not (self.is_named or state.ended):
            if self._stopped and not self._prompt.is_complete:
                return  # The link deletes the stream, so its request cannot find it.
            if seq and self._prompt.is_complete and self.is_named:
                with anyio.move_on_after(_GRACE_SECONDS):
                    await self._stopping.wait()
                    return
            if self._prompt.is_followed:
                await self._keep_alive_during(self._wait_for_change)
                continue
            start, followed = self._prompt.take_back(), self._prompt.followed()
            piece, end = self._prompt.take(), self._prompt.is_complete
            if piece or end or start is not None:
                state = await self._append(state, seq, piece, start, end=end)
                seq += 1
                self._postpone_keep_alive()
                self._on_state(state)
                if end:
                    return
                with anyio.move_on_after(0 if followed else state.pace_seconds):
                    await self._wait_until_complete()
            elif followed is not None:
                state = await self._engine.follow_call(state.id, seq, followed)
                seq += 1
                self._prompt.note_followed(followed)
                self._postpone_keep_alive()
            else:
                await self._keep_alive_during(self._wait_for_change)

    async def _append(
        self,
        state: StreamState,
        seq: int,
        piece: str | Sequence[int],
        start: int | None,
        *,
        end: bool,
    ) -> StreamState:
        """Append a piece; behind a front end, do not wait long for a worker that hangs.

        Raises: EngineTimeout if it does; EngineUnreachable if it has left its front end.
        """
        seconds = None if self.is_named else _WORKER_SECONDS
        with anyio.move_on_after(seconds):
            if not await self._engine.takes_requests(state.id):
                text = f"the worker of prompt stream {state.id} takes no requests"
                raise EngineUnreachable(text)
            # Text may be replaced by none.
            fields: dict[str, Any] = {"text": piece} if start is not None else _fields(piece)
            return await self._engine.append(state.id, seq, **fields, start=start, end=end)
        raise EngineTimeout(
            f"the worker of prompt stream {state.id} has not taken text within {seconds} s"
        )

    async def _wait_until_complete(self) -> None:
        while not self._stopped and not self._prompt.is_complete:
            await self._wait_for_change()

    def _postpone_keep_alive(self) -> None:
        """Note that the engine has just received something."""
        self._keep_alive_at = anyio.current_time() + self._ttl * _KEEP_ALIVE_PART

    async def _keep_alive_during(self, wait: Callable[[], Awaitable[object]]) -> None:
        """Run ``wait()``, and keep the stream alive until it returns."""
        while True:
            with anyio.CancelScope(deadline=self._keep_alive_at):
                await wait()
                return
            await self._keep_alive()

    async def _keep_alive(self) -> None:
        """Tell the engine to keep the stream.

        If the engine cannot be reached, it may be reachable again before the stream expires.

        Raises:
            StreamGone, StreamUnknown: if the engine does not have the stream any more.
        """
        assert self.stream_id is not None
        try:
            with anyio.move_on_after(self._ttl * _KEEP_ALIVE_PART):
                await self._engine.keep_alive(self.stream_id)
        except (StreamGone, StreamUnknown):
            if not self._stopped:
                raise
        except PluginMissing:
            self._ttl = float("inf")  # This version of the plugin cannot keep streams alive.
        except EngineError as error:
            logger.debug("Stream %s could not be kept alive: %s", self.stream_id, error)
        self._postpone_keep_alive()


def _fields(piece: str | Sequence[int]) -> dict[str, Any]:
    return {"text" if isinstance(piece, str) else "input_ids": piece or None}


class PlainFeed(Feed):
    """Prefills one growing prompt by requests of its own, when :class:`StepCosts` says it pays.

    There is at most one request at a time, and its connection is closed as soon as the feed is
    stopped, so that it does not delay the prompt's own request. What it prefills is in the server's
    cache like any prompt: the server may evict it, and there is nothing to release.

    Args:
        engine: the engine that will use the prompt.
        prompt: the prompt, as ``engine.render`` returns it.
        on_state: called before the first step and after each one with what is prefilled; the id is
            made up.
        namespace: the namespace of the request's KV; by default the engine client's.
        expect: returns how many tokens the writer of a slot is expected to write, if that is known.
    """

    def __init__(
        self,
        engine: EngineClient,
        prompt: Prompt,
        on_state: Callable[[StreamState], None],
        *,
        namespace: Mapping[str, str] | None,
        expect: Callable[[str], int | None],
    ) -> None:
        super().__init__(on_state)
        self._url = engine.url
        self._namespace = engine.namespace if namespace is None else namespace
        self._server = engine.plain
        self._prompt = prompt
        self._expect = expect
        self._scope = anyio.CancelScope()
        # What the last step has sent: its number, and how much of the prompt.
        self._steps, self._sent_characters, self._sent_tokens = 0, 0, 0

    @property
    def is_plain(self) -> bool:
        return True

    def stop(self) -> None:
        super().stop()
        self._scope.cancel()  # Give up the step that is under way.

    async def run(self) -> None:
        with self._scope:
            while not self._prompt.is_complete:
                if self._step_pays():
                    await self._send()
                else:
                    await self._wait_for_change()
            await anyio.sleep(_GRACE_SECONDS_OF_STEPS)
            if self._step_pays():
                await self._send()

    async def delete(self) -> None:
        """Do nothing: the server keeps no stream."""

    def _step_pays(self) -> bool:
        if (right := self._prompt.take_back()) is not None and self._sent_characters:
            self._sent_tokens = self._sent_tokens * right // self._sent_characters
            self._sent_characters = right
        per_token = _CHARACTERS_PER_TOKEN
        if self._sent_tokens:
            per_token = self._sent_characters / self._sent_tokens
        new = (len(self._prompt.stable()) - self._sent_characters) / per_token
        being_written = [slot for slot in self._prompt.slots if slot.is_open]
        written = {slot.name: len(slot.stable()) / per_token for slot in being_written}
        to_come = 0.0
        # Before anyone writes, waiting gains nothing.
        if any(written.values()):
            to_come = sum(
                tokens_to_come(done, self._expect(name)) for name, done in written.items()
            )
        return self._server.costs.pays(new, to_come)

    async def _send(self) -> None:
        """Prefill the prompt up to its stable frontier."""
        self._prompt.take()
        text = self._prompt.stable()
        if self.stream_id is None:
            self.stream_id = f"plain-{secrets.token_hex(8)}"
            self._report()
        usage, seconds = await self._server.prefill(text, self._namespace)
        self._measure(usage, seconds)
        self._sent_tokens = usage.prompt_tokens or round(len(text) / _CHARACTERS_PER_TOKEN)
        self._sent_characters = len(text)
        self._steps += 1
        self._report()

    def _measure(self, usage: PromptUsage, seconds: float | None) -> None:
        cached, before = usage.cached_tokens, self._sent_tokens
        if not self._server.costs.add(usage.prompt_tokens, cached, seconds, before):
            text = (
                "%s has not kept the prompt that was prefilled there: of %d tokens it found %d in "
                "its prefix cache. Nothing is prefilled there for a minute. Is its prefix cache "
                'on? If not, EngineSettings(without_plugin="off") saves these requests.'
            )
            logger.log(level_once(self._url, "forgets"), text, self._url, before, cached)

    def _report(self) -> None:
        assert self.stream_id is not None
        self._on_state(
            StreamState(
                id=self.stream_id,
                received_tokens=self._sent_tokens,
                prefilled_tokens=self._sent_tokens,
                computed_tokens=self._sent_tokens,
                increments=self._steps,
                next_seq=self._steps,
                ended=False,
                ttl_seconds=float("inf"),
            )
        )


def report_plain_engine(engine: EngineClient, problem: PluginMissing) -> None:
    """Log once for each engine that it runs without the plugin, and what links do there."""
    level, text = level_once(engine.url, "plain"), f"{problem}".removesuffix(".")
    if engine.settings.without_plugin == "off":
        logger.log(level, "%s. Its agents run unlinked.", text)
        return
    logger.log(
        level,
        "%s. Links prefill prompts there by a few short requests, for its own prefix cache. The "
        "plugin adds that text is prefilled as it is written, beside other requests instead of "
        "before them, and is kept until it is used.",
        text,
    )
