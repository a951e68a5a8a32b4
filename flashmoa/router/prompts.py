"""The prompts of requests, as blocks: what the router knows of a request's content."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, cast

import httpx

from flashmoa.router.blocks import Blocks, text_blocks, token_blocks

# What of a chat request goes into its prompt, and SGLang's /tokenize takes.
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


class Prompts:
    """Has engines tokenise prompts, and remembers what they said.

    Where an engine does not tokenise, or not in time, and for prompts with more than text, the
    blocks are those of the text: requests with the same beginning still meet.

    Args:
        remembered: blocks of prompts, at most.
        tokenize: says whether to ask engines at all.
    """

    def __init__(
        self, http: httpx.AsyncClient, tokenize: Callable[[], bool], remembered: int = 1 << 20
    ) -> None:
        self._http = http
        self._remembered = remembered
        self._tokenize = tokenize
        # By a digest: prompts are long.
        self._known: OrderedDict[bytes, Blocks] = OrderedDict()
        self._held = 0
        # Engines that have no such route.
        self._silent: set[str] = set()

    async def blocks(
        self, body: Mapping[str, Any], engine: str, headers: Mapping[str, str]
    ) -> Blocks:
        """The prompt of a request's body; ``engine``: who is asked, under the client's headers."""
        salt = _salt(body)
        if (tokens := _token_ids(body)) is not None:
            return token_blocks(tokens, salt=salt)
        asked = _question(body)
        key = blake2b(json.dumps([asked, salt]).encode(), digest_size=16).digest()
        if (known := self._known.get(key)) is not None:
            self._known.move_to_end(key)
            return known
        if (tokens := await self._tokens(asked, engine, headers)) is None:
            return text_blocks(_text(asked), salt=salt)
        return self._remember(key, token_blocks(tokens, salt=salt))

    def at_once(self, body: Mapping[str, Any]) -> Blocks:
        """The same without asking; of a prompt that would have to be tokenised, only its length."""
        salt = _salt(body)
        if (tokens := _token_ids(body)) is not None:
            return token_blocks(tokens, salt=salt)
        blocks = text_blocks(_text(_question(body)), salt=salt)
        return Blocks((), blocks.length) if self._tokenize() else blocks

    def _remember(self, key: bytes, blocks: Blocks) -> Blocks:
        if key not in self._known:  # Somebody may have asked the same meanwhile.
            self._known[key] = blocks
            self._held += 1 + len(blocks.hashes)
        while self._held > self._remembered:
            _, forgotten = self._known.popitem(last=False)
            self._held -= 1 + len(forgotten.hashes)
        return blocks

    def forget(self, engine: str) -> None:
        """The engine is another one now, and may tokenise."""
        self._silent.discard(engine)

    async def _tokens(
        self, asked: Mapping[str, Any], engine: str, headers: Mapping[str, str]
    ) -> list[int] | None:
        if not asked or engine in self._silent or not self._tokenize():
            return None
        try:
            answer = await self._http.post(
                engine + _TOKENIZE, json=asked, headers=dict(headers), timeout=_SECONDS
            )
            if answer.status_code in (404, 405):
                self._silent.add(engine)
            tokens: Any = answer.json()["tokens"] if answer.is_success else None
            return tokens if _are_ids(tokens) else None
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return None


def _question(body: Mapping[str, Any]) -> dict[str, Any]:
    """What ``/v1/tokenize`` is asked about a body; nothing where it has no prompt."""
    if body.get("messages") is not None:
        return {name: body[name] for name in _CHAT if body.get(name) is not None}
    # The last is that of /v1/embeddings and /v1/classify, which may be several texts.
    text = _joined(body.get("text", body.get("prompt", body.get("input", _scored(body)))))
    if text is None:
        return {}
    asked: dict[str, Any] = {"prompt": text}
    if isinstance(body.get("add_special_tokens"), bool):
        asked["add_special_tokens"] = body["add_special_tokens"]
    return asked


def _scored(body: Mapping[str, Any]) -> list[Any]:
    """What /v1/score and /v1/rerank are given: a query, and what each prompt has behind it.

    The query is computed once, so that all of it is about as much work as one prompt.
    """
    items = body.get("items", body.get("documents"))
    query = body.get("query")
    return [query, *(cast("list[Any]", items) if isinstance(items, list) else [items])]


def _joined(text: object) -> str | None:
    """A text, or several in one."""
    if isinstance(text, list) and all(isinstance(one, str) for one in cast("list[Any]", text)):
        return "".join(cast("list[str]", text))
    return text if isinstance(text, str) else None


def _text(asked: Mapping[str, Any]) -> str:
    if isinstance(asked.get("prompt"), str):
        return str(asked["prompt"])
    # In the order in which templates use them, about.
    return json.dumps([asked.get("tools"), asked.get("messages")]) if asked else ""


def _token_ids(body: Mapping[str, Any]) -> Sequence[int] | None:
    for name in ("input_ids", "prompt", "input"):
        if _are_ids(body.get(name)):
            return body[name]
    scored = _scored(body)
    if all(_are_ids(one) for one in scored):
        return [token for one in scored for token in one]
    return None


def _are_ids(value: object) -> bool:
    """Token ids of one prompt, small enough to be hashed."""
    if not isinstance(value, list):
        return False
    return all(type(one) is int and 0 <= one < 1 << 32 for one in cast("list[Any]", value))


def _salt(body: Mapping[str, Any]) -> str:
    given = body.get("cache_salt", body.get("extra_key"))
    return given if isinstance(given, str) else ""
