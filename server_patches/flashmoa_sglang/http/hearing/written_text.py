"""``WrittenText``: the text of tokens that arrive one by one."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

# Decoders return this character in the place of an incomplete one.
_INCOMPLETE = "\ufffd"


class WrittenText:
    """Detokenises an answer while it is being written, as SGLang's detokenizer does.

    Tokens after the last complete character are decoded together with the tokens before them,
    because a tokenizer may decode a token differently at the beginning of a text.

    Args: decode: returns the text of token ids.

    Attributes:
        text: the text so far, up to its last complete character.
        tokens: number of the answer's tokens so far.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self.text = ""
        self.tokens = 0
        self._decode = decode
        # The tokens before the new tokens, which are decoded again, and the tokens without a text.
        self._ids = array("q")
        self._context = 0

    def add(self, ids: bytes, prompt_tokens: int) -> None:
        """Add the next tokens.

        Args:
            ids: the bytes of an ``array("q")``.
            prompt_tokens: the number of tokens at their beginning that end the prompt.
        """
        new = array("q", ids)
        self.tokens += len(new) - prompt_tokens
        self._ids.extend(new)
        self._context += prompt_tokens
        context = self._decode(self._ids[: self._context])
        text = self._decode(self._ids)[len(context) :]
        if text and not text.endswith(_INCOMPLETE):
            self.text += text
            del self._ids[: self._context]
            self._context = len(self._ids)
