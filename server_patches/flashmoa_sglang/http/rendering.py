"""The prompt text SGLang's own chat path would build, without tokenising it.

SGLang renders and encodes in one method. The plugin wraps the tokenizer's ``encode``: during
a render the text is caught there; for a request with a prompt stream the stream's tokens are
used; otherwise nothing changes.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from flashmoa_sglang.http import stream_requests
from flashmoa_sglang.http.errors import MalformedRequest
from flashmoa_sglang.http.token_buffer import Sealed, TokenBuffer
from flashmoa_sglang.releases import RELEASE

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashmoa_sglang.http.token_buffer import CanonicalTokenizer


class Piece(NamedTuple):
    """Text that SGLang encodes on its own, and whether special tokens are added to it."""

    text: str
    special: bool


@dataclass(slots=True)
class Rendered:
    """A rendered prompt: one piece, or a second one that the model is to continue."""

    pieces: list[Piece] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    def buffer(self, tokenizer: CanonicalTokenizer) -> tuple[TokenBuffer, str]:
        """Make a buffer for the last piece, behind the others; return it with that piece's text."""
        *before, last = self.pieces or [Piece("", False)]
        if not before:
            return TokenBuffer(tokenizer, last.special), last.text
        tokens = [token for piece in before for token in tokenizer.encode(*piece)]
        head = Sealed("".join(piece.text for piece in before), before[0].special, tokens)
        return TokenBuffer(tokenizer, last.special, head), last.text


_capture: ContextVar[Rendered | None] = ContextVar("flashmoa_capture", default=None)


def wrap_encode(tokenizer: Any) -> None:
    """Replace ``tokenizer.encode`` on this instance."""
    RELEASE.render_before_encoding(tokenizer)
    original: Callable[..., list[int]] = tokenizer.encode

    def encode(text: Any, *args: Any, **kwargs: Any) -> list[int]:
        special = kwargs.get("add_special_tokens", True)
        rendered = _capture.get()
        if rendered is not None and isinstance(text, str):
            rendered.pieces.append(Piece(text, special))
            return []
        final = stream_requests.current()
        if final is not None and isinstance(text, str):
            ids = final.encode(text, special)
            if ids is not None:
                return ids
        return original(text, *args, **kwargs)

    tokenizer.encode = encode


class ChatRenderer:
    """Renders chat messages with the server's own template and arguments."""

    def __init__(self, chat: Callable[[], Any]) -> None:
        self._chat = chat

    def render(self, body: dict[str, Any]) -> Rendered:
        """Render ``messages`` (with ``tools``, ``chat_template_kwargs``, ...).

        Raises:
            MalformedRequest: not a chat request, or the template refuses it.
        """
        from pydantic import ValidationError
        from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

        chat = self._chat()
        try:
            request = ChatCompletionRequest(**body)
        except (ValidationError, TypeError) as error:
            raise MalformedRequest(f"Not a chat request: {_short(error)}") from error
        if getattr(request, "input_ids", None) is not None:
            raise MalformedRequest("messages cannot be combined with input_ids.")
        problem = chat._validate_request(request)
        if problem:
            raise MalformedRequest(problem)
        rendered = Rendered()
        token = _capture.set(rendered)
        try:
            result = chat._process_messages(request, is_multimodal=False)
        except Exception as error:
            # Templates raise whatever they like at messages they do not take.
            raise MalformedRequest(
                f"The chat template refuses these messages: {_short(error)}"
            ) from error
        finally:
            _capture.reset(token)
        if result.image_data or result.video_data or result.audio_data:
            raise MalformedRequest(
                "Only text can be rendered; send images with the request itself."
            )
        if not rendered.pieces:
            raise MalformedRequest(
                "This model's chat template makes tokens and no text; send input_ids."
            )
        return rendered


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:500]
