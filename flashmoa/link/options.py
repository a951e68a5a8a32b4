"""The options of everything that links calls (:class:`LinkOptions`), checked (`LinkSettings`)."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Self, TypedDict, get_args

from flashmoa.link.failure_policy import FailurePolicy, OnFailure
from flashmoa.link.link import Ahead
from flashmoa.observe import Listener
from flashmoa.observe.events import ignore
from flashmoa.observe.trace import add_trace

SessionOf = Literal["run", "agent"]
SESSION_HEADERS: dict[str, SessionOf] = {
    "X-Dynamo-Session-Id": "agent",
    "X-Dynamo-Parent-Session-Id": "run",
    "X-SMG-Routing-Key": "run",
}


class LinkOptions(TypedDict, total=False):
    """Options of everything that links calls, such as ``link``, ``run``, ``Workflow``.

    Attributes:
        ahead: how much of a prompt is prefilled before its request. ``text``, the default: also
            texts as they are written; ``known``: only the text that is known beforehand;
            ``nothing``: calls are only observed, to compare them with linked calls.
        on_failure: the action on the link to a prompt when a text in it fails: a policy or an
            action for all, or one for each agent that reads, by its name. By default ``abort``.
        trace: a file to write all events to, for ``flashmoa trace``, which also makes a page of
            it. An existing trace is replaced, unless it is being written: then both write to it.
        trace_prompts: whether to write the prompts of calls, too. ``flashmoa trace`` then says why
            prefixes broke.
        listener: receives all events.
        session_headers: the headers that tell routers the run or agent of a request, so that they
            send it where its KV is: ``run`` or ``agent`` by the name of each header. The default
            are Dynamo's and smg's headers (:data:`SESSION_HEADERS`); the values are random ids.

    Raises ``TypeError`` for any other option; ``ValueError`` if an option's value is unknown,
    ``trace`` is an existing file that is not a trace, or ``trace_prompts`` is given without
    ``trace``; ``OSError`` if the trace cannot be written.
    """

    ahead: Ahead
    on_failure: OnFailure | Mapping[str, OnFailure]
    trace: Path | str | None
    trace_prompts: bool
    listener: Listener
    session_headers: Mapping[str, SessionOf]


@dataclass(frozen=True)
class LinkSettings:
    """Holds the values of :class:`LinkOptions`. Raises: ValueError if one is unknown."""

    ahead: Ahead = "text"
    on_failure: OnFailure | Mapping[str, OnFailure] = "abort"
    trace: Path | str | None = None
    trace_prompts: bool = False
    listener: Listener = ignore
    session_headers: Mapping[str, SessionOf] = field(default_factory=SESSION_HEADERS.copy)

    def __new__(cls, **options: Any) -> Self:
        # Python's error would name this class, which users never see.
        known = [each.name for each in fields(cls)]
        if unknown := [name for name in options if name not in known]:
            raise TypeError(
                f"there is no option {unknown[0]!r}; the options are {', '.join(known)}"
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.ahead not in get_args(Ahead):
            raise ValueError(f"ahead must be 'nothing', 'known' or 'text', not {self.ahead!r}")
        if self.trace_prompts and self.trace is None:
            raise ValueError("trace_prompts=True records prompts in a trace; give trace=FILE, too")
        for name, of in self.session_headers.items():
            if of not in get_args(SessionOf) or not re.fullmatch(r"[\w-]+", name, re.ASCII):
                raise ValueError(
                    f"session_headers has {name!r}: {of!r}; it maps names of headers to 'run' or "
                    "'agent'"
                )
        names = self.on_failure if isinstance(self.on_failure, Mapping) else [""]
        for name in names:
            self.policy(name)

    def policy(self, agent: str) -> FailurePolicy:
        """Return the action on the link to an agent's prompt when a text in it fails.

        Args:
            agent: its name, which may have the number of a call: ``writer (2)``.
        """
        given = self.on_failure
        if isinstance(given, Mapping):
            given = given.get(agent) or given.get(re.sub(r" \(\d+\)$", "", agent), "abort")
        return FailurePolicy.of(given)

    def check_agents(self, known: Collection[str]) -> None:
        """Check the names of agents. Raises: ValueError if one is not among ``known``."""
        names = self.on_failure if isinstance(self.on_failure, Mapping) else ()
        check_names("on_failure", names, known)

    def listen(self, successor_of: Listener | None = None) -> Listener:
        """Return the listener of a link or run, which writes its trace; see :func:`add_trace`."""
        return add_trace(
            self.listener, self.trace, prompts=self.trace_prompts, successor_of=successor_of
        )


class Session:
    """Names a run and its agents to routers, by random ids.

    Args: headers: see :attr:`LinkOptions.session_headers`.
    """

    def __init__(self, headers: Mapping[str, SessionOf]) -> None:
        self._headers = headers
        self._run = secrets.token_hex(8)

    def headers(self, agent: str) -> dict[str, str]:
        # Names of agents may be anything, and may be private.
        own = hashlib.sha256(f"{self._run} {agent}".encode(errors="replace")).hexdigest()[:16]
        ids = {"run": self._run, "agent": f"{self._run}-{own}"}
        return {name: ids[of] for name, of in self._headers.items()}


def check_names(argument: str, names: Collection[str], known: Collection[str]) -> None:
    """Check the agents that an argument names. Raises: ValueError if one is not ``known``."""
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"{argument} names {unknown}; the agents are {sorted(known)}")
