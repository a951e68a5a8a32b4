"""``PromptReader``: the tokens of the prompts in bodies, refused if the engine cannot take them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashmoa_sglang.http.client_requests import check_ids
from flashmoa_sglang.http.errors import MalformedRequest, PromptTooLarge
from flashmoa_sglang.http.token_buffer import CanonicalTokenizer, TokenBuffer

if TYPE_CHECKING:
    from flashmoa_sglang.http.bodies import Prompt
    from flashmoa_sglang.http.engine import Engine
    from flashmoa_sglang.http.rendering import ChatRenderer, RenderedPrompt


class PromptReader:
    """Reads prompts of text, token ids or messages.

    Args:
        characters_per_token: a text with more characters for each token of the longest prompt is
            refused before it is tokenised.

    Raises: its methods raise MalformedRequest and PromptTooLarge.
    """

    def __init__(self, engine: Engine, renderer: ChatRenderer, characters_per_token: int) -> None:
        self._engine = engine
        self._renderer = renderer
        self._characters_per_token = characters_per_token

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Return the tokens of a prompt, however many they are."""
        if prompt.one_of("messages") == "input_ids":
            return self.check_ids(prompt.input_ids or [])
        buffer, text = self.new_buffer(prompt)
        self.check_characters(text)
        buffer.append(text)
        return buffer.all_tokens()

    def new_buffer(self, prompt: Prompt) -> tuple[TokenBuffer, str]:
        """Return an empty buffer for a prompt of text or messages, and the text to append first."""
        tokenizer = self.require_tokenizer()
        if prompt.messages is not None:
            return self.render(prompt).new_buffer(tokenizer)
        return TokenBuffer(tokenizer, prompt.add_special_tokens), prompt.text or ""

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
        try:
            check_ids(ids, self._engine.vocabulary, name)
        except ValueError as error:
            raise MalformedRequest(str(error)) from error
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

    def check_room(self, tokens: int) -> None:
        room = self._engine.max_prompt_tokens
        if tokens > room:
            raise PromptTooLarge(
                f"The prompt has {tokens} tokens; this server takes at most {room}. Shorten it.",
                max_tokens=room,
            )
