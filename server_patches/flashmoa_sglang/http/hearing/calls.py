"""``HeardCalls``: which calls are in flight, and which channel and streams hear each."""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from flashmoa_sglang.http import asked, rendering
from flashmoa_sglang.http.errors import MalformedRequest
from flashmoa_sglang.http.hearing.call import HeardCall
from flashmoa_sglang.http.hearing.channel import Channel, add_line
from flashmoa_sglang.http.hearing.written_text import WrittenText
from flashmoa_sglang.messages import HearAnswers, WrittenTokens

if TYPE_CHECKING:
    from flashmoa_sglang.http.engine import Engine
    from flashmoa_sglang.http.hearing.following import Follower

logger = logging.getLogger(__name__)

# The id of a call: 32 hexadecimal digits, as a UUID has them. The first 16 name its channel.
CALL_HEADER = "X-Request-Id-FlashMoA"
CHANNEL_HEADER = "X-FlashMoA-Channel"
_CALL_ID = re.compile(r"[0-9a-f]{32}")
_CHANNEL_ID = re.compile(r"[0-9a-f]{16}")
_HEARD = "flashmoa_heard"


@dataclass(slots=True, eq=False)
class _InFlight:
    """A call in flight.

    Attributes:
        request: SGLang's request.
        chat: the chat that the request answers, if any.
        followers: the followers of the prompt streams that follow the call.
        lines: the call's lines so far, for followers and a channel that come later.
        is_heard: whether the call is heard.
        has_channel: whether a channel has had the call's lines.
    """

    heard: HeardCall
    request: Any
    chat: Any
    followers: list[Follower] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)
    is_heard: bool = False
    has_channel: bool = False

    @property
    def channel(self) -> str:
        return self.heard.id[:16]


