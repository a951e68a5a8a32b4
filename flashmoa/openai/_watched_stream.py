"""Observe the answer in a response that is read in pieces (:func:`watch`)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import cached_property, partial
from typing import Any, cast

from flashmoa.engine.generation import is_event_stream
from flashmoa.linking.calls import CallObserver
from flashmoa.openai._answers import AnswerReader, report_end, report_whole


def watch(response: Any, observer: CallObserver, http_module: Any) -> Any:
    """Return the byte stream of a response as one that is observed.

    Args:
        http_module: httpx or httpx2, whichever the response is of.
    """
    base: Any = http_module.AsyncByteStream
    stream, answer = response.stream, _PassingAnswer(response, observer)

    class WatchedStream(base):  # httpx accepts no other iterators.
        async def __aiter__(self) -> AsyncIterator[bytes]:
            try:
                async for data in stream:
                    # Observers get the text before the reader may act upon it.
                    answer.feed(data)
                    yield data
            except GeneratorExit:  # The reader has left.
                answer.end()
                raise
            except BaseException as error:
                answer.end(error)
                raise
            answer.complete()

        async def aclose(self) -> None:
            answer.end()
            await stream.aclose()

    return WatchedStream()


class _PassingAnswer:
    """Reads an answer from the bytes of a response as they pass, and reports it once."""

    def __init__(self, response: Any, observer: CallObserver) -> None:
        self._response = response
        self._observer = observer
        self._is_encoded = "content-encoding" in response.headers
        # Given a stream, a response does not try to read a body.
        kind = cast("Any", type(response))
        self._make_twin = partial(kind, 200, headers=response.headers, stream=response.stream)
        self._is_stream = is_event_stream(response)
        self._reader = AnswerReader(is_stream=self._is_stream)
        self._document: list[bytes] = []
        self._is_over = False

    def feed(self, data: bytes) -> None:
        """Read the next bytes, as they came over the network."""
        if self._is_over:
            return
        try:
            plain = self._decode(data)
        except Exception as error:
            # The bytes pass all the same; their reader is told what is wrong with them.
            self.end(error)
            return
        if not self._is_stream:
            self._document.append(plain)
            return
        if text := self._reader.feed(plain):
            self._observer.on_text(text)
        if self._reader.is_over:
            self.end()

    def complete(self) -> None:
        """Report the answer, of which all bytes have passed."""
        if self._is_stream:
            self.end()
        elif not self._is_over:
            self._is_over = True
            report_whole(self._response, b"".join(self._document), self._observer)

    def end(self, error: BaseException | None = None) -> None:
        """Report the answer, of which no more bytes will be read; ``error`` says why not."""
        if not self._is_over:
            self._is_over = True
            report_end(self._reader, self._observer, error)

    def _decode(self, data: bytes) -> bytes:
        """Take the content encoding (``gzip``) off the next bytes."""
        if not self._is_encoded:
            return data
        decoded: Any = self._decoder.decode(data)
        # httpx2 returns it in pieces.
        return decoded if isinstance(decoded, bytes) else b"".join(decoded)

    @cached_property
    def _decoder(self) -> Any:
        # Decoders have a state, and the response's own one is for the response's reader.
        return self._make_twin()._get_content_decoder()
