"""Mark the runs of a program, whose calls are then linked (:func:`run`)."""

from __future__ import annotations

import logging
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, cast

from flashmoa._concurrency import all_of
from flashmoa.engine import EngineClient, WithoutPlugin
from flashmoa.engine.plain import check_choice
from flashmoa.linking.learned_planner import LearnedLinkPlanner, SentInPlace
from flashmoa.linking.learned_runs import Program, RecordedRequest
from flashmoa.linking.observed_call import CallObserver
from flashmoa.observe import Listener, ignore
from flashmoa.observe.trace import traced
from flashmoa.openai._agent_names import calling_agent
from flashmoa.openai._observed_http import Request
from flashmoa.openai._sent_requests import SentRequest, headers_now, read_request

logger = logging.getLogger(__name__)

_programs: dict[str, Program] = {}
_current: ContextVar[Run | None] = ContextVar("flashmoa_run", default=None)


def run(
    name: str | None = None,
    *,
    without_plugin: WithoutPlugin = "prefill",
    trace: Path | str | None = None,
    trace_prompts: bool = False,
    listener: Listener = ignore,
) -> AbstractAsyncContextManager[None]:
    """Link the calls that are made within ``async with run():``.

    The first run of a program is watched, and only what an agent asks after its tools is linked. In
    later ones, the prompt of each call that the run before had is prefilled while the calls before
    it still write. Prompts and answers stay the
    same; a program that does something else this time only gains less. Calls count if their client
    is an :class:`AsyncOpenAI` of this package or was given to :func:`link`.

    Args:
        name: the program's name. Runs with the same name are of one program; by default those that
            are entered at the same line of code. What is learned lives as long as this process.
        without_plugin: what links do on a server that does not have the plugin: ``prefill`` prompts
            in a few steps, as far as that pays, or nothing (``off``).
        trace: a file to write all events to, for ``flashmoa trace``. Runs at the same time may
            write to one file.
        trace_prompts: whether to write the prompts of calls, too. ``flashmoa trace`` and
            ``flashmoa doctor --trace`` then say why prefixes broke.
        listener: receives all events.

    Within another run, this does nothing. A run that ends with an exception is not learned from.

    Raises:
        ValueError: if ``without_plugin`` is none of these; on entry if the trace's file holds
            something that is not a trace, or if ``trace_prompts`` is given without ``trace``.
        OSError: on entry if the trace's file cannot be written.
    """
    check_choice(without_plugin)
    caller = sys._getframe(1)
    program = name or f"{caller.f_code.co_filename}:{caller.f_lineno}"
    return _run(program, without_plugin, traced(listener, trace, prompts=trace_prompts))


@asynccontextmanager
async def _run(
    program: str, without_plugin: WithoutPlugin, listening: AbstractContextManager[Listener]
) -> AsyncGenerator[None]:
    outer = _current.get()
    if outer is not None and not outer.is_closed:
        yield
        return
    with listening as listener:
        this = Run(_programs.setdefault(program, Program()), without_plugin, listener)
        _current.set(this)
        try:
            yield
        except BaseException:
            await this.close(learn=False)
            raise
        else:
            await this.close(learn=True)
        finally:
            # Not with a token: this may be closed in another context than it was entered in.
            _current.set(outer)


class Run:
    """One run of a program."""

    def __init__(self, program: Program, without_plugin: WithoutPlugin, listener: Listener) -> None:
        self.is_closed = False
        self._without_plugin: WithoutPlugin = without_plugin
        self._planner = LearnedLinkPlanner(program, listener, self._find_engine)
        # By URL, model and headers.
        self._engines: dict[tuple[str, str, frozenset[tuple[str, str]]], EngineClient] = {}

    def observe(self, request: RecordedRequest, hold_reason: str | None) -> CallObserver:
        """Return the observer of a request that is about to be sent."""
        return self._planner.observe(calling_agent(), request, hold_reason)

    async def close(self, *, learn: bool) -> None:
        """End the links; see :meth:`LearnedLinkPlanner.close`."""
        self.is_closed = True
        try:
            await self._planner.close(learn=learn)
        finally:
            await all_of([engine.close for engine in self._engines.values()])

    def _find_engine(self, request: RecordedRequest, sent: SentInPlace) -> EngineClient:
        # Runs record no other requests.
        headers = headers_now(
            cast("SentRequest", request), cast("Sequence[tuple[SentRequest, SentRequest]]", sent)
        )
        key = (request.url, request.model, frozenset(headers.items()))
        engine = self._engines.get(key)
        if engine is None:
            engine = self._engines[key] = EngineClient(
                request.url,
                headers=headers,
                model=request.model,
                without_plugin=self._without_plugin,
            )
        return engine


def find_observer(request: Request, body: Mapping[str, Any]) -> CallObserver | None:
    """Return the observer of a request that is made in this context; ``None`` outside of runs."""
    current = _current.get()
    if current is None or current.is_closed:
        return None
    try:
        hold_reason = "it asks for several answers" if (body.get("n") or 1) > 1 else None
        return current.observe(read_request(request, body), hold_reason)
    except Exception:
        # Whatever is wrong with a link, the request must be sent.
        logger.exception("A call runs unlinked because of the error below")
        return None
