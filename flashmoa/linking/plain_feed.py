"""Prefill a growing prompt on a server without the plugin, in a few steps (:class:`PlainFeed`)."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping

import anyio

from flashmoa.engine.client import EngineClient
from flashmoa.engine.prefill_steps import tokens_to_come
from flashmoa.engine.wire import PromptUsage, StreamState
from flashmoa.errors import PluginMissing
from flashmoa.linking.prompt import Prompt
from flashmoa.linking.prompt_feed import forget_plugin

logger = logging.getLogger(__name__)

# The request usually follows as soon as the prompt is complete, and brings the rest along.
_GRACE_SECONDS = 0.05
# Until a step has counted a prompt's tokens.
_CHARACTERS_PER_TOKEN = 4.0
# URLs of servers without the plugin that have been logged.
_plain_engines: set[str] = set()
# URLs of servers of which it has been logged that they do not keep what is prefilled.
_forgetful: set[str] = set()


class PlainFeed:
    """Prefills one growing prompt by requests of its own, when :class:`StepCosts` says it pays.

    It is used as :class:`~flashmoa.linking.prompt_feed.PromptFeed` is. There is at most one request
    at a time, and its connection is closed as soon as the feed is stopped, so that it does not
    delay the prompt's own request. What it prefills is in the server's cache like any prompt: the
    server may evict it, and there is nothing to release.

    Args:
        engine: the engine that will use the prompt.
        prompt: the prompt, as ``engine.render`` returns it.
        on_state: called before the first step and after each one with what is prefilled.
        namespace: the namespace of the request's KV; by default the engine client's.
        expect: returns how many tokens the writer of a slot is expected to write, if that is known.

    Attributes:
        stream_id: a made-up id for events, once there is something to prefill.
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
        self.stream_id: str | None = None
        self._url = engine.url
        self._namespace = engine.namespace if namespace is None else namespace
        self._server = engine.plain
        self._prompt = prompt
        self._on_state = on_state
        self._expect = expect
        self._changed = anyio.Event()
        self._scope = anyio.CancelScope()
        self._stopping = anyio.Event()
        # What the last step has sent: its number, and how much of the prompt.
        self._steps, self._sent_characters, self._sent_tokens = 0, 0, 0

    def changed(self) -> None:
        """Note that the prompt has grown, or is complete."""
        self._changed.set()

    def stop(self) -> None:
        """Send nothing more, and give up the step that is under way."""
        self._scope.cancel()
        self._stopping.set()

    async def run(self) -> None:
        """Send steps until the prompt is complete or the feed is stopped.

        Raises: EngineError if the server refuses a step or cannot be reached.
        """
        with self._scope:
            while not self._prompt.is_complete:
                if self._step_pays():
                    await self._send()
                else:
                    await self._changed.wait()
                    self._changed = anyio.Event()
            await anyio.sleep(_GRACE_SECONDS)
            if self._step_pays():
                await self._send()

    async def hold(self) -> None:
        """Wait until the feed is stopped."""
        await self._stopping.wait()

    async def delete(self) -> None:
        """Do nothing: the server keeps no stream."""

    def _step_pays(self) -> bool:
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
        if usage is not None:
            self._measure(usage, seconds)
            self._sent_tokens = usage.prompt_tokens or round(len(text) / _CHARACTERS_PER_TOKEN)
        self._sent_characters = len(text)
        self._steps += 1
        self._report()

    def _measure(self, usage: PromptUsage, seconds: float | None) -> None:
        cached, before = usage.cached_tokens, self._sent_tokens
        if not self._server.costs.add(usage.prompt_tokens, cached, seconds, before):
            level = logging.DEBUG if self._url in _forgetful else logging.WARNING
            _forgetful.add(self._url)
            text = (
                "%s has not kept the prompt that was prefilled there: of %d tokens it found %d in "
                "its prefix cache. Nothing is prefilled there for a minute. Is its prefix cache "
                'on? If not, without_plugin="off" saves these requests.'
            )
            logger.log(level, text, self._url, before, cached)

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
    """Log once for each engine that it runs without the plugin, and what links do there.

    From now on, requests to it have no fields of the plugin.
    """
    forget_plugin(engine.url)
    if engine.url in _plain_engines:
        return
    _plain_engines.add(engine.url)
    text = f"{problem}".removesuffix(".")
    if engine.without_plugin == "off":
        logger.warning("%s. Its agents run unlinked.", text)
        return
    logger.warning(
        "%s. Links prefill prompts there by a few short requests, for its own prefix cache. The "
        "plugin adds that text is prefilled as it is written, beside other requests instead of "
        "before them, and is kept until it is used.",
        text,
    )
