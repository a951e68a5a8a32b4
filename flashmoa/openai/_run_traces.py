"""Write the traces of runs, of which several may write to one file (:func:`traced`)."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from flashmoa.observe import Event, Listener, PromptSent, ignore
from flashmoa.observe.events import both, contained
from flashmoa.observe.trace import add_trace

# Runs may be in several threads.
_lock = Lock()
_open: dict[Path, _SharedTrace] = {}


class _SharedTrace:
    """A trace and the number of runs that write it. See :class:`Trace` for what is raised."""

    def __init__(self, path: Path | str) -> None:
        self.runs = 0
        self.write = add_trace(ignore, path, prompts=True)


@contextmanager
def traced(listener: Listener, path: Path | str | None, *, prompts: bool) -> Generator[Listener]:
    """Yield a listener that also writes a trace if ``path`` is given.

    The file is made on entry; an existing trace is replaced, unless others are writing it: then
    all write to it.

    Args, Raises: see :func:`add_trace`.
    """
    if path is None:
        yield add_trace(listener, None, prompts=prompts)
        return
    place = Path(path).resolve()
    with _lock:
        shared = _open.get(place) or _SharedTrace(path)
        _open[place] = shared
        shared.runs += 1

    def write(event: Event) -> None:
        # Each run says for itself whether its prompts may be written.
        if prompts or not isinstance(event, PromptSent):
            shared.write(event)

    try:
        yield both(write, contained(listener))
    finally:
        with _lock:
            shared.runs -= 1
            if not shared.runs:
                del _open[place]