class HeardCalls:
    """The calls in flight that name a channel, the open channels, and who follows a call.

    A call is told from its beginning, once its channel is open or a prompt stream follows it.

    Args:
        decode: SGLang's ``tokenizer.decode``.
        handlers: SGLang's application state, which has the handlers of its routes.
    """

    def __init__(self, engine: Engine, decode: Callable[..., str], handlers: Any) -> None:
        self._engine = engine
        self._decode = decode
        self._handlers = handlers
        self._channels: dict[str, Channel] = {}
        # Calls and their tasks, by the id of SGLang's request. A task ends with its call.
        self._calls: dict[str, _InFlight] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        # The followers of calls that have not come yet, by the id of the call.
        self._awaited: dict[str, list[Follower]] = {}
        self._has_failed = False
        engine.handle(WrittenTokens, self._take)

    def in_flight(self) -> dict[str, int]:
        """Return counts that are 0 in an idle process without streams and clients that listen."""
        return {
            "heard_calls": len(self._tasks),
            "channels": len(self._channels),
            "awaited_calls": len(self._awaited),
        }

    def follow(self, follower: Follower) -> None:
        """Tell a follower the text of its call, from its beginning, once the call has come."""
        same = (call for call in self._calls.values() if call.heard.id == follower.call_id)
        if (call := next(same, None)) is None:
            self._awaited.setdefault(follower.call_id, []).append(follower)
            return
        call.followers.append(follower)
        for line in call.lines:
            follower.note(line.get("content", ""))
        self._hear(call)

    def unfollow(self, follower: Follower) -> None:
        """Stop a follower."""
        follower.stop()
        awaiting = self._awaited.get(follower.call_id, [])
        if follower in awaiting:
            awaiting.remove(follower)
        if not awaiting:
            self._awaited.pop(follower.call_id, None)

    def listen(self, channel_id: str | None) -> AsyncGenerator[bytes]:
        """Return the lines of a channel, which is open from the first one on.

        An older channel of the same id is closed.

        Raises: MalformedRequest if this is no id of a channel.
        """
        if channel_id is None or not _CHANNEL_ID.fullmatch(channel_id):
            raise MalformedRequest(
                f"{CHANNEL_HEADER} must have 16 hexadecimal digits in lower case, "
                "with which the ids of the calls begin."
            )
        return self._listen(channel_id)

    async def _listen(self, channel_id: str) -> AsyncGenerator[bytes]:
        if (older := self._channels.get(channel_id)) is not None:
            older.close()
        channel = self._channels[channel_id] = Channel()
        for call in self._calls.values():
            if call.channel == channel_id:
                # Without a channel, the call's lines were told to a stream only.
                for line in () if call.has_channel else call.lines:
                    channel.tell(line)
                call.has_channel = True
                self._hear(call)
        try:
            async with aclosing(channel.lines()) as lines:
                async for line in lines:
                    yield line
        finally:
            if self._channels.get(channel_id) is channel:
                del self._channels[channel_id]

    def watch(self, obj: Any, http_request: Any, outputs: AsyncGenerator[Any]) -> Any:
        """Return the outputs of a ``GenerateReqInput`` as they are, and let its channel hear it."""
        call_id = _id_of(obj, http_request)
        is_one = call_id is not None and asked.has_one_answer(obj)
        if not is_one or not asked.decodes(obj) or self._engine.role == "prefill":
            return outputs
        return self._watch(obj, str(call_id), outputs)

    async def _watch(
        self, obj: Any, call_id: str, outputs: AsyncGenerator[Any]
    ) -> AsyncGenerator[Any]:
        # SGLang makes such an id itself a little later.
        obj.rid = obj.rid or uuid.uuid4().hex
        written = (
            None if obj.stream else WrittenText(partial(self._decode_for, obj.sampling_params))
        )
        heard = HeardCall(call_id, written, in_pieces=self._engine.streams_pieces(_streamed(obj)))
        call = _InFlight(heard, obj, rendering.served.get())
        # SGLang refuses a second request of the same id.
        is_first = self._calls.setdefault(obj.rid, call) is call
        if is_first:
            call.followers = self._awaited.pop(call_id, [])
            call.has_channel = call.channel in self._channels
            if call.followers or call.has_channel:
                self._hear(call)
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    # SGLang's outputs for beams and several answers have another form.
                    if isinstance(output, dict) and "meta_info" in output:
                        heard.note_output(output)
                    yield output
        finally:
            heard.end()
            if is_first:
                del self._calls[obj.rid]
                if call.is_heard:
                    self._tell_scheduler(HearAnswers(ended=(obj.rid,)), call)

    def _hear(self, call: _InFlight) -> None:
        rid = call.request.rid
        if not call.is_heard:
            call.is_heard = True
            self._tell_scheduler(HearAnswers(begun=(rid,)), call)
            task = self._tasks[rid] = asyncio.create_task(self._run(call), name=f"hear {rid}")
            task.add_done_callback(lambda _: self._tasks.pop(rid))

    async def _run(self, call: _InFlight) -> None:
        try:
            await call.heard.run(self._events(call), partial(self._tell, call))
        except Exception as error:
            # SGLang's parsers may raise anything. The answer itself goes on.
            log = logger.debug if self._has_failed else logger.warning
            self._has_failed = True
            log("An answer is not heard to its end: %s: %s", type(error).__name__, error)
            self._tell(call, {"call": call.heard.id, "end": None})

    def _tell(self, call: _InFlight, line: dict[str, Any]) -> None:
        add_line(call.lines, line)
        for follower in call.followers:
            follower.note(line.get("content", ""))
        if (channel := self._channels.get(call.channel)) is not None:
            channel.tell(line)

    def _events(self, call: _InFlight) -> AsyncGenerator[str] | None:
        """Return SGLang's events of the call as a streamed chat; ``None`` if it is no chat."""
        if not hasattr(call.chat, "messages"):
            return None
        from sglang.srt.entrypoints.openai.protocol import StreamOptions

        changes: dict[str, Any] = {
            name: False for name in type(call.chat).model_fields if name.startswith("return_")
        }
        changes |= {
            "stream": True,
            "logprobs": False,
            "stream_options": StreamOptions(include_usage=True),
        }
        request = _streamed(call.request)
        setattr(request, _HEARD, call.heard)
        return self._handlers.openai_serving_chat._generate_chat_stream(
            request, call.chat.model_copy(update=changes), None
        )

    def _take(self, message: WrittenTokens) -> None:
        for rid, ids, prompt_tokens in message.answers:
            if (call := self._calls.get(rid)) is not None:
                call.heard.note_tokens(ids, prompt_tokens)

    def _tell_scheduler(self, message: HearAnswers, call: _InFlight) -> None:
        """Begin or end hearing a whole answer. SGLang streams a streamed answer anyway."""
        if not call.request.stream:
            self._engine.send(message)

    def _decode_for(self, sampling_params: Any, ids: Sequence[int]) -> str:
        params = sampling_params or {}
        return self._decode(
            [*ids],
            skip_special_tokens=params.get("skip_special_tokens", True),
            spaces_between_special_tokens=params.get("spaces_between_special_tokens", True),
        )


def heard_outputs(obj: Any) -> AsyncGenerator[dict[str, Any]] | None:
    """Return the outputs for SGLang's streaming code in the place of a request's own outputs."""
    heard: HeardCall | None = getattr(obj, _HEARD, None)
    return heard.outputs() if heard is not None else None


def _streamed(obj: Any) -> Any:
    """Return a copy of a request that is streamed."""
    request = copy(obj)
    request.stream = True
    return request


def _id_of(obj: Any, http_request: Any) -> str | None:
    """Return the id in a call's header; ``None`` if there is no id, or the call is a batch.

    A front end that calls the engine in its own process, as Dynamo, makes the call's id the id of
    SGLang's request.
    """
    if not hasattr(obj, "stream") or asked.is_list(obj) or isinstance(obj.rid, list):
        return None
    return read_id(obj.rid if http_request is None else http_request.headers.get(CALL_HEADER))


def read_id(named: str | None) -> str | None:
    """Return the id of a call in its usual form; ``None`` if the text is no id."""
    call_id = (named or "").replace("-", "").lower()
    return call_id if _CALL_ID.fullmatch(call_id) else None
