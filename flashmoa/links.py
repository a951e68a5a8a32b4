"""Links: from upstream text to the KV of a downstream prompt.

While upstream agents write into a prompt's slots, its link sends whatever the stable
frontier passes to the downstream engine, which prefills it (FlashAgents §3.1). A link never
raises into the agents it serves: whatever goes wrong ends the link, says so as an event, and
the downstream request is computed as it would have been without it.
"""

from __future__ import annotations

import logging
from typing import Literal

import anyio

from flashmoa.engine import EngineClient, EngineError, EngineTimeout, PluginMissing, StreamState
from flashmoa.observe import LinkAdvanced, LinkClosed, LinkOpened, Listener, contained, ignore
from flashmoa.prompts import Prompt, Slot

logger = logging.getLogger(__name__)

FailurePolicy = Literal["abort", "finalize"]

# Between two appends: a token must not cost a request, which an engine on a CPU would feel.
# An engine that is behind takes what has piled up in one go anyway.
_PACE_SECONDS = 0.15
_BUSY_PACE_SECONDS = 0.5
_BUSY_TOKENS = 128
# How long the engine keeps a stream that hears nothing; for clients that vanish.
_STREAM_TTL_SECONDS = 300.0
_OPEN_SECONDS = 10.0
_DELETE_SECONDS = 5.0
_plain_engines: set[str] = set()


class Link:
    """One downstream prompt and the prompt stream it is sent to.

    Args:
        engine: where the downstream agent will run.
        prompt: its future prompt; feed it through :meth:`feed` and :meth:`close_slot`.
        agent: the downstream agent's name, for events.
        on_failure: when an upstream agent fails: ``abort`` gives the link up, ``finalize``
            keeps what arrived, for downstream agents that go on with it.
        unused_seconds: how long to wait for the downstream request once the prompt is
            complete; then the engine's KV is given back.
        listener: is told what happens.

    Run :meth:`run` in a task group; cancelling it closes the stream.
    """

    def __init__(
        self,
        engine: EngineClient,
        prompt: Prompt,
        *,
        agent: str,
        on_failure: FailurePolicy = "abort",
        unused_seconds: float = 30.0,
        listener: Listener = ignore,
    ) -> None:
        self.engine = engine
        self.prompt = prompt
        self.agent = agent
        self.stream_id: str | None = None
        self._on_failure: FailurePolicy = on_failure
        self._unused_seconds = unused_seconds
        self._listener = contained(listener)
        self._changed = anyio.Event()
        self._over: str | None = None

    @property
    def is_over(self) -> bool:
        return self._over is not None

    def waits_for(self, name: str) -> bool:
        """Whether a slot of that name is still open."""
        return any(slot.name == name and slot.is_open for slot in self.prompt.slots)

    def feed(self, name: str, text: str) -> None:
        """Add text to the open slot ``name``; without one, nothing happens."""
        for slot in self._open_slots(name):
            slot.append(text)
        self._changed.set()

    def close_slot(self, name: str) -> None:
        """Slot ``name`` is complete."""
        for slot in self._open_slots(name):
            slot.close()
        self._changed.set()

    def fail_slot(self, name: str) -> None:
        """The agent writing slot ``name`` failed: act by the link's policy."""
        if not self.waits_for(name):
            return
        if self._on_failure == "finalize":
            self.close_slot(name)
        else:
            self.end("abort")

    def take_over(self) -> str | None:
        """The downstream request is here: the stream's id for it, if there is one.

        The link sends nothing more; the request carries the whole prompt.
        """
        if self.is_over:
            return None
        # A stream that is still being opened comes too late for its request.
        self._over = "used" if self.stream_id is not None else "too late"
        self._changed.set()
        return self.stream_id

    def end(self, reason: str) -> None:
        """Give the link up."""
        if not self.is_over:
            self._over = reason
            self._changed.set()

    async def run(self) -> None:
        """Open the stream, follow the frontier, and close it again, whatever happens."""
        try:
            await self._follow()
        except PluginMissing as error:
            self._over = "plain engine"
            report_plain_engine(self.engine.url, error)
        except EngineError as error:
            # An append that its own request overtook finds the stream used; that is no failure.
            if not self.is_over:
                self._over = f"{type(error).__name__}: {error}"
                logger.warning("Link to %s ends: %s", self.agent, error)
        except BaseException:
            self._over = self._over if self.is_over else "closed"
            raise
        finally:
            await self._give_back()

    async def _follow(self) -> None:
        first = self.prompt.take()
        if self.is_over or not first:
            return
        state = await self._open(first)
        # From here on the id is known, so that the stream is given back on every path.
        self.stream_id = state.id
        upstream = tuple(slot.name for slot in self.prompt.slots)
        self._listener(
            LinkOpened(
                agent=self.agent, engine=self.engine.url, upstream=upstream, stream_id=state.id
            )
        )
        seq = 0
        while not self.is_over:
            text, complete = self.prompt.take(), self.prompt.is_complete
            if not text and not complete:
                await self._next_change()
                continue
            state = await self.engine.append(state.id, seq, text=text or None, end=complete)
            seq += 1
            self._listener(
                LinkAdvanced(
                    agent=self.agent,
                    engine=self.engine.url,
                    stream_id=state.id,
                    received_tokens=state.received_tokens,
                    prefilled_tokens=state.prefilled_tokens,
                )
            )
            if complete:
                await self._await_use()
                return
            behind = state.received_tokens - state.prefilled_tokens > _BUSY_TOKENS
            with anyio.move_on_after(_BUSY_PACE_SECONDS if behind else _PACE_SECONDS):
                await self._next_change(until_over=True)

    async def _open(self, first: str) -> StreamState:
        """Shielded: a stream the engine has must have its id known here."""
        state: StreamState | None = None
        with anyio.move_on_after(_OPEN_SECONDS, shield=True):
            state = await self.engine.open_stream(
                text=first, add_special_tokens=False, ttl_seconds=_STREAM_TTL_SECONDS
            )
        if state is None:
            raise EngineTimeout(f"{self.engine.url} did not open a stream in time")
        return state

    async def _next_change(self, until_over: bool = False) -> None:
        while not self.is_over:
            await self._changed.wait()
            self._changed = anyio.Event()
            if not until_over or self.prompt.is_complete:
                return

    async def _await_use(self) -> None:
        with anyio.move_on_after(self._unused_seconds):
            while not self.is_over:
                await self._changed.wait()
                self._changed = anyio.Event()
        if not self.is_over:
            self._over = "unused"

    async def _give_back(self) -> None:
        reason = self._over or "closed"
        # A used stream is closed by its request.
        if reason != "used":
            await self.delete_stream()
        self._listener(
            LinkClosed(
                agent=self.agent, engine=self.engine.url, stream_id=self.stream_id, reason=reason
            )
        )

    async def delete_stream(self) -> None:
        """Give the stream's KV back now, even when cancelled; harmless to repeat."""
        if self.stream_id is None:
            return
        with anyio.move_on_after(_DELETE_SECONDS, shield=True):
            try:
                await self.engine.delete_stream(self.stream_id)
            except EngineError as error:
                logger.debug("The engine will expire stream %s: %s", self.stream_id, error)

    def _open_slots(self, name: str) -> list[Slot]:
        return [slot for slot in self.prompt.slots if slot.name == name and slot.is_open]


def report_plain_engine(url: str, problem: PluginMissing) -> None:
    """An engine without the plugin is used as it is; once is enough to say so."""
    if url not in _plain_engines:
        _plain_engines.add(url)
        logger.warning("%s. Its agents run unlinked.", problem)
