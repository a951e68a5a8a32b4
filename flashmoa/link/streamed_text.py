"""Read texts while they are written (:class:`StreamedText`), write texts (:class:`Text`), and find
and replace the marks of texts in strings.
"""

from __future__ import annotations

import itertools
import re
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, SupportsIndex, cast
from weakref import WeakValueDictionary

import anyio

from flashmoa.link.failure_policy import (
    Failure,
    FailurePolicy,
    UpstreamCancelled,
    classify_failure,
)
from flashmoa.link.link import Link

# A mark has the text's name and a token.
_MARK = re.compile("\u27e6([^\u27e6\u27e7]*):([0-9a-f]{16})\u27e7")
# A token begins alike in all marks of this process, and ends with a number. A token outside of a
# mark shows that the mark was changed: cut, quoted or put in another case.
_OF_PROCESS = secrets.token_hex(4)
_NUMBERS = itertools.count()
_TOKEN = re.compile(f"{_OF_PROCESS}[0-9a-f]{{8}}", re.IGNORECASE)
# So does the beginning of a token at the end of a string, which limits the length of a prompt.
_CUT = re.compile(f"\u27e6[^\u27e6\u27e7]*:{_OF_PROCESS[:4]}[0-9a-f]*$")
_NO_STRING = "it is no string, since it may be incomplete; await it, and use the string"
# All texts of this process that are in use, by token.
_TEXTS: WeakValueDictionary[str, StreamedText] = WeakValueDictionary()


