"""Send a growing prompt to its engine: to a prompt stream (:class:`PromptFeed`), or without the
plugin in a few requests (:class:`PlainFeed`).

How streams are released: a prompt stream keeps KV in its engine until a request uses the stream, it
is deleted, or it expires. So the opener of a stream also deletes it, and does not wait long for an
engine that does not answer:

- Opening and deleting a stream are shielded from cancellation (``PromptFeed._run_shielded``), since
  a stream whose id never arrives could not be deleted. Once cancelled, both together may take
  ``RELEASE_TIMEOUT_SECONDS``. If the engine has not answered by then, it lets the stream expire.
- A :class:`~flashmoa.link.link.Link` deletes its stream when it ends, also if it is cancelled,
  unless a request has claimed the stream.
- If a request claimed a stream and then failed or was never sent, its
  :class:`~flashmoa.link.pending_request.PendingRequest` or its planner deletes the stream.
- Behind a front end a request does not name its stream, and may have gone to another engine. So
  when its call has ended, its planner or :class:`~flashmoa.workflow.Workflow` deletes the stream.
- Closing whatever runs them (``TaskHost.close``, leaving a ``Workflow``) cancels all links and
  deletions at once, so that closing takes ``RELEASE_TIMEOUT_SECONDS`` for any number of streams.
"""

from __future__ import annotations

import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import anyio

from flashmoa._limits import MAX_REMEMBERED
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

Result = TypeVar("Result")

OPEN_TIMEOUT_SECONDS = 10.0
RELEASE_TIMEOUT_SECONDS = 0.3
# A link is to have a stream on another worker within 2 s.
WORKER_TIMEOUT_SECONDS = 1.5
# The assumed length of a token, until an engine has counted tokens.
CHARACTERS_PER_TOKEN = 4
# Messages that were logged for all to see, by the engine's URL and the kind of message.
_logged: set[tuple[str, str]] = set()


def level_once(engine_url: str, kind: str, first: int = logging.WARNING) -> int:
    """Return the level of a message about an engine: ``first`` the first time, then debugging."""
    if (engine_url, kind) in _logged:
        return logging.DEBUG
    if len(_logged) >= MAX_REMEMBERED:
        _logged.clear()
    _logged.add((engine_url, kind))
    return first


class PromptSource(Protocol):
    """A prompt that only grows: a :class:`~flashmoa.link.prompt.Prompt`, or token ids.

    See ``Prompt`` for its members.
    """

    @property
    def is_complete(self) -> bool: ...

    @property
    def is_followed(self) -> bool: ...

    def take(self) -> str | Sequence[int]: ...

    def take_back(self) -> int | None: ...

    def followed(self) -> str | None: ...

    def note_followed(self, call_id: str) -> None: ...


