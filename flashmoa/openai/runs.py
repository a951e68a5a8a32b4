"""Mark the runs of a program, so that their calls are linked (:func:`run`)."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import re
import sys
import sysconfig
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    suppress,
)
from contextvars import ContextVar
from functools import cache, partial, wraps
from inspect import iscoroutinefunction
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any, TypeVar, Unpack, cast

import anyio
from anyio.from_thread import BlockingPortal

from flashmoa._concurrency import all_of, running_loop, setting
from flashmoa.engine import EngineClient
from flashmoa.link import remembered_runs
from flashmoa.link.calls import CallObserver, CallResult
from flashmoa.link.learned_links import LearnedLinkPlanner, SentInPlace
from flashmoa.link.learned_runs import MAX_PROGRAMS, Program, RecordedRequest
from flashmoa.link.link import log_unlinked
from flashmoa.link.options import LinkOptions, LinkSettings
from flashmoa.link.prompt import NotForecastable
from flashmoa.observe.report import Report
from flashmoa.observe.trace import end_trace
from flashmoa.openai.http import FindObserver, Request
from flashmoa.openai.sent_requests import headers_now, read_request, settings_for

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])

# Code in these folders is not the user's: the standard library, installed packages, and this
# package, which may be installed from its source folder.
_LIBRARIES = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    str(Path(__file__).parents[1]),
    "<frozen",
)
# Programs by name, in the order of their last runs. They hold prompts, answers and API keys.
_programs: dict[str, Program] = {}
_programs_lock = threading.Lock()  # Runs may be in several threads.
# A run keeps at most this many clients, one per set of headers: each opens its own connections.
_MAX_ENGINES = 256
# A request waits this long for the event loop of its run; then it is sent unlinked.
_LOOP_TIMEOUT_SECONDS = 1.0
_current: ContextVar[Run | None] = ContextVar("flashmoa_run", default=None)
_agent: ContextVar[str | None] = ContextVar("flashmoa_agent", default=None)
# The open runs that were entered with ``with``.
_blocking: list[Run] = []


def run(
    name: str | None = None,
    *,
    remember: Path | str | None = None,
    **options: Unpack[LinkOptions],
) -> RunContext:
    """Link the calls that are made within ``async with run():``, or in a function after ``@run()``.

    ``async with run() as report`` gives a :class:`Report`: print it to see what the links gained.
    A program without an event loop enters ``with run():``. Its links have their own thread, which
    also calls ``listener``.

    The first run of a program is watched; only requests that follow an agent's tools are linked. In
    later runs, engines prefill the prompt of each call that the previous run had, while earlier
    calls still write. A program that runs once in each process gives ``remember``, or gains
    nothing. Prompts and answers stay the same; a run that differs from the previous run only gains
    less. Calls count if their client is an :class:`AsyncOpenAI` or :class:`OpenAI` of this package,
    or was given to :func:`instrument`.

    Calls of other threads count if they have this context (``asyncio.to_thread``,
    ``copy_context().run``). Threads with neither the context of a run nor an event loop count to
    the run that was entered with ``with``, while it is the only one.

    Args:
        name: the program's name. Runs with the same name belong to one program. By default, so do
            runs that are entered at the same line of code, or by the same text in a shell. Do not
            name a run after its user or request: the process remembers only 256 programs.
        remember: a folder for what is learned, so that the first run of the next process is linked,
            too. It gets a file for each program (at most 256, each of at most 64 MB), which only
            this user may read: the prompts, tools and answers of the last complete run, but no
            headers and no API key. ``OSError`` on entry if the folder cannot be made.
        options: see :class:`flashmoa.LinkOptions`, also for exceptions. Errors about the trace are
            raised on entry.

    Within another run, this does nothing and gives the outer run's report. Nothing is learned from
    a run that ends with an exception. If a run sends over 64 MB, only its beginning is learned.

    Raises:
        RuntimeError: on entry if this very run has been entered and not been left.
    """
    caller = sys._getframe(1)
    file = caller.f_code.co_filename
    # A shell counts its inputs: <ipython-input-3-0a1b2c>, <python-input-3>.
    if file.startswith("<"):
        file = re.sub(r"-\d+", "", file, count=1)
    program = name or f"{file}:{caller.f_lineno}"
    if remember == "":
        raise ValueError("remember names no folder; leave it out, or give a folder")
    # A program may change its folder meanwhile.
    folder = Path(remember).expanduser().absolute() if remember is not None else None
    return RunContext(partial(_run, program, folder, LinkSettings(**options)))


class RunContext(AbstractAsyncContextManager[Report, None], AbstractContextManager[Report, None]):
    """Begins a run at each entry, and at each call of a function that it decorates.

    Args:
        begin: returns a context manager that begins and ends a run.
    """

    def __init__(self, begin: Callable[[], AbstractAsyncContextManager[Run]]) -> None:
        self._begin = begin
        self._entered: AsyncExitStack | ExitStack | None = None

    def __call__(self, function: Function) -> Function:
        @wraps(function)
        async def in_run(*args: Any, **kwargs: Any) -> Any:
            async with RunContext(self._begin):
                return await function(*args, **kwargs)

        @wraps(function)
        def in_blocking_run(*args: Any, **kwargs: Any) -> Any:
            with RunContext(self._begin):
                return function(*args, **kwargs)

        return cast("Function", in_run if iscoroutinefunction(function) else in_blocking_run)

    async def __aenter__(self) -> Report:
        self._check()
        async with AsyncExitStack() as stack:
            this = await stack.enter_async_context(self._begin())
            stack.enter_context(setting(_current, this))
            self._entered = stack.pop_all()
        return this.report

    async def __aexit__(self, *problem: Any) -> None:
        entered, self._entered = self._entered, None
        if isinstance(entered, AsyncExitStack):
            await entered.__aexit__(*problem)

    def __enter__(self) -> Report:
        self._check()
        with ExitStack() as stack:
            if (this := _run_around()) is None:
                this = stack.enter_context(_RunThread(self._begin))
                this.entered_in = threading.get_ident()
                _blocking.append(this)
                stack.callback(_blocking.remove, this)
            stack.enter_context(setting(_current, this))
            # After the exit handlers the run's thread has stopped: leaving would wait for ever.
            ended = RuntimeError("the program ended within its run")
            leave = partial(self.__exit__, RuntimeError, ended, None)
            stack.callback(atexit.unregister, atexit.register(leave))
            self._entered = stack.pop_all()
        return this.report

    def __exit__(self, *problem: Any) -> None:
        entered, self._entered = self._entered, None
        if isinstance(entered, ExitStack):
            entered.__exit__(*problem)

    def _check(self) -> None:
        if self._entered is not None:
            raise RuntimeError("this run has not ended; call run() again for one at the same time")


class _RunThread(AbstractContextManager["Run", None]):
    """Keeps a run in a thread with an event loop.

    A process that is forked meanwhile lacks this thread and must not wait for it: there, leaving
    does nothing. ``anyio.from_thread.start_blocking_portal`` would wait even when it is only
    deleted, as it is a generator.

    Args:
        begin: returns a context manager that begins and ends the run.
    """

    def __init__(self, begin: Callable[[], AbstractAsyncContextManager[Run]]) -> None:
        self._begin = begin
        self._started: Future[BlockingPortal] = Future()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Run:
        self._thread.start()
        self._portal = self._started.result()
        self._entered = self._portal.wrap_async_context_manager(self._begin())
        try:
            self._run = self._entered.__enter__()
        except BaseException:
            self._stop()
            raise
        return self._run

    def __exit__(self, *problem: Any) -> None:
        if not self._run.is_forked:
            try:
                self._entered.__exit__(*problem)
            finally:
                self._stop()

    def _stop(self) -> None:
        """End the thread and the tasks that an interrupt has left there."""
        with suppress(RuntimeError):  # The thread has ended.
            self._portal.call(self._portal.stop, True)
        self._thread.join()

    def _work(self) -> None:
        try:
            anyio.run(self._serve)
        except BaseException as error:
            if self._started.done():
                raise
            self._started.set_exception(error)

    async def _serve(self) -> None:
        async with BlockingPortal() as portal:
            self._started.set_result(portal)
            await portal.sleep_until_stopped()


@asynccontextmanager
async def _run(name: str, folder: Path | None, settings: LinkSettings) -> AsyncGenerator[Run]:
    if (this := _run_around()) is not None:
        yield this
        return
    program = _find_program(name)
    if folder is not None:
        remembered_runs.prepare(folder)
        if not program.recorded:
            await anyio.to_thread.run_sync(remembered_runs.load, folder, name, program)
    listener = settings.listen()
    try:
        this = Run(program, settings, Report(listener))
        try:
            yield this
        except BaseException:
            await this.close(learn=False)
            raise
        else:
            await this.close(learn=True)
            if folder is not None:
                await anyio.to_thread.run_sync(remembered_runs.save, folder, name, program)
    finally:
        end_trace(listener)


def _find_program(name: str) -> Program:
    with _programs_lock:
        program = _programs[name] = _programs.pop(name, None) or Program()
        if len(_programs) > MAX_PROGRAMS:
            _warn_of_names()
            del _programs[next(iter(_programs))]
    return program


@cache
def _warn_of_names() -> None:
    logger.warning(
        "there were more than %d programs, so that what was learned of the oldest is forgotten; "
        "give the runs of one program the same name, without a user's or a request's",
        MAX_PROGRAMS,
    )


class Run:
    """One run of a program.

    Its links are made in the event loop that begins it; calls may come from other threads.

    Attributes:
        entered_in: the thread that entered it with ``with``; ``None`` with ``async with``.
        is_forked: whether this process was forked within it, so that nothing here keeps it.
    """

    def __init__(self, program: Program, settings: LinkSettings, report: Report) -> None:
        self.is_closed = False
        self.entered_in: int | None = None
        self.report = report
        self._process = os.getpid()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._news: SimpleQueue[Callable[[], None]] = SimpleQueue()
        # Tells the task that hears other threads of their news; `None` until they have any.
        self._has_news: asyncio.Event | None = None
        self._unanswered: _PassedCall | None = None
        self._planner = LearnedLinkPlanner(
            program, report, self._find_engine, settings, self._find_client
        )
        # Clients that hear calls, by URL and API key.
        self._hearers: dict[tuple[str, str | None], EngineClient] = {}
        # By URL, model and headers.
        self._engines: dict[tuple[str, str, frozenset[tuple[str, str]]], EngineClient] = {}

    @property
    def is_forked(self) -> bool:
        return os.getpid() != self._process

    def find_observer(self, request: Request, body: Mapping[str, Any]) -> CallObserver | None:
        """Return the observer of a request that is about to be sent, if it can be linked."""
        try:
            hold_reason = "it asks for several answers" if (body.get("n") or 1) > 1 else None
            recorded = read_request(request, body)
            begin = partial(self._planner.observe, calling_agent(), recorded, hold_reason)
            return self._observe(_PassedCall(self._pass_on, begin))
        except Exception as problem:
            # Whatever is wrong with a link, the request must be sent.
            log_unlinked(problem)
            return None

    async def close(self, *, learn: bool) -> None:
        """End the links; see :meth:`LearnedLinkPlanner.close`."""
        self.is_closed = True
        self._take_news()
        try:
            await self._planner.close(learn=learn)
        finally:
            await all_of([engine.close for engine in self._engines.values()])

    def _observe(self, call: _PassedCall) -> CallObserver | None:
        # A program may block its event loop until its threads have ended: do not wait again.
        is_blocked = self._unanswered is not None and not self._unanswered.has_begun.is_set()
        if is_blocked and threading.get_ident() != self._thread:
            return None
        if call.begin():
            return call
        self._unanswered = call
        return None

    def _pass_on(self, news: Callable[[], None]) -> None:
        """Call a function in the loop's thread, after earlier ones; another thread's in a task."""
        if threading.get_ident() == self._thread:
            self._take_news()
            news()
            return
        self._news.put(news)
        with suppress(RuntimeError):  # The event loop, and with it the run, has ended.
            self._loop.call_soon_threadsafe(self._wake)

    def _take_news(self) -> None:
        while not self._news.empty():
            try:
                self._news.get_nowait()()
            except Exception as problem:
                log_unlinked(problem)

    def _wake(self) -> None:
        if self._has_news is None:
            self._has_news = asyncio.Event()
            self._planner.host.start(self._hear_threads)
        self._has_news.set()

    async def _hear_threads(self) -> None:
        while self._has_news is not None:
            await self._has_news.wait()
            self._has_news.clear()
            self._take_news()

    def _find_engine(self, request: RecordedRequest, sent: SentInPlace) -> EngineClient:
        return self._connect(request, headers_now(request, sent))

    def _find_client(self, request: RecordedRequest) -> EngineClient | None:
        """Return the client that hears all requests with the same server and API key.

        It sends the headers of the first request, as a gateway may need them.
        """
        key = (request.url, request.headers.get("authorization"))
        if key not in self._hearers:
            try:
                self._hearers[key] = self._connect(request, request.headers)
            except NotForecastable:
                return None
        return self._hearers[key]

    def _connect(self, request: RecordedRequest, headers: Mapping[str, str]) -> EngineClient:
        key = (request.url, request.model, frozenset(headers.items()))
        engine = self._engines.get(key)
        if engine is None:
            if len(self._engines) >= _MAX_ENGINES:
                raise NotForecastable(
                    f"its run has sent more than {_MAX_ENGINES} different sets of headers"
                )
            engine = self._engines[key] = EngineClient(
                request.url,
                headers=headers,
                model=request.model,
                engine_settings=settings_for(request.url),
            )
        return engine


class _PassedCall(CallObserver):
    """Observes a call in any threads, and tells an observer in the thread of its run.

    Args:
        pass_on: calls a function in that thread, after the functions passed on earlier.
        begin: makes the observer; that thread calls it.

    Attributes:
        has_begun: is set when that thread has called ``begin``.
    """

    def __init__(
        self,
        pass_on: Callable[[Callable[[], None]], None],
        begin: Callable[[], CallObserver],
    ) -> None:
        super().__init__()
        self.has_begun = threading.Event()
        self._pass_on = pass_on
        self._begin = begin
        self._observer: CallObserver | None = None

    def begin(self) -> bool:
        """Have the run's thread make the observer. Return whether it did so in time."""
        self._pass_on(self._make)
        has_begun = False
        try:
            has_begun = self.has_begun.wait(_LOOP_TIMEOUT_SECONDS)
        finally:
            if not has_begun:  # The request is sent without the observer, if it is made later.
                self.on_failure(TimeoutError("the run's event loop did not answer"))
        return has_begun and self._observer is not None

    def on_prompt(self, body: Mapping[str, Any]) -> None:
        self._tell("on_prompt", body)

    def on_named(self, call_id: str) -> None:
        self._tell("on_named", call_id)

    def on_text(self, text: str) -> None:
        self._tell("on_text", text)

    def on_finish(self, result: CallResult) -> None:
        self._tell("on_finish", result)

    def on_failure(self, error: BaseException) -> None:
        self._tell("on_failure", error)

    def _make(self) -> None:
        try:
            self._observer = observer = self._begin()
            self.prompt_stream_id = observer.prompt_stream_id
            self.headers = observer.headers
            self.channel = observer.channel
        finally:
            self.has_begun.set()

    def _tell(self, method: str, *news: object) -> None:
        def tell() -> None:
            if self._observer is not None:
                getattr(self._observer, method)(*news)

        self._pass_on(tell)


