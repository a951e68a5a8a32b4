"""Texts that are being written, the marks that stand for them, and the links that read them."""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping
from types import TracebackType
from typing import Any, Self, cast

import anyio

from flashmoa.linking.failure_policy import Failure, FailurePolicy, failure_of
from flashmoa.linking.link import Link

_MARK = re.compile("\u27e6[^\u27e6\u27e7]*:[0-9a-f]{16}\u27e7")


class Text:
    """A text that is being written.

    In a string it shows its text once that is complete, and a mark before. Pass such a string
    on as it is, in messages for the same workflow; do not parse, cut or display it.

    As a context manager it is for its writer: leaving it closes the text, or fails it with the
    exception that was raised.

    Attributes:
        mark: stands for the text in strings until it is complete.
    """

    def __init__(self, name: str) -> None:
        self.name = name.translate({0x27E6: None, 0x27E7: None})
        self.mark = f"\u27e6{self.name}:{secrets.token_hex(8)}\u27e7"
        self._parts: list[str] = []
        self._links: list[Link] = []
        self._done = False
        self._error: BaseException | None = None
        self._changed = anyio.Event()

    def __str__(self) -> str:
        return self.written if self.is_complete else self.mark

    def __await__(self) -> Generator[Any, Any, str]:
        return self.complete().__await__()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self.fail(error)

    async def __aiter__(self) -> AsyncGenerator[str]:
        """Yield its pieces from the first one on, as they are written.

        Raises: what the text failed with.
        """
        given = 0
        while given < len(self._parts) or not self._done:
            if given < len(self._parts):
                given += 1
                yield self._parts[given - 1]
            else:
                await self._changed.wait()
        self._raise_if_failed()

    @property
    def written(self) -> str:
        """What has been written so far."""
        return "".join(self._parts)

    @property
    def failure(self) -> Failure | None:
        """How it failed; ``None`` where it is complete. A text that is not over counts as stalled,
        for a reader that goes on with what has arrived."""
        if not self._done:
            return "stall"
        return None if self._error is None else failure_of(self._error)

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be written: it is complete, or failed."""
        return self._done

    @property
    def is_complete(self) -> bool:
        return self._done and self._error is None

    async def complete(self) -> str:
        """Return the whole text, once it is complete. Raises: what it failed with."""
        while not self._done:
            await self._changed.wait()
        self._raise_if_failed()
        return self.written

    async def read(self, policy: FailurePolicy) -> str:
        """Return the text as a reader with that policy gets it.

        Raises: what it failed with, unless the policy goes on with what has arrived.
        """
        allowed = policy.stall_seconds if policy.stall == "finalize" else None
        while not self._done:
            with anyio.move_on_after(allowed if self._parts else None) as waiting:
                await self._changed.wait()
            if waiting.cancelled_caught:
                return self.written
        if self._error is not None and policy.action(failure_of(self._error)) == "abort":
            self._raise_if_failed()
        return self.written

    def write(self, piece: str) -> None:
        """Add the next piece; does nothing once the text is over."""
        if self._done:
            return
        self._parts.append(piece)
        for link in self._links:
            link.feed(self.name, piece)
        self._tell()

    def close(self) -> None:
        """Complete the text with what has been written; harmless to repeat."""
        for link in self._links:
            link.close_slot(self.name)
        self._end()

    def finish(self, whole: str) -> None:
        """Complete the text as ``whole``: write what is missing, and close it.

        If ``whole`` does not begin with what was written so far, links to it end.
        """
        if whole.startswith(self.written):
            if whole != self.written:
                self.write(whole.removeprefix(self.written))
        else:
            self._parts = [whole]
            for link in self._links:
                link.end("abort")
        self.close()

    def fail(self, error: BaseException) -> None:
        """Fail the text for good; links that wait for it act by their policy."""
        if self._done:
            return
        self._error = error
        for link in self._links:
            link.fail_slot(self.name, failure_of(error))
        self._end()

    def follow(self, link: Link) -> None:
        """Feed a link from the text's beginning on, and with what is written later.

        May be repeated after the link's prompt became another one, whose slots are empty.
        """
        if link not in self._links:
            self._links.append(link)
        if self._parts:
            link.feed(self.name, self.written)
        if self.is_complete:
            link.close_slot(self.name)
        elif self._error is not None:
            link.fail_slot(self.name, failure_of(self._error))

    def _raise_if_failed(self) -> None:
        """Raise what the text failed with, without the frames that earlier readers have added."""
        if self._error is not None:
            raise self._error.with_traceback(None)

    def _end(self) -> None:
        self._done = True
        self._links.clear()
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


def marks(value: Any) -> list[str]:
    """Return the marks in the strings of a value, in their order.

    Args:
        value: a string, or lists, tuples and mappings of values.
    """
    return list(dict.fromkeys(mark for one in _strings(value) for mark in _MARK.findall(one)))


def mentioned(value: Any, texts: Mapping[str, Text]) -> list[Text]:
    """Return those of ``texts``, by their marks, that a value mentions; see :func:`marks`."""
    return [texts[mark] for mark in marks(value) if mark in texts]


def replaced(value: Any, by: Mapping[str, str]) -> Any:
    """Return a value (see :func:`marks`) with the marks in its strings replaced."""
    if isinstance(value, str):
        return _MARK.sub(lambda found: by.get(found.group(), found.group()), value)
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {key: replaced(one, by) for key, one in items}
    if isinstance(value, list | tuple):
        return [replaced(one, by) for one in cast("list[Any]", value)]
    return value


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for one in cast("Mapping[Any, Any]", value).values():
            yield from _strings(one)
    elif isinstance(value, list | tuple):
        for one in cast("list[Any]", value):
            yield from _strings(one)
