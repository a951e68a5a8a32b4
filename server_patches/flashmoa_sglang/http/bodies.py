"""The request bodies of the plugin's routes, and the reader of their prompts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, Field, StrictInt, StrictStr, ValidationError
from pydantic_core import from_json

from flashmoa_sglang.http.errors import MalformedRequest, PromptTooLarge, explain
from flashmoa_sglang.http.guard import check_ids
from flashmoa_sglang.http.hints import LARGEST_NUMBER
from flashmoa_sglang.http.rendering import Piece, RenderedPrompt
from flashmoa_sglang.http.stream import Terms
from flashmoa_sglang.http.tokens.token_buffer import tokenize_aside

if TYPE_CHECKING:
    from flashmoa_sglang.http.engine import Engine
    from flashmoa_sglang.http.rendering import ChatRenderer
    from flashmoa_sglang.http.tokens.token_buffer import CanonicalTokenizer, TokenBuffer

T = TypeVar("T", bound=BaseModel)


class _Piece(BaseModel, extra="forbid"):
    """Part of a prompt: text or token ids."""

    text: StrictStr | None = None
    input_ids: list[StrictInt] | None = None

    def one_of(self, *others: str) -> str:
        """Return which of ``text``, ``input_ids`` and ``others`` is set.

        Raises: MalformedRequest if none or several are set.
        """
        names = ["text", "input_ids", *others]
        set_names = [name for name in names if getattr(self, name) is not None]
        if len(set_names) != 1:
            raise MalformedRequest(
                f"Give exactly one of {', '.join(names)}; got {set_names or 'none'}."
            )
        return set_names[0]


class Target(BaseModel):
    """The model and adapter that compute a request, its priority, and the namespace of its KV."""

    model: StrictStr | None = None
    cache_salt: StrictStr | None = None
    extra_key: StrictStr | None = None
    lora_path: StrictStr | None = None
    priority: StrictInt | None = Field(default=None, ge=-LARGEST_NUMBER, le=LARGEST_NUMBER)

    def terms(self, served: str) -> Terms:
        """Return the fields that SGLang needs besides the tokens.

        An adapter in ``model`` ("base:adapter", as in SGLang's chats) counts before ``lora_path``.

        Args: served: the name of the served model, which may contain a colon itself.
        """
        model = (self.model or "").removeprefix(served)
        adapter = model.partition(":")[2].strip()
        return Terms(
            self.priority,
            self.cache_salt or None,
            self.extra_key or None,
            adapter or self.lora_path or None,
        )


class _ChatFields(BaseModel):
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: StrictStr | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: StrictStr | float | None = None
    reasoning: Any = None
    thinking: Any = None
    task: StrictStr | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None


class Prompt(_Piece, Target, _ChatFields):
    """A whole prompt, or its first piece.

    ``add_special_tokens`` is ``false`` for text that a chat template has rendered, because the
    template has written them.
    """

    add_special_tokens: bool = True

    def chat_fields(self) -> dict[str, Any]:
        return self.model_dump(include={"model", *_ChatFields.model_fields}, exclude_none=True)


class OpenStream(Prompt):
    ttl_seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    expected_output_tokens: StrictInt | None = Field(default=None, ge=0, le=LARGEST_NUMBER)

    def terms(self, served: str) -> Terms:
        return replace(super().terms(served), expected_output=self.expected_output_tokens)


class Append(_Piece):
    """More of a prompt stream.

    ``start`` is the number of characters of its text that stay; the new text follows them.
    ``call`` is the id of a call whose text the stream gets.
    """

    seq: StrictInt = Field(ge=0, le=LARGEST_NUMBER)
    call: StrictStr | None = None
    start: StrictInt | None = Field(default=None, ge=0, le=LARGEST_NUMBER)
    end: bool = False


async def parse(request: Request, model: type[T]) -> T:
    """Read a request's body. Raises: MalformedRequest if it does not fit the model."""
    try:
        # This parser refuses NaN and text that is not Unicode, which SGLang's parser accepts.
        fields = from_json(await request.body(), allow_inf_nan=False)
    except ValueError as error:
        raise MalformedRequest(f"The body is not JSON: {error}.") from error
    if not isinstance(fields, dict):
        raise MalformedRequest("The body must be a JSON object.")
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise MalformedRequest(explain(error)) from error


class PromptReader:
    """Reads prompts of text, token ids or messages.

    Args: characters_per_token: as in ``Limits``.

    Its methods raise MalformedRequest and PromptTooLarge.
    """

    def __init__(self, engine: Engine, renderer: ChatRenderer, characters_per_token: int) -> None:
        self._engine = engine
        self._renderer = renderer
        self._characters_per_token = characters_per_token

    async def tokenize(self, prompt: Prompt) -> list[int]:
        """Return the tokens of a prompt."""
        if prompt.one_of("messages") == "input_ids":
            return self.check_ids(prompt.input_ids or [])
        buffer, text = await self.new_buffer(prompt)
        work = partial(buffer.all_tokens, text, self._engine.max_prompt_tokens)
        ids = await tokenize_aside(len(text), work)
        self.check_room(len(ids), may_be_more=True)
        return ids

    async def new_buffer(self, prompt: Prompt) -> tuple[TokenBuffer, str]:
        """Return an empty buffer for a prompt of text or messages, and the text to append first."""
        tokenizer = self.require_tokenizer()
        if prompt.messages is not None:
            rendered = self.render(prompt)
        else:
            rendered = RenderedPrompt([Piece(prompt.text or "", prompt.add_special_tokens)])
        text = rendered.text
        self.check_characters(text)
        # The new buffer tokenises all pieces before the last one.
        work = partial(rendered.new_buffer, tokenizer, self._engine.max_prompt_tokens)
        buffer, last = await tokenize_aside(len(text) - len(rendered.pieces[-1].text), work)
        self.check_room(len(buffer.tokens), may_be_more=True)
        return buffer, last

    def render(self, prompt: Prompt) -> RenderedPrompt:
        self.require_tokenizer()
        return self._renderer.render(prompt.chat_fields())

    def require_tokenizer(self) -> CanonicalTokenizer:
        """Return the engine's tokenizer; refuse the request if there is none."""
        if self._engine.tokenizer is None:
            raise MalformedRequest("This server has no tokenizer for text prompts; send input_ids.")
        return self._engine.tokenizer

    def check_ids(self, ids: list[int], name: str = "input_ids") -> list[int]:
        """Return ``ids``; refuse them if one is not in the vocabulary."""
        check_ids(ids, self._engine.vocabulary, name)
        return ids

    def check_characters(self, text: str) -> None:
        """Refuse a text that is certainly too long, before it is tokenised."""
        room = self._engine.max_prompt_tokens
        if len(text) > room * self._characters_per_token:
            raise PromptTooLarge(
                f"The prompt has {len(text)} characters; this server takes at most {room} tokens. "
                "Shorten it.",
                max_tokens=room,
            )

    def check_room(self, tokens: int, may_be_more: bool = False) -> None:
        """Refuse a prompt that is too long. Perhaps only a part of it was tokenised."""
        room = self._engine.max_prompt_tokens
        if tokens > room:
            number = f"at least {tokens}" if may_be_more else tokens
            raise PromptTooLarge(
                f"The prompt has {number} tokens; this server takes at most {room}. Shorten it.",
                max_tokens=room,
            )
