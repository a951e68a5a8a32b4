"""Renders chats to text as SGLang does, without tokenising them.

SGLang renders and encodes a chat in one method, so the plugin wraps the tokenizer's ``encode`` and
SGLang's own encoders of chats. While ``ChatRenderer.render`` runs, the wrappers record the text and
encode nothing; for a request with a prompt stream they take the stream's tokens; otherwise they
call the original.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import ValidationError

from flashmoa_sglang.http import client_requests
from flashmoa_sglang.http.errors import MalformedRequest, explain
from flashmoa_sglang.http.sent_answers import Chat, Responses
from flashmoa_sglang.http.tokens.token_buffer import EncodedHead, TokenBuffer
from flashmoa_sglang.sglang.releases import RELEASE

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from flashmoa_sglang.http.sent_answers import Part, SentAnswer
    from flashmoa_sglang.http.tokens.token_buffer import CanonicalTokenizer


class Piece(NamedTuple):
    """Text that SGLang encodes separately, and the ``add_special_tokens`` of that call."""

    text: str
    add_special_tokens: bool


@dataclass(slots=True)
class RenderedPrompt:
    """A rendered prompt.

    With ``continue_final_message`` it has two pieces: the prompt, and the beginning of the answer.
    Otherwise it has one.
    """

    pieces: list[Piece] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    def new_buffer(
        self, tokenizer: CanonicalTokenizer, most: int | None = None
    ) -> tuple[TokenBuffer, str]:
        """Return a buffer for text that follows this prompt, and the text to append to it first.

        The last piece is this text. A piece before it becomes the buffer's head.

        Args: most: the head is cut to this number of tokens, or a few more.
        """
        *before, last = self.pieces
        head = None
        if before:
            (prompt,) = before
            tokens = TokenBuffer(tokenizer, prompt.add_special_tokens).all_tokens(prompt.text, most)
            head = EncodedHead(*prompt, tokens)
        return TokenBuffer(tokenizer, last.add_special_tokens, head), last.text


# The prompt that is being rendered in this context, if any.
_rendering: ContextVar[RenderedPrompt | None] = ContextVar("flashmoa_rendering", default=None)


def wrap_encode(tokenizer: Any) -> None:
    """Replace ``tokenizer.encode`` on this instance by the wrapper that the module describes."""
    RELEASE.prepare_tokenizer(tokenizer)
    original: Callable[..., list[int]] = tokenizer.encode

    def encode(text: Any, *args: Any, **kwargs: Any) -> list[int]:
        ids = _encode_here(text, kwargs) if isinstance(text, str) else None
        return original(text, *args, **kwargs) if ids is None else ids

    tokenizer.encode = encode


def encode_chat(
    original: Callable[..., list[int]],
    tokenizer: Any,
    text: str,
    encode_kwargs: dict[str, Any] | None = None,
) -> list[int]:
    """Encode a chat's text; wraps ``RELEASE.CHAT_ENCODER``."""
    ids = _encode_here(text, encode_kwargs or {})
    return original(tokenizer, text, encode_kwargs) if ids is None else ids


def encode_parts(
    original: Callable[..., list[int]],
    tokenizer: Any,
    segments: Sequence[str],
    encode_kwargs: dict[str, Any] | None = None,
) -> list[int]:
    """Encode a chat's text, given its parts; wraps ``RELEASE.PARTS_ENCODER``."""
    ids = _encode_here("".join(segments), encode_kwargs or {})
    return original(tokenizer, segments, encode_kwargs) if ids is None else ids


def _encode_here(text: str, options: dict[str, Any]) -> list[int] | None:
    """Return this context's tokens of a text; ``None`` if the original shall encode it."""
    add_special_tokens = options.get("add_special_tokens", True)
    rendered = _rendering.get()
    if rendered is not None:
        rendered.pieces.append(Piece(text, add_special_tokens))
        return []
    stream_request = client_requests.current.get()
    return stream_request.encode(text, add_special_tokens) if stream_request is not None else None


# The chat request that this context serves, on any route of SGLang.
served: ContextVar[Any] = ContextVar("flashmoa_served_chat", default=None)


def note_served(
    original: Callable[..., Any], chat: Any, request: Any, is_multimodal: bool, **kwargs: Any
) -> Any:
    """Note the chat request that is served; wraps ``OpenAIServingChat._process_messages``.

    For models that take more than text, SGLang keeps the tokens of prompts for later requests, but
    a prompt that is only rendered has no tokens.
    """
    is_rendered = _rendering.get() is not None
    if not is_rendered:
        with suppress(RuntimeError):
            # A thread of a pool has no loop. Its context would keep the request.
            asyncio.get_running_loop()
            served.set(request)
    return original(chat, request, is_multimodal and not is_rendered, **kwargs)


