"""Mark the runs of a program, whose calls are then linked (:func:`run`)."""

from __future__ import annotations

import logging
import re
import sys
import sysconfig
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from contextvars import ContextVar
from functools import cache, partial, wraps
from itertools import islice
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, ParamSpec, TypeVar, Unpack

from flashmoa._concurrency import all_of, setting
from flashmoa.engine import EngineClient
from flashmoa.linking.calls import CallObserver
from flashmoa.linking.learned_runs import LearnedLinkPlanner, Program, RecordedRequest, SentInPlace
from flashmoa.linking.options import LinkOptions, LinkSettings
from flashmoa.observe.report import Report
from flashmoa.observe.trace import end_trace
from flashmoa.openai._sent_requests import headers_now, read_request, settings_for
from flashmoa.openai_http import FindObserver, Request

logger = logging.getLogger(__name__)

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

# Frames of code in these folders are not the user's: the standard library, installed packages, and
# this package, which may be installed from its source folder.
_LIBRARIES = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    str(Path(__file__).parents[1]),
    "<frozen",
)
_MOST_FRAMES = 3
# By name; the one that ran last is the last one. A program holds prompts, answers and API keys.
_programs: dict[str, Program] = {}
_MOST_PROGRAMS = 256
_current: ContextVar[Run | None] = ContextVar("flashmoa_run", default=None)
_agent: ContextVar[str | None] = ContextVar("flashmoa_agent", default=None)


def run(name: str | None = None, **options: Unpack[LinkOptions]) -> RunContext:
    """Link the calls that are made within ``async with run():``, or in a function after ``@run()``.

    ``async with run() as report`` gives a :class:`Report`: print it to see what the links gained.

    The first run of a program is watched, and only what an agent asks after its tools is linked. In
    later ones, the prompt of each call that the run before had is prefilled while the calls before
    it still write. Prompts and answers stay the
    same; a program that does something else this time only gains less. Calls count if their client
    is an :class:`AsyncOpenAI` of this package or was given to :func:`instrument`.

    Args:
        name: the program's name. Runs with the same name are of one program; by default those that
            are entered at the same line of code, or of the same text of a shell. Do not name a run
            after its user or request: only the last 256 programs of this process are remembered.
        options: see :class:`flashmoa.LinkOptions`, also for exceptions; what concerns the trace is
            raised on entry.

    Within another run, this does nothing, and gives that one's report. A run that ends with an
    exception is not learned from.

    Raises:
        RuntimeError: on entry if this very run has been entered and not been left.
    """
    caller = sys._getframe(1)
    file = caller.f_code.co_filename
    # A shell counts its inputs: <ipython-input-3-0a1b2c>, <python-input-3>.
    if file.startswith("<"):
        file = re.sub(r"-\d+", "", file, count=1)
    program = name or f"{file}:{caller.f_lineno}"
    return RunContext(partial(_run, program, LinkSettings(**options)))


class RunContext(AbstractAsyncContextManager[Report, None]):
    """Begins a run each time that it is entered, or that a function which it decorates is called.

    Args:
        begin: returns the context of one run.
    """

    def __init__(self, begin: Callable[[], AbstractAsyncContextManager[Report]]) -> None:
        self._begin = begin
        self._entered: AbstractAsyncContextManager[Report] | None = None

    def __call__(
        self, function: Callable[Arguments, Awaitable[Result]]
    ) -> Callable[Arguments, Awaitable[Result]]:
        @wraps(function)
        async def in_run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            async with self._begin():
                return await function(*args, **kwargs)

        return in_run

    async def __aenter__(self) -> Report:
        if self._entered is not None:
            raise RuntimeError("this run has not ended; call run() again for one at the same time")
        entered = self._begin()
        report = await entered.__aenter__()
        self._entered = entered
        return report

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        entered, self._entered = self._entered, None
        if entered is not None:
            await entered.__aexit__(kind, error, trace)


@asynccontextmanager
async def _run(program: str, settings: LinkSettings) -> AsyncGenerator[Report]:
    if (this := _open_run()) is not None:
        yield this.report
        return
    listener = settings.listen()
    try:
        this = Run(_find_program(program), settings, Report(listener))
        with setting(_current, this):
            try:
                yield this.report
            except BaseException:
                await this.close(learn=False)
                raise
            else:
                await this.close(learn=True)
    finally:
        end_trace(listener)


