"""Play the runs of a program, as they are learned."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from flashmoa.link.learned_runs import LearnedRun, Program, RecordedRequest


@contextmanager
def running(program: Program) -> Generator[LearnedRun]:
    """Begin a run of a program, and finish it."""
    run = LearnedRun(program)
    yield run
    run.finish()


def asking(messages: Sequence[Any], fields: Any = None) -> RecordedRequest:
    return RecordedRequest("http://engine", "tiny", messages, fields or {})
