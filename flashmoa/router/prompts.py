"""The prompts of requests as blocks, which is what the router knows of a request's content."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, cast

import httpx

from flashmoa.router.blocks import Blocks, text_blocks, token_blocks

# The fields of a chat request that shape its prompt and that SGLang's /tokenize takes.
_CHAT = (
    "model",
    "messages",
    "tools",
    "tool_choice",
    "reasoning_effort",
    "continue_final_message",
    "chat_template_kwargs",
)
_TOKENIZE = "/v1/tokenize"
_SECONDS = 5.0


class PromptHasher:
    """Turns prompts into blocks of tokens, which engines tokenise and the router remembers.

    Where an engine does not tokenise, or not in time, and for prompts with more than text, the
    blocks are those of the text: requests with the same beginning still meet.

    Args:
        tokenize: tells whether to ask engines at all.
        max_remembered: the most blocks of prompts that are remembered.
    """

    def __init__(
        self, http: httpx.AsyncClient, tokenize: Callable[[], bool], max_remembered: int = 1 << 20
    ) -> None:
        self._http = http
        self._max_remembered = max_remembered
        self._tokenize = tokenize
        # By a digest, because prompts are long.
        self._known: OrderedDict[bytes, Blocks] = OrderedDict()
        self._held = 0
        # Engines without such a route.
        self._untokenizing: set[str] = set()

    async def blocks(
        self, body: Mapping[str, Any], engine: str, headers: Mapping[str, str]
    ) -> Blocks:
        """Return the prompt of a request's body.

        Args:
            engine: is asked to tokenise it, under the client's ``headers``.
        """
        salt = _salt(body)
        if (tokens := _token_ids(body)) is not None:
            return token_blocks(tokens, salt=salt)
        question = _question(body)
        key = blake2b(json.dumps([question, salt]).encode(), digest_size=16).digest()
        if (known := self._known.get(key)) is not None:
            self._known.move_to_end(key)
            return known
        if (tokens := await self._tokens(question, engine, headers)) is None:
            return text_blocks(_text(question), salt=salt)
        return self._remember(key, token_blocks(tokens, salt=salt))

    def known_blocks(self, body: Mapping[str, Any]) -> Blocks:
        """Return the prompt without asking an engine: only its length, if that would be needed."""
        salt = _salt(body)
        if (tokens := _token_ids(body)) is not None:
            return token_blocks(tokens, salt=salt)
        blocks = text_blocks(_text(_question(body)), salt=salt)
        return Blocks((), blocks.length) if self._tokenize() else blocks

    def _remember(self, key: bytes, blocks: Blocks) -> Blocks:
        if key not in self._known:  # Another request may have asked the same meanwhile.
            self._known[key] = blocks
            self._held += 1 + len(blocks.hashes)
        while self._held > self._max_remembered:
            _, forgotten = self._known.popitem(last=False)
            self._held -= 1 + len(forgotten.hashes)
        return blocks

    def forget(self, engine: str) -> None:
        """Ask an engine again whether it tokenises: a different one may run at its address now."""
        self._untokenizing.discard(engine)

    async def _tokens(
        self, question: Mapping[str, Any], engine: str, headers: Mapping[str, str]
    ) -> list[int] | None:
        if not question or engine in self._untokenizing or not self._tokenize():
            return None
        try:
            answer = await self._http.post(
                engine + _TOKENIZE, json=question, headers=dict(headers), timeout=_SECONDS
            )
            if answer.status_code in (404, 405):
                self._untokenizing.add(engine)
            tokens: Any = answer.json()["tokens"] if answer.is_success else None
            return tokens if _are_ids(tokens) else None
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return None


def _question(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return what to ask ``/v1/tokenize`` about a body; nothing where it has no prompt."""
    if body.get("messages") is not None:
        return {name: body[name] for name in _CHAT if body.get(name) is not None}
    # ``input`` is that of /v1/embeddings and /v1/classify, which may be several texts.
    text = _joined(body.get("text", body.get("prompt", body.get("input", _scored(body)))))
    if text is None:
        return {}
    question: dict[str, Any] = {"prompt": text}
    if isinstance(body.get("add_special_tokens"), bool):
        question["add_special_tokens"] = body["add_special_tokens"]
    return question


def _scored(body: Mapping[str, Any]) -> list[Any]:
    """Return the query of /v1/score or /v1/rerank, and the items that each follow it in a prompt.

    The query is computed once, so all of it together is about as much work as one prompt.
    """
    items = body.get("items", body.get("documents"))
    query = body.get("query")
    return [query, *(cast("list[Any]", items) if isinstance(items, list) else [items])]


def _joined(text: object) -> str | None:
    """Return a text, or several texts as one; ``None`` for anything else."""
    if isinstance(text, list) and all(isinstance(one, str) for one in cast("list[Any]", text)):
        return "".join(cast("list[str]", text))
    return text if isinstance(text, str) else None


def _text(question: Mapping[str, Any]) -> str:
    if isinstance(question.get("prompt"), str):
        return str(question["prompt"])
    # Chat templates use them roughly in this order.
    return json.dumps([question.get("tools"), question.get("messages")]) if question else ""


def _token_ids(body: Mapping[str, Any]) -> Sequence[int] | None:
    for name in ("input_ids", "prompt", "input"):
        if _are_ids(body.get(name)):
            return body[name]
    scored = _scored(body)
    if all(_are_ids(one) for one in scored):
        return [token for one in scored for token in one]
    return None


def _are_ids(value: object) -> bool:
    """Return whether a value is the token ids of one prompt, small enough to be hashed."""
    if not isinstance(value, list):
        return False
    return all(type(one) is int and 0 <= one < 1 << 32 for one in cast("list[Any]", value))


def _salt(body: Mapping[str, Any]) -> str:
    given = body.get("cache_salt", body.get("extra_key"))
    return given if isinstance(given, str) else ""