def _find_program(name: str) -> Program:
    program = _programs[name] = _programs.pop(name, None) or Program()
    if len(_programs) > _MOST_PROGRAMS:
        _warn_of_names()
        del _programs[next(iter(_programs))]
    return program


@cache
def _warn_of_names() -> None:
    logger.warning(
        "there were more than %d programs, so that what was learned of the oldest is forgotten; "
        "give the runs of one program the same name, without a user's or a request's",
        _MOST_PROGRAMS,
    )


class Run:
    """One run of a program."""

    def __init__(
        self,
        program: Program,
        settings: LinkSettings,
        report: Report,
    ) -> None:
        self.is_closed = False
        self.thread = threading.get_ident()
        self.report = report
        self._planner = LearnedLinkPlanner(program, report, self._find_engine, settings)
        # By URL, model and headers.
        self._engines: dict[tuple[str, str, frozenset[tuple[str, str]]], EngineClient] = {}

    def find_observer(self, request: Request, body: Mapping[str, Any]) -> CallObserver | None:
        """Return the observer of a request that is about to be sent; ``None`` if it is odd."""
        try:
            hold_reason = "it asks for several answers" if (body.get("n") or 1) > 1 else None
            return self._planner.observe(calling_agent(), read_request(request, body), hold_reason)
        except Exception:
            # Whatever is wrong with a link, the request must be sent.
            logger.exception("A call runs unlinked because of the error below")
            return None

    async def close(self, *, learn: bool) -> None:
        """End the links; see :meth:`LearnedLinkPlanner.close`."""
        self.is_closed = True
        try:
            await self._planner.close(learn=learn)
        finally:
            await all_of([engine.close for engine in self._engines.values()])

    def _find_engine(self, request: RecordedRequest, sent: SentInPlace) -> EngineClient:
        headers = headers_now(request, sent)
        key = (request.url, request.model, frozenset(headers.items()))
        engine = self._engines.get(key)
        if engine is None:
            engine = self._engines[key] = EngineClient(
                request.url,
                headers=headers,
                model=request.model,
                engine_settings=settings_for(request.url),
            )
        return engine


def current_finder() -> FindObserver | None:
    """Return what finds the observers of requests in this context; ``None`` outside of runs."""
    current = _open_run()
    return current.find_observer if current is not None else None


def _open_run() -> Run | None:
    """Return the run of this context, unless it has ended.

    Threads inherit the context, but links are made only in the event loop of their run.
    """
    run = _current.get()
    is_open = run is not None and not run.is_closed and run.thread == threading.get_ident()
    return run if is_open else None


def calling_agent() -> str:
    """Return the name of the agent that is calling, else the user's functions that call.

    It is the name of :func:`agent`, of a LangGraph node or of a Pydantic AI agent. Functions are
    named with the lines of their calls, the outermost first (``main:12 > ask:31``).
    """
    named = _agent.get() or _langgraph_node() or _pydantic_ai_agent()
    return named or " > ".join(_calling_lines()) or "call"


def agent(name: str) -> AbstractContextManager[None]:
    """Name the agent that makes the calls in this context, in reports, traces and logs.

    Without it calls have the name of their LangGraph node or Pydantic AI agent, or of the lines of
    code that make them.
    """
    return setting(_agent, name)


def _langgraph_node() -> str | None:
    config_module = sys.modules.get("langchain_core.runnables.config")
    if config_module is None:
        return None
    config: Any = config_module.var_child_runnable_config.get()
    node: object = config.get("metadata", {}).get("langgraph_node") if config else None
    return node if isinstance(node, str) else None


def _pydantic_ai_agent() -> str | None:
    module: Any = sys.modules.get("pydantic_ai._run_context")
    if module is None:
        return None
    context = module.get_current_run_context()
    name: object = getattr(getattr(context, "agent", None), "name", None)
    return name if isinstance(name, str) else None


def _calling_lines() -> list[str]:
    frames = (each for each in _frames() if not each.f_code.co_filename.startswith(_LIBRARIES))
    calls = [f"{each.f_code.co_name}:{each.f_lineno}" for each in islice(frames, _MOST_FRAMES)]
    return [call for call in reversed(calls) if not call.startswith("<module>")]


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