def current_finder() -> FindObserver | None:
    """Return the function that finds observers of requests in this context, if it is in a run."""
    current = _run_of_context() if _current.get() is not None else _run_of_thread()
    if current is not None and current.is_forked:
        _warn_of_fork()
        return None
    return current.find_observer if current is not None else None


@cache
def _warn_of_fork() -> None:
    logger.warning(
        "process %d was forked within a run of its parent, so that its calls run unlinked; enter a "
        "run in the process itself to have them linked",
        os.getpid(),
    )


def _run_around() -> Run | None:
    """Return the outer run; a new run inside it does nothing."""
    run = _run_of_context()
    return None if run is None or run.is_forked else run


def _run_of_context() -> Run | None:
    """Return the open run of this context, which threads may inherit."""
    run = _current.get()
    return run if run is not None and not run.is_closed else None


def _run_of_thread() -> Run | None:
    """Return the run of a thread whose context has no run, as in a pool of threads.

    There is none if several runs are open. An event loop and the thread that has entered the run
    have contexts instead.
    """
    runs = [run for run in _blocking if not run.is_forked] or _blocking.copy()
    is_plain = len(runs) == 1 and running_loop() is None
    return runs[0] if is_plain and runs[0].entered_in != threading.get_ident() else None


def calling_agent() -> str:
    """Return the name of the calling agent, or else the user's functions that call.

    The agent's name is given by :func:`agent`, LangGraph (the nodes, ``writer > agent``), Pydantic
    AI, CrewAI (the role), the Agents SDK, ADK, LlamaIndex or smolagents. Functions have the lines
    of their calls, the outermost first (``main:12 > ask:31``).
    """
    finders = (_agent.get, _langgraph_node, _pydantic_ai_agent, _crewai_agent, _agent_in_frames)
    names = (find() for find in finders)
    named = next((name for name in names if isinstance(name, str) and name), None)
    return named or " > ".join(_calling_lines()) or "call"


