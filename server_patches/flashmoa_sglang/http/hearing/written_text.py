"""``WrittenText``: the text of tokens that arrive one by one."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

# What a decoder returns for a character of which bytes are missing.
_INCOMPLETE = "\ufffd"


class WrittenText:
    """Detokenises an answer while it is being written, as SGLang's detokenizer does.

    Tokens after the last complete character are decoded together with the tokens before them,
    because a tokenizer may decode a token in another way at the beginning of a text.

    Args: decode: returns the text of token ids.

    Attributes:
        text: the text so far, without a character at its end of which bytes are missing.
        tokens: number of tokens of the answer so far.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self.text = ""
        self.tokens = 0
        self._decode = decode
        # Tokens that are decoded again: the context, and then what has no text yet.
        self._ids = array("q")
        self._context = 0

    def add(self, ids: bytes, prompt_tokens: int) -> None:
        """Add the next tokens.

        Args:
            ids: the bytes of an ``array("q")``.
            prompt_tokens: how many of them are not of the answer, but the prompt's last tokens.
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