class Feed(ABC):
    """Feeds one growing prompt to one engine.

    Run :meth:`run` in a task, then :meth:`keep` if the prompt's request does not come at once.
    Call :meth:`changed` whenever the prompt has grown.

    Args:
        on_state: called with each answer of the engine.

    Attributes:
        stream_id: the id for events, once the engine has received text.
        is_deleted: whether the engine has deleted the stream, or said that it has ended.
        figures: the engine's figures, on deletion, of a request that did not name the stream.
        is_plain: whether the engine has no prompt stream that a request could use.
        is_named: whether the prompt's request names the stream.
    """

    is_plain = False

    def __init__(self, on_state: Callable[[StreamState], None]) -> None:
        self.stream_id: str | None = None
        self.is_deleted = False
        self.figures: StreamFigures | None = None
        self._on_state = on_state
        self._changed = anyio.Event()
        self._stopping = anyio.Event()

    @property
    def is_named(self) -> bool:
        return False

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

        Raises: EngineError if a request to the engine fails. If the feed was stopped and the stream
            is gone, the request has overtaken an append, which is no failure.
        """

    async def keep(self) -> None:
        """Keep the stream alive until the feed is stopped.

        Raises: StreamGone, StreamUnknown if the engine does not have the stream any more.
        """
        await self._stopping.wait()

    @abstractmethod
    async def delete(self) -> None:
        """Delete the stream, even if cancelled. Repeating this is harmless.

        Raises: EngineError if the engine cannot be reached; the stream then expires.
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
        expected_output_tokens: the likely length of the request's answer, if it is known.

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

    async def keep(self) -> None:
        await self._keep_alive_during(self._stopping.wait)

    async def delete(self) -> None:
        if (stream_id := self.stream_id) is None:
            return

        async def delete() -> None:
            self.figures = await self._engine.delete_stream(stream_id)
            self.is_deleted = True

        await self._run_shielded(delete, timeout_seconds=5.0)

    async def _open(self, first: str | Sequence[int]) -> StreamState:
        async def open_stream() -> StreamState:
            state = await self._engine.open_stream(
                **_fields(first),
                add_special_tokens=False if isinstance(first, str) else None,
                ttl_seconds=self._ttl,
                expected_output_tokens=self._expected_output_tokens,
                namespace=self._namespace,
            )
            # From here on the stream is deleted on every path.
            self.stream_id = state.id
            return state

        state = await self._run_shielded(open_stream, OPEN_TIMEOUT_SECONDS)
        if state is None:
            raise EngineTimeout(
                f"{self._engine.url} did not open a prompt stream within {OPEN_TIMEOUT_SECONDS:g} "
                "s; see the engine's log"
            )
        # The engine limits it.
        self._ttl = min(self._ttl, state.ttl_seconds)
        self._postpone_keep_alive()
        return state

    async def _run_shielded(
        self, work: Callable[[], Awaitable[Result]], timeout_seconds: float
    ) -> Result | None:
        """Run ``work``, if cancelled until the release deadline, and return its result.

        ``None`` if it takes longer. Raises: the exception of ``work``.
        """
        deadline = min(anyio.current_time() + timeout_seconds, self._release_deadline)
        shield = anyio.CancelScope(deadline=deadline, shield=True)
        results: list[Result] = []
        failures: list[Exception] = []

        async def run() -> None:
            try:
                with shield:
                    results.append(await work())
            except Exception as error:
                failures.append(error)
            is_done.set()

        is_done = anyio.Event()
        async with anyio.create_task_group() as group:
            group.start_soon(run)
            try:
                await is_done.wait()
            except anyio.get_cancelled_exc_class():
                release_deadline = anyio.current_time() + RELEASE_TIMEOUT_SECONDS
                self._release_deadline = min(self._release_deadline, release_deadline)
                shield.deadline = min(deadline, self._release_deadline)
                raise
        if failures:
            raise failures[0]
        return results[0] if results else None

    async def _append_all(self, state: StreamState) -> None:
        seq = 0
        # A request that cannot name the stream finds it by its prompt, which must be complete.
        while not self._stopped or not (self.is_named or state.ended):
            if self._stopped and not self._prompt.is_complete:
                return  # The link deletes the stream, so its request cannot find it.
            if seq and self._prompt.is_complete and self.is_named:
                # The request usually follows at once, and brings the rest of the prompt along. An
                # append just before it would only delay it.
                with anyio.move_on_after(0.01):
                    await self._stopping.wait()
                    return
            if self._prompt.is_followed:
                await self._keep_alive_during(self._wait_for_change)
                continue
            start, followed = self._prompt.take_back(), self._prompt.followed()
            new, end = self._prompt.take(), self._prompt.is_complete
            if new or end or start is not None:
                state = await self._append(state, seq, new, start, end=end)
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
        new: str | Sequence[int],
        start: int | None,
        *,
        end: bool,
    ) -> StreamState:
        """Append to the stream; behind a front end, do not wait long for a worker that hangs.

        Raises: EngineTimeout if it hangs; EngineUnreachable if it has left its front end.
        """
        seconds = None if self.is_named else WORKER_TIMEOUT_SECONDS
        with anyio.move_on_after(seconds):
            if not await self._engine.takes_requests(state.id):
                text = f"the worker of prompt stream {state.id} takes no requests"
                raise EngineUnreachable(text)
            # An empty text may replace an earlier text.
            fields: dict[str, Any] = {"text": new} if start is not None else _fields(new)
            return await self._engine.append(state.id, seq, **fields, start=start, end=end)
        raise EngineTimeout(
            f"the worker of prompt stream {state.id} has not taken text within {seconds} s"
        )

    async def _wait_until_complete(self) -> None:
        while not self._stopped and not self._prompt.is_complete:
            await self._wait_for_change()

    @property
    def _keep_alive_seconds(self) -> float:
        return self._ttl / 3

    def _postpone_keep_alive(self) -> None:
        """Note that the engine has just received something."""
        self._keep_alive_at = anyio.current_time() + self._keep_alive_seconds

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

        Raises: StreamGone, StreamUnknown if the engine does not have the stream any more.
        """
        assert self.stream_id is not None
        try:
            with anyio.move_on_after(self._keep_alive_seconds):
                await self._engine.keep_alive(self.stream_id)
        except (StreamGone, StreamUnknown):
            if not self._stopped:
                raise
        except EngineError as error:
            logger.debug("Stream %s could not be kept alive: %s", self.stream_id, error)
        self._postpone_keep_alive()


def _fields(new: str | Sequence[int]) -> dict[str, Any]:
    return {"text" if isinstance(new, str) else "input_ids": new or None}


class PlainFeed(Feed):
    """Prefills one growing prompt by further requests, when :class:`StepCosts` says it pays.

    It sends one request at a time, and closes the connection as soon as the feed is stopped, so
    that the prompt's own request is not delayed. The prefilled KV is in the server's cache like any
    prompt's: the server may evict it, and there is nothing to release.

    Args:
        engine: the engine that will use the prompt.
        prompt: the prompt, as ``engine.render`` returns it.
        on_state: called before the first step and after each step, with an id that is made up.
        namespace: the namespace of the request's KV; by default the engine client's.
        expect: returns the likely length in tokens of a writer's text, if it is known.
    """

    is_plain = True

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
        # Number of steps, and size of the prompt that the last step sent.
        self._steps, self._sent_characters, self._sent_tokens = 0, 0, 0

    def stop(self) -> None:
        super().stop()
        self._scope.cancel()  # Give up the current step.

    async def run(self) -> None:
        with self._scope:
            while not self._prompt.is_complete:
                if self._step_pays():
                    await self._send()
                else:
                    await self._wait_for_change()
            # The request usually follows at once, and a step before it would only delay it.
            await anyio.sleep(0.05)
            if self._step_pays():
                await self._send()

    async def delete(self) -> None: ...

    def _step_pays(self) -> bool:
        if (right := self._prompt.take_back()) is not None and self._sent_characters:
            self._sent_tokens = self._sent_tokens * right // self._sent_characters
            self._sent_characters = right
        per_token = float(CHARACTERS_PER_TOKEN)
        if self._sent_tokens:
            per_token = self._sent_characters / self._sent_tokens
        new = len(self._prompt.stable(self._sent_characters)) / per_token
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
        self._sent_tokens = usage.prompt_tokens or round(len(text) / CHARACTERS_PER_TOKEN)
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