class ChatRenderer:
    """Renders chats with the server's chat template and arguments.

    Args:
        handlers: has SGLang's handlers of its APIs, once they are made.
    """

    def __init__(self, handlers: Any) -> None:
        self._handlers = handlers

    def _chat(self) -> Any:
        return self._handlers.openai_serving_chat

    @property
    def template(self) -> str:
        """The chat template, or its file or its name in SGLang; empty if there is no template."""
        tokenizer_manager = self._chat().tokenizer_manager
        tokenizer = tokenizer_manager.tokenizer
        arguments = RELEASE.resolve_arguments(tokenizer_manager.server_args)
        # SGLang gives the template of a file to the tokenizer.
        return str(getattr(tokenizer, "chat_template", None) or arguments.chat_template or "")

    @property
    def knows_calls(self) -> bool:
        """Whether SGLang was told how the model writes tool calls (``--tool-call-parser``)."""
        # The server may only be imported, while an ``sglang.Engine`` runs.
        if not hasattr(self._handlers, "openai_serving_chat"):
            return False
        chat = self._chat()
        return bool(chat.tool_call_parser) and chat.tokenizer_manager.tokenizer is not None

    def calls_tools(self, ids: Sequence[int]) -> bool:
        """Return whether an answer with these tokens calls tools."""
        from sglang.srt.function_call.function_call_parser import FunctionCallParser

        chat = self._chat()
        text = chat.tokenizer_manager.tokenizer.decode([*ids], skip_special_tokens=False)
        return FunctionCallParser([], chat.tool_call_parser).detector.has_tool_call(text)

    def render(self, body: dict[str, Any]) -> RenderedPrompt:
        """Render the fields of a chat request: ``messages``, ``tools``, ...

        Raises: MalformedRequest if ``body`` is not a chat request of text only, or as
            :func:`_recording`.
        """
        from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

        chat = self._chat()
        try:
            request = ChatCompletionRequest(**body)
        except (ValidationError, TypeError) as error:
            raise MalformedRequest(f"Not a chat request: {_short(error)}") from error
        # SGLang 0.5.12 lacks this field.
        if getattr(request, "input_ids", None) is not None:
            raise MalformedRequest("messages cannot be combined with input_ids; give one of them.")
        problem = chat._validate_request(request)
        if problem:
            raise MalformedRequest(problem)
        return self._render(request)

    def render_with(self, chat: Any, messages: list[Any]) -> RenderedPrompt:
        """Render a ``ChatCompletionRequest`` with further messages. Raises: as :meth:`render`."""
        from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

        try:
            further = ChatCompletionRequest(messages=messages, model=chat.model).messages
        except ValidationError as error:
            raise MalformedRequest(f"Not a chat request: {_short(error)}") from error
        # Templates render a field that is ``None`` and a field that is left out differently.
        update = {"messages": [*chat.messages, *further], "continue_final_message": False}
        return self._render(chat.model_copy(update=update))

    def _render(self, request: Any) -> RenderedPrompt:
        with _recording() as rendered:
            result = self._chat()._process_messages(request, is_multimodal=False)
        if result.image_data or result.video_data or result.audio_data:
            raise MalformedRequest(
                "Only text can be rendered; send images with the request itself."
            )
        return rendered

    def read_parts(self, api: type[SentAnswer], parts: list[Part]) -> list[dict[str, Any]]:
        """Return SGLang's chat messages for an answer's parts that a client sends back."""
        from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
        from sglang.srt.entrypoints.openai.protocol import ResponsesRequest

        if api is Chat:
            return parts
        if api is Responses:
            return self._handlers.openai_serving_responses._construct_input_messages(
                ResponsesRequest(input=parts), None
            )
        answer: Any = {"role": "assistant", "content": parts}
        request = AnthropicMessagesRequest(model="m", max_tokens=1, messages=[answer])
        chat = self._handlers.anthropic_serving._convert_to_chat_completion_request(request)
        return [message.model_dump(exclude_none=True) for message in chat.messages]

    async def render_response(self, request: Any) -> RenderedPrompt:
        """Render a ``ResponsesRequest``, which SGLang turns into a chat.

        Raises: MalformedRequest if its prompt depends on more than the request, or as
            :func:`_recording`.
        """
        if request.previous_response_id is not None:
            raise MalformedRequest(
                "A request with previous_response_id has a prompt that is stored; send the whole "
                "input."
            )
        # SGLang lacks this handler without the package openai_harmony.
        responses = getattr(self._handlers, "openai_serving_responses", None)
        if responses is None or responses.use_harmony:
            raise MalformedRequest(
                "This server renders no requests of the Responses API as text; send input_ids."
            )
        with _recording() as rendered:
            await responses._make_request(request, None, responses.tokenizer_manager.tokenizer)
        return rendered


@contextmanager
def _recording() -> Generator[RenderedPrompt]:
    """Record the prompt that SGLang renders in this context, instead of encoding it.

    Raises: MalformedRequest if the chat template refuses it or does not produce text.
    """
    rendered = RenderedPrompt()
    token = _rendering.set(rendered)
    try:
        yield rendered
    except Exception as error:
        # A template is a program, and may raise any exception for messages that it refuses.
        raise MalformedRequest(
            f"The chat template refuses these messages: {_short(error)}"
        ) from error
    finally:
        _rendering.reset(token)
    if not rendered.pieces:
        raise MalformedRequest(
            "This model's chat template is encoded directly to tokens, so there is no text to "
            "render; send input_ids."
        )


def _short(error: Exception) -> str:
    text = explain(error) if isinstance(error, ValidationError) else str(error)
    return " ".join(text.split())[:500]