def agent(name: str) -> AbstractContextManager[None]:
    """Name the agent that makes the calls in this context, in reports, traces and logs.

    Without a name, a call has the names of its LangGraph nodes, the name or role of its framework's
    agent, or else the lines of code that make it.
    """
    return setting(_agent, name)


def _langgraph_node() -> str | None:
    module: Any = sys.modules.get("langchain_core.runnables.config")
    config: Any = module.var_child_runnable_config.get() if module is not None else None
    # "writer:ID|agent:ID" in an agent within a node: each of LangGraph's own agents has this node.
    place = config.get("metadata", {}).get("langgraph_checkpoint_ns") if config else None
    # A number alone tells graphs apart that one node runs.
    steps = (step for step in (place or "").split("|") if not step.isdecimal())
    return " > ".join(step.partition(":")[0] for step in steps)


def _pydantic_ai_agent() -> object:
    module: Any = sys.modules.get("pydantic_ai._run_context")
    context = module.get_current_run_context() if module is not None else None
    return getattr(getattr(context, "agent", None), "name", None)


def _crewai_agent() -> str | None:
    if "crewai" not in sys.modules:
        return None
    # CrewAI passes the agent to its models, often in a thread without a frame of the user's.
    calls = (each.f_locals for each in _frames() if each.f_code.co_name in ("call", "acall"))
    roles = (getattr(call.get("from_agent"), "role", None) for call in calls)
    return next((role.strip() for role in roles if isinstance(role, str)), None)


def _agent_in_frames() -> str | None:
    """Return the name of an agent whose framework keeps it in no context."""
    kinds = [
        (f"{package.split('.')[0]}.", kind)
        for package, name in (
            ("agents", "Agent"),  # OpenAI's Agents SDK.
            ("google.adk.agents", "BaseAgent"),
            ("llama_index.core.agent.workflow", "BaseWorkflowAgent"),
            ("smolagents", "MultiStepAgent"),
        )
        if isinstance(kind := getattr(sys.modules.get(package), name, None), type)
    ]
    # They may call in a task of their own, without a frame of the user's.
    for frame in _frames() if kinds else ():
        module = frame.f_globals.get("__name__", "")
        for start, kind in kinds:
            held = frame.f_locals.values() if module.startswith(start) else ()
            names = (getattr(each, "name", None) for each in held if isinstance(each, kind))
            if named := next((name for name in names if isinstance(name, str)), None):
                return named
    return None


def _calling_lines() -> list[str]:
    frames = (each for each in _frames() if not each.f_code.co_filename.startswith(_LIBRARIES))
    calls = [f"{each.f_code.co_name}:{each.f_lineno}" for each in islice(frames, 3)]
    return [call for call in reversed(calls) if not call.startswith("<module>")]


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