class StreamedText:
    """A text that is being written, for its readers.

    Put it into prompts by an f-string, by ``+``, or by a list in an f-string; with ``join()``,
    write ``"\\n".join(map(str, texts))``. The string then contains the text if it is complete,
    otherwise a mark. Pass a string with marks on unchanged, in messages for the same workflow; do
    not parse, cut or display it.

    It is no string, so that nothing reads a mark as if it were the text: methods of strings, and
    ``json``, ``re`` and others refuse it. Give them ``await text``. Once it is complete, it equals
    its string. As a key it equals only itself, and it is always true.
    """

    _error: Exception | None = None
    _was_raised = False  # Whether a reader got the error.
    # The URL of the engine that writes the text in a call, and the call's id.
    _call: tuple[str, str] | None = None
    # The last texts whose marks may be in strings. It keeps the text in memory.
    _marked: deque[StreamedText] | None = None

    def __init__(self, name: str) -> None:
        self.name = name.translate({0x27E6: None, 0x27E7: None})
        token = f"{_OF_PROCESS}{next(_NUMBERS):08x}"
        self._mark = f"\u27e6{self.name}:{token}\u27e7"
        self._parts: list[str] = []
        self._links: list[Link] = []
        self._done = False
        self._is_rewritten = False
        # Set at the next change; ``None`` while nobody waits for it.
        self._changed: anyio.Event | None = None
        _TEXTS[token] = self

    def __str__(self) -> str:
        if self.is_complete:
            return self.written
        if self._marked is not None:
            self._marked.append(self)
            self._marked = None
        return self._mark

    # A list in an f-string has the representations of its items.
    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        return self._whole(f"format {spec!r}").__format__(spec) if spec else f"{self!s}"

    def __add__(self, other: object) -> str:
        return f"{self!s}{other!s}" if isinstance(other, str | StreamedText) else NotImplemented

    def __radd__(self, other: object) -> str:
        return f"{other!s}{self!s}" if isinstance(other, str) else NotImplemented

    def __eq__(self, other: object) -> bool:
        is_string = isinstance(other, str)
        return self is other or (is_string and self.is_complete and self.written == other)

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        return True

    if not TYPE_CHECKING:  # A type checker reports these uses itself.

        def __getattr__(self, name: str) -> NoReturn:
            if hasattr(str, name):
                raise AttributeError(f"{self.name!r} has no {name}(): {_NO_STRING}")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

        def __len__(self) -> NoReturn:
            raise TypeError(f"{self.name!r} has no length: {_NO_STRING}")

        # Iterating and `in` come here, too; with an `__iter__`, it would pass for a list.
        def __getitem__(self, _place: object) -> NoReturn:
            raise TypeError(f"{self.name!r} has no characters: {_NO_STRING}")

    def __reduce_ex__(self, _protocol: SupportsIndex) -> tuple[type[str], tuple[str]]:
        return str, (self._whole("pickle"),)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, _memo: object) -> Self:
        return self

    def __await__(self) -> Generator[Any, Any, str]:
        return self.complete().__await__()

    async def __aiter__(self) -> AsyncGenerator[str]:
        """Yield its parts, from the first one on, as they are written.

        Raises: the exception that the text failed with, after the last part; RuntimeError if it was
            finished with a string that does not begin with the parts so far.
        """
        # Once the text has ended, another list has its parts as one string.
        parts, yielded = self._parts, 0
        while yielded < len(parts) or not self._done:
            if yielded < len(parts):
                yielded += 1
                yield parts[yielded - 1]
            else:
                await self._wait()
            if self._is_rewritten and parts is not self._parts:
                if yielded:
                    raise RuntimeError(
                        f"{self.name!r} was finished with another string than the parts that were "
                        "read of it; await the text to get that string"
                    )
                parts = self._parts
        self._raise_if_failed()

    @property
    def written(self) -> str:
        """The text so far."""
        return "".join(self._parts)

    @property
    def failure(self) -> Failure | None:
        """The kind of the text's failure; ``None`` if it is complete.

        An unfinished text counts as stalled, for a reader that continues with the text so far.
        """
        if not self._done:
            return "stall"
        return None if self._error is None else classify_failure(self._error)

    @property
    def unread_error(self) -> Exception | None:
        """The exception that the text failed with, unless it was raised in a reader."""
        is_cancelled = isinstance(self._error, UpstreamCancelled)
        return None if self._was_raised or is_cancelled else self._error

    @property
    def is_over(self) -> bool:
        """Whether the text has ended: it is complete or has failed."""
        return self._done

    @property
    def is_complete(self) -> bool:
        return self._done and self._error is None

    async def complete(self) -> str:
        """Wait until the text is complete, and return it.

        Raises: the exception that the text failed with.
        """
        while not self._done:
            await self._wait()
        self._raise_if_failed()
        return self.written

    async def _read(self, policy: FailurePolicy) -> str:
        """Wait for the text as a reader with this policy does, and return it.

        Raises: the exception that the text failed with, unless the policy is to finalize.
        """
        max_pause = policy.stall_seconds if policy.stall == "finalize" else None
        while not self._done:
            with anyio.move_on_after(max_pause if self._parts else None) as pause:
                await self._wait()
            if pause.cancelled_caught:
                return self.written
        if self._error is not None and policy.action(classify_failure(self._error)) == "abort":
            self._raise_if_failed()
        return self.written

    def _write(self, part: str) -> None:
        """Add the next part; do nothing if the text has ended."""
        if self._done:
            return
        self._parts.append(part)
        for link in self._links:
            link.feed(self.name, part)
        self._notify_readers()

    def _close(self) -> None:
        """Complete the text as it is now. Repeating this is harmless."""
        for link in self._links:
            link.close_slot(self.name)
        self._end()

    def _finish(self, whole: str) -> None:
        """Write the rest of the text, and close it. Do nothing if it has ended.

        If ``whole`` does not begin with the text so far, links replace their text.
        """
        if self._done:
            return
        if whole.startswith(self.written):
            if whole != self.written:
                self._write(whole.removeprefix(self.written))
        else:
            self._parts = [whole]
            self._is_rewritten = True
            for link in self._links:
                link.replace(self.name, whole)
        self._close()

    def _name_call(self, engine_url: str, call_id: str) -> None:
        """Note the engine's call that writes the text, for links to the same engine."""
        self._call = engine_url, call_id
        for link in self._links:
            link.follow(self.name, engine_url, call_id)

    def _withdraw(self) -> None:
        """Remove the text from links, which wait for another text in its place.

        The text must have no readers. Do nothing if it has ended.
        """
        if not self._done:
            for link in self._links:
                link.replace(self.name, "")
            self._parts = []

    def _fail(self, error: BaseException) -> None:
        """End the text with a failure; each link that waits for it acts by its policy.

        If its writer was cancelled, readers get :class:`UpstreamCancelled`, and are not cancelled.
        Do nothing if the text has ended.
        """
        if self._done:
            return
        if not isinstance(error, Exception):
            cancelled = UpstreamCancelled(f"{self.name} was cancelled")
            cancelled.__cause__ = error
            error = cancelled
        self._error = error
        for link in self._links:
            link.fail_slot(self.name, classify_failure(error))
        self._end()

    def _feed_to(self, link: Link) -> None:
        """Feed the whole text to a link, now and as it is written.

        Call this again if the link's prompt is replaced: the new prompt's slots are empty.
        """
        if not self._done and link not in self._links:
            self._links.append(link)
        if not self._done and self._call is not None:
            link.follow(self.name, *self._call)
        if self._parts:
            link.feed(self.name, self.written)
        if self.is_complete:
            link.close_slot(self.name)
        elif self._error is not None:
            link.fail_slot(self.name, classify_failure(self._error))

    def _raise_if_failed(self) -> None:
        """Raise the text's error, without the traceback frames of earlier readers."""
        if self._error is not None:
            self._was_raised = True
            raise self._error.with_traceback(None)

    def _whole(self, use: str) -> str:
        """Return the text. Raises: TypeError, which names the ``use``, if it is not complete."""
        if not self.is_complete:
            raise TypeError(
                f"{self.name!r} is not complete, so it has no {use} yet; await it first, and use "
                "the string"
            )
        return self.written

    def _end(self) -> None:
        self._done = True
        self._parts = [text] if (text := self.written) else []
        self._links.clear()
        self._notify_readers()

    async def _wait(self) -> None:
        """Wait until more is written, or the text ends."""
        self._changed = self._changed or anyio.Event()
        await self._changed.wait()

    def _notify_readers(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None


class Text(StreamedText):
    """A text that you write.

    As a context manager, leaving it closes the text, or fails it with the raised exception.
    """

    write = StreamedText._write
    close = StreamedText._close
    finish = StreamedText._finish
    fail = StreamedText._fail
    name_call = StreamedText._name_call
    withdraw = StreamedText._withdraw

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


def find_marks(value: Any) -> list[str]:
    """Return the marks in the strings of a value, in order, each once.

    Args:
        value: a string or a text, or lists, tuples and mappings of such values.
    """
    found = (mark.group() for string in _strings(value) for mark in _MARK.finditer(string))
    return list(dict.fromkeys(found))


def find_texts(value: Any, texts: Mapping[str, StreamedText]) -> list[StreamedText]:
    """Return the texts whose marks are in a value (see :func:`find_marks`), given texts by mark.

    Raises: ValueError if the value has a mark that could not be replaced, so that a model would
        read it: of another text of this process, or changed, as by ``upper()``.
    """
    found: list[StreamedText] = []
    for mark in find_marks(value):
        if (text := texts.get(mark)) is not None:
            found.append(text)
            continue
        name, token = _MARK.findall(mark)[0]
        if token in _TEXTS:
            raise ValueError(
                f"{name!r} is a text of another workflow; await it, and use the string"
            )
        if _TOKEN.fullmatch(token):
            raise ValueError(
                f"the text {name!r} is gone, and only the mark that stood for it is left in "
                "a string; keep what ask() or text() returned, or await it and use the string"
            )
    for string in _strings(value):
        rest = _MARK.sub("", string)
        if changed := _TOKEN.search(rest) or _CUT.search(rest):
            text = _TEXTS.get(changed.group().lower())
            raise ValueError(
                f"{text.name if text else 'a text'!r} was changed before it was complete: the mark "
                "that stands for it is cut, quoted, turned into JSON or in another case. Await it, "
                "and change the string; or for JSON, use json.dumps(..., ensure_ascii=False)"
            )
    return found


def replace_marks(value: Any, replacements: Mapping[str, str]) -> Any:
    """Return a value (see :func:`find_marks`) with these marks replaced."""
    if isinstance(value, StreamedText):
        value = value._mark
    if isinstance(value, str):
        return _MARK.sub(lambda mark: replacements.get(mark.group(), mark.group()), value)
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {key: replace_marks(item, replacements) for key, item in items}
    if isinstance(value, list | tuple):
        return [replace_marks(item, replacements) for item in cast("list[Any]", value)]
    return value


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, StreamedText):
        yield value._mark
    elif isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in cast("Mapping[Any, Any]", value).values():
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in cast("list[Any]", value):
            yield from _strings(item)
