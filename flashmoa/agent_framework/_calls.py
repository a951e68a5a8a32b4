"""One request of an executor of a linked workflow, and what it tells those who read its text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, Self

from agent_framework import Content

from flashmoa.completions import Watch, WatchedBody
from flashmoa.linking.link import Link
from flashmoa.linking.streamed_text import Text
from flashmoa.observe.calls import CallReporter


class Watcher(Protocol):
    """A linked workflow; a client tells each of them about each request."""

    def begin(self, url: str, options: Mapping[str, Any]) -> Call | None:
        """A request is about to go out; ``None`` if it is not the workflow's."""
        ...

    async def close(self) -> None: ...


class Call:
    """A request that is under way; a context manager around it.

    Args:
        text: what others read of it; ``None`` where nobody does.
        held: why they do not get it as it comes, if so.
        own: the link to its prompt, which it takes over.
        give_back: has a link's stream given back that its request did not use.
        called_tools: is told where the answer is a call of tools, so that others get something
            else than its text.
    """

    def __init__(  # noqa: PLR0913 - one place makes it
        self,
        report: CallReporter,
        *,
        text: Text | None,
        held: bool,
        own: Link | None,
        late: bool,
        give_back: Callable[[Link], None],
        called_tools: Callable[[], None],
    ) -> None:
        # A held answer may be a call of tools, which a server may put otherwise in a stream.
        self._watch = Watch(self._hear, taps=not held)
        self._report = report
        self._text = text
        self._held = held
        self._own = own
        self._stream_id = own.take_over() if own is not None else None
        self._give_back = give_back
        self._called_tools = called_tools
        self._finished = False
        report.started(self._stream_id, late=late or (own is not None and own.is_late))

    def options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """A request's options, with its prompt stream and its watch in their body."""
        body: dict[str, Any] = dict(given.get("extra_body") or {})
        if self._stream_id is not None:
            body["prompt_stream_id"] = self._stream_id
        return {**given, "extra_body": WatchedBody(body, self._watch)}

    def finish(self, contents: Iterable[Content], reason: str | None) -> None:
        """The answer is complete, and this is what the framework made of it, and why it ended."""
        self._finished = True
        whole = list(contents)
        text = "".join(one.text or "" for one in whole if one.type == "text")
        self._report.finished(text, self._watch.usage, reason)
        if any(one.type == "function_call" for one in whole):
            self._called_tools()
        elif self._text is not None:
            self._text.finish(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._finished:
            return
        error = error or RuntimeError("the answer was not read to its end")
        self._report.failed(error)
        if self._text is not None:
            self._text.fail(error)
        # The request may not have reached the engine, which then still keeps its stream.
        if self._own is not None:
            self._give_back(self._own)

    def _hear(self, piece: str) -> None:
        self._report.text()
        if self._text is not None and not self._held:
            self._text.write(piece)
