"""Turn the prompts of requests into blocks (`PromptHasher`), which is all that policies see."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, cast

import httpx

from flashmoa.router.blocks import Blocks, text_blocks, token_blocks

# The fields of a chat request that shape its prompt and that SGLang's /tokenize accepts.
_CHAT_FIELDS = (
    "model",
    "messages",
    "tools",
    "tool_choice",
    "reasoning_effort",
    "continue_final_message",
    "chat_template_kwargs",
)
_TOKENIZE = "/v1/tokenize"
_TOKENIZE_SECONDS = 5.0


class PromptHasher:
    """Turns prompts into blocks of tokens, for which it asks engines, and remembers them.

    If an engine does not tokenise, or not in time, or a prompt contains more than text, the blocks
    are those of the text, so that requests with the same beginning still match.

    Args:
        tokenize: returns whether to ask engines at all.
        max_remembered: the most blocks of prompts that are remembered.
    """

    def __init__(
        self, http: httpx.AsyncClient, tokenize: Callable[[], bool], max_remembered: int = 1 << 20
    ) -> None:
        self._http = http
        self._max_remembered = max_remembered
        self._tokenize = tokenize
        # The keys are digests of the prompts, because prompts are long.
        self._remembered: OrderedDict[bytes, Blocks] = OrderedDict()
        # The number of remembered blocks plus the number of prompts.
        self._remembered_size = 0
        # Engines that have no route for tokenising.
        self._untokenizing: set[str] = set()

    async def blocks(
        self, body: Mapping[str, Any], engine: str, headers: Mapping[str, str]
    ) -> Blocks:
        """Return the blocks of the prompt in a request's body.

        Args:
            engine: URL of the engine that is asked to tokenise the prompt.
            headers: the client's API key.
        """
        salt = _salt(body)
        if (tokens := _token_ids(body)) is not None:
            return token_blocks(tokens, salt=salt)
        question = _tokenize_body(body)
        key = blake2b(json.dumps([question, salt]).encode(), digest_size=16).digest()
        if (remembered := self._remembered.get(key)) is not None:
            self._remembered.move_to_end(key)
            return remembered
        if (tokens := await self._ask_tokens(question, engine, headers)) is None:
            return text_blocks(_text(question), salt=salt)
        return self._remember(key, token_blocks(tokens, salt=salt))

    def known_blocks(self, body: Mapping[str, Any]) -> Blocks:
        """Return the blocks of a prompt without asking an engine.

        They have only the prompt's length if other prompts' blocks come from engines' tokens, since
        hashes of text would match none of those.
        """
        salt = _salt(body)
        if (tokens := _token_ids(body)) is not None:
            return token_blocks(tokens, salt=salt)
        blocks = text_blocks(_text(_tokenize_body(body)), salt=salt)
        return Blocks((), blocks.length) if self._tokenize() else blocks

    def _remember(self, key: bytes, blocks: Blocks) -> Blocks:
        if key not in self._remembered:  # Another request may have asked for the same prompt.
            self._remembered[key] = blocks
            self._remembered_size += 1 + len(blocks.hashes)
        while self._remembered_size > self._max_remembered:
            _, oldest = self._remembered.popitem(last=False)
            self._remembered_size -= 1 + len(oldest.hashes)
        return blocks

    def forget(self, engine: str) -> None:
        """Forget whether an engine tokenises: another engine may now run at its address."""
        self._untokenizing.discard(engine)

    async def _ask_tokens(
        self, question: Mapping[str, Any], engine: str, headers: Mapping[str, str]
    ) -> list[int] | None:
        if not question or engine in self._untokenizing or not self._tokenize():
            return None
        try:
            answer = await self._http.post(
                engine + _TOKENIZE, json=question, headers=dict(headers), timeout=_TOKENIZE_SECONDS
            )
            if answer.status_code in (404, 405):
                self._untokenizing.add(engine)
            tokens: Any = answer.json()["tokens"] if answer.is_success else None
            return tokens if _are_token_ids(tokens) else None
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return None


def _tokenize_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of a request to ``/v1/tokenize``; empty if a request has no prompt."""
    if body.get("messages") is not None:
        return {name: body[name] for name in _CHAT_FIELDS if body.get(name) is not None}
    # /v1/embeddings has its prompt in ``input``, which may be several texts.
    text = _join_texts(body.get("text", body.get("prompt", _scoring_list(body))))
    if text is None:
        return {}
    question: dict[str, Any] = {"prompt": text}
    if isinstance(body.get("add_special_tokens"), bool):
        question["add_special_tokens"] = body["add_special_tokens"]
    return question


def _scoring_list(body: Mapping[str, Any]) -> object:
    """Return what the prompts of a list share, followed by its items: a query, or labels.

    The engine puts each item into a prompt after that and computes that only once, so the whole
    list is about as much work as one prompt.
    """
    if "input" in body:
        labels = body.get("labels")
        return body["input"] if labels is None else [*_as_list(labels), *_as_list(body["input"])]
    items = body.get("items", body.get("documents"))
    return [body.get("query"), *(_as_list(items) if items is not None else [])]


def _as_list(value: object) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else [value]


def _join_texts(text: object) -> str | None:
    """Return a text, or several texts as one; ``None`` for anything else.

    A text may be the ``text`` of an object, as the documents of Cohere and Jina are.
    """
    if not isinstance(text, list):
        return text if isinstance(text, str) else None
    texts: list[str] = []
    for item in cast("list[Any]", text):
        part: Any = cast("dict[str, Any]", item).get("text") if isinstance(item, dict) else item
        if not isinstance(part, str):
            return None
        texts.append(part)
    return "".join(texts)


def _text(question: Mapping[str, Any]) -> str:
    if isinstance(question.get("prompt"), str):
        return str(question["prompt"])
    # Chat templates render tools and messages roughly in this order.
    return json.dumps([question.get("tools"), question.get("messages")]) if question else ""


def _token_ids(body: Mapping[str, Any]) -> Sequence[int] | None:
    """Return the prompt's token ids if the request contains them."""
    for name in ("input_ids", "prompt", "input"):
        if _are_token_ids(body.get(name)):
            return body[name]
    parts = _as_list(_scoring_list(body))
    if all(_are_token_ids(part) for part in parts):
        return [token for part in parts for token in part]
    return None


def _are_token_ids(value: object) -> bool:
    """Return whether a value is the token ids of one prompt, small enough to be hashed."""
    if not isinstance(value, list):
        return False
    return all(type(item) is int and 0 <= item < 1 << 32 for item in cast("list[Any]", value))


def _salt(body: Mapping[str, Any]) -> str:
    salt = body.get("cache_salt", body.get("extra_key"))
    return salt if isinstance(salt, str) else ""
