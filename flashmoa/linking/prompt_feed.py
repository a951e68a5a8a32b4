"""Send a growing prompt to its prompt stream, at the pace that the engine asks for.

How streams are released: a prompt stream holds KV in its engine until a request uses it, it is
deleted, or it expires. So the opener of a stream also deletes it, and does not wait long for an
engine that does not answer:

- Opening and deleting a stream are shielded from cancellation (``PromptFeed._run_shielded``), since
  a stream whose id never arrives could not be deleted. Once cancelled, both together may take
  ``_RELEASE_SECONDS``. If the engine has not answered by then, it lets the stream expire.
- A :class:`~flashmoa.linking.link.Link` deletes its stream when it ends, also if it is cancelled,
  unless a request has claimed the stream.
- A request that claimed a stream and then failed or was never sent has the stream deleted: by
  :class:`~flashmoa.linking.pending_request.PendingRequest`, or by the link's planner.
- Closing whatever runs them (``TaskHost.close``, leaving a ``Workflow``) cancels all links and
  deletions at once, so that closing takes ``_RELEASE_SECONDS`` however many streams there are.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

import anyio

from flashmoa.engine.client import EngineClient
from flashmoa.engine.wire import StreamState
from flashmoa.errors import (
    EngineError,
    EngineTimeout,
    PluginMissing,
    StreamGone,
    StreamUnknown,
)

logger = logging.getLogger(__name__)

# The request usually follows as soon as the prompt is complete, and brings the rest of the prompt
# along. An append just before it would only delay the request.
_GRACE_SECONDS = 0.01
_OPEN_SECONDS = 10.0
_DELETE_SECONDS = 5.0
_RELEASE_SECONDS = 0.3
# The engine receives something at least once in this part of a stream's time to live.
_KEEP_ALIVE_PART = 1 / 3
# By their URLs, the engines that have opened a prompt stream.
_engines_with_plugin: set[str] = set()


def is_known_to_have_plugin(url: str) -> bool:
    """Return whether the engine at a URL has opened a prompt stream for this process."""
    return url in _engines_with_plugin


def forget_plugin(url: str) -> None:
    """Note that the engine that is now at a URL has no plugin."""
    _engines_with_plugin.discard(url)


class PromptSource(Protocol):
    """A prompt that only grows: :class:`flashmoa.linking.prompt.Prompt`, or one of token ids."""

    @property
    def is_complete(self) -> bool:
        """Return whether the prompt will not grow any more."""
        ...

    def take(self) -> str | Sequence[int]:
        """Return what was added since the last call; may be empty."""
        ...


class PromptFeed:
    """Feeds one growing prompt to one prompt stream.

    Args:
        engine: the engine that will use the prompt.
        prompt: text as a chat template renders it, special tokens included, or token ids.
        on_state: called with each answer of the engine; the first one opens the stream.
        add_special_tokens: whether the engine is to add special tokens to the text.
        ttl_seconds: how long the engine keeps the stream of a client that has vanished; by
            default the client's ``stream_ttl_seconds``.
        namespace: the namespace of the stream's KV; by default the client's.
        expected_output_tokens: how long the request's answer is likely to be, if that is known.

    Run :meth:`run` in a task, and then :meth:`hold` if the stream is not used at once. Call
    :meth:`changed` whenever the prompt has grown.

    Attributes:
        stream_id: the stream's id, once it is open, for the request that uses it. Unless such a
            request was sent, :meth:`delete` must be called after :meth:`run`.
    """

    def __init__(  # noqa: PLR0913 - all but the first two have a default
        self,
        engine: EngineClient,
        prompt: PromptSource,
        on_state: Callable[[StreamState], None] = lambda _: None,
        *,
        add_special_tokens: bool = False,
        ttl_seconds: float | None = None,
        namespace: Mapping[str, str] | None = None,
        expected_output_tokens: int | None = None,
    ) -> None:
        self.stream_id: str | None = None
        self._namespace = namespace
        self._expected_output_tokens = expected_output_tokens
        self._engine = engine
        self._ttl = engine.stream_ttl_seconds if ttl_seconds is None else ttl_seconds
        # Both by the event loop's clock: when the engine must receive something again, and until
        # when a cancelled caller waits for the engine.
        self._keep_alive_at = float("inf")
        self._release_deadline = float("inf")
        self._prompt = prompt
        self._on_state = on_state
        self._add_special_tokens = add_special_tokens
        self._changed = anyio.Event()
        self._stopped = False
        self._stopping = anyio.Event()

    def changed(self) -> None:
        """Note that the prompt has grown, or is complete."""
        self._changed.set()

    def stop(self) -> None:
        """Send nothing more: the request is about to be sent, or the stream is not needed."""
        self._stopped = True
        self._stopping.set()
        self._changed.set()

    async def run(self) -> None:
        """Open the stream, and append until the prompt is complete or the feed is stopped.

        Raises:
            EngineError: if a request to the engine fails; not if the feed was stopped and the
                stream is gone, since then its request has overtaken an append.
        """
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
        """Keep the open stream alive until the feed is stopped, though nothing is appended.

        Raises:
            StreamGone, StreamUnknown: if the engine does not have the stream any more.
        """
        await self._keep_alive_during(self._stopping.wait)

    async def delete(self) -> None:
        """Delete the stream and release its KV, even if cancelled (see the module's docstring).

        Repeating this is harmless.

        Raises:
            EngineError: if the engine cannot be reached; the stream then expires.
        """
        if (stream_id := self.stream_id) is not None:
            await self._run_shielded(lambda: self._engine.delete_stream(stream_id), _DELETE_SECONDS)

    async def _open(self, first: str | Sequence[int]) -> StreamState:
        states: list[StreamState] = []

        async def open_stream() -> None:
            is_text = isinstance(first, str)
            state = await self._engine.open_stream(
                text=first if isinstance(first, str) else None,
                input_ids=None if isinstance(first, str) else first,
                add_special_tokens=self._add_special_tokens if is_text else None,
                ttl_seconds=self._ttl,
                expected_output_tokens=self._expected_output_tokens,
                namespace=self._namespace,
            )
            # From here on the stream is deleted on every path.
            self.stream_id = state.id
            states.append(state)
            _engines_with_plugin.add(self._engine.url)

        await self._run_shielded(open_stream, _OPEN_SECONDS)
        if not states:
            raise EngineTimeout(
                f"{self._engine.url} did not open a prompt stream within {_OPEN_SECONDS:g} s; see "
                "the engine's log"
            )
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
        while not self._stopped:
            if seq and self._prompt.is_complete:
                with anyio.move_on_after(_GRACE_SECONDS):
                    await self._stopping.wait()
                    return
            piece, end = self._prompt.take(), self._prompt.is_complete
            if piece or end:
                text = piece if isinstance(piece, str) else None
                ids = None if isinstance(piece, str) else piece
                state = await self._engine.append(
                    state.id, seq, text=text or None, input_ids=ids or None, end=end
                )
                seq += 1
                self._postpone_keep_alive()
                self._on_state(state)
                if end:
                    return
                with anyio.move_on_after(state.pace_seconds):
                    await self._wait_until_complete()
            else:
                await self._keep_alive_during(self._wait_for_change)

    async def _wait_until_complete(self) -> None:
        while not self._stopped and not self._prompt.is_complete:
            await self._wait_for_change()

    async def _wait_for_change(self) -> None:
        await self._changed.wait()
        self._changed = anyio.Event()

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
