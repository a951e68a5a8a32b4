"""Turn the prompts of requests into blocks (`PromptHasher`), which is all that policies see."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any, TypeGuard, cast

import httpx

from flashmoa.engine import prompt_fields
from flashmoa.router.blocks import Blocks, text_blocks, token_blocks

_TOKENIZE = "/v1/tokenize"
_TOKENIZE_SECONDS = 5.0
# Number of characters of a list's items that are tokenised with what they share. It suffices for
# the engine to be recognised that has them cached.
_SAMPLE = 4096
# The engine puts these into a question of its own, so their tokens are not those of its prompts.
_RENDERED = frozenset({"documents", "labels"})


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
        """Return the blocks of the prompt in a request's body, or of its list of prompts.

        Args:
            engine: URL of the engine that is asked to tokenise the prompt.
            headers: the client's API key.
        """
        blocks = await self._find_blocks(body, engine, headers)
        return replace(blocks, items=count) if (count := _count_prompts(body)) > 1 else blocks

    async def _find_blocks(
        self, body: Mapping[str, Any], engine: str, headers: Mapping[str, str]
    ) -> Blocks:
        salt = _salt(body)
        if (prompts := _token_ids(body)) is not None:
            return _list_blocks(prompts, salt)
        question, rest = _tokenize_body(body)
        key = blake2b(json.dumps([question, salt]).encode(), digest_size=16).digest()
        if (remembered := self._remembered.get(key)) is not None:
            self._remembered.move_to_end(key)
            return remembered.with_further_text(rest)
        asks = self._tokenize() and not _RENDERED & body.keys()
        tokens = await self._ask_tokens(question, engine, headers) if asks else None
        if tokens is None:
            return text_blocks(_text(question), salt=salt).with_further_text(rest)
        return self._remember(key, token_blocks(tokens, salt=salt)).with_further_text(rest)

    def known_blocks(self, body: Mapping[str, Any]) -> Blocks:
        """Return the blocks of a prompt without asking an engine.

        They have only the prompt's length if other prompts' blocks come from engines' tokens, since
        hashes of text would match none of those.
        """
        salt = _salt(body)
        if (prompts := _token_ids(body)) is not None:
            return _list_blocks(prompts, salt)
        question, rest = _tokenize_body(body)
        blocks = text_blocks(_text(question), salt=salt).with_further_text(rest)
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
        if not question or engine in self._untokenizing:
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


def _tokenize_body(body: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Return the body of a request to ``/v1/tokenize``, and the number of characters not in it.

    The body is empty if a request has no prompt of text. Of a list's items it has only the first
    ones; the engine computes what they share only once, so the list is about as much work as one
    prompt with all items.
    """
    shared, items = _scoring_list(body)
    texts = [_item_text(item) for item in items]
    if body.get("messages") is not None:
        fields = {name: body[name] for name in ("model", "messages") if body.get(name) is not None}
        fields |= prompt_fields(body)
        return fields, sum(len(text or "") for text in texts)
    prompt = body.get("prompt") if body.get("text") is None else body["text"]
    if prompt is not None:
        shared, texts = _as_list(prompt), []
    parts = [*map(_item_text, shared), *texts]
    if None in parts:
        return {}, 0
    text = "".join(part or "" for part in parts)
    sampled = len(text) - max(0, sum(len(text or "") for text in texts) - _SAMPLE)
    question: dict[str, Any] = {"prompt": text[:sampled]}
    if isinstance(body.get("add_special_tokens"), bool):
        question["add_special_tokens"] = body["add_special_tokens"]
    return question, len(text) - sampled


def _scoring_list(body: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return what the prompts of a list share, a query or labels, and its items.

    The texts of /v1/embeddings are items that share nothing.
    """
    if "input" in body:
        return _as_list(body.get("labels", [])), _as_list(body["input"])
    items = body.get("items", body.get("documents"))
    return [body.get("query")], _as_list(items if items is not None else [])


def _as_list(value: object) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else [value]


def _item_text(item: object) -> str | None:
    """Return an item's text; ``None`` if it has none.

    An object, as the documents of Cohere and Jina are, has a ``text``, or several fields.
    """
    if isinstance(item, dict):
        fields = cast("dict[str, Any]", item)
        texts = [fields["text"]] if "text" in fields else list(fields.values())
        return "".join(text for text in texts if isinstance(text, str)) or None
    return item if isinstance(item, str) else None


def _text(question: Mapping[str, Any]) -> str:
    if isinstance(question.get("prompt"), str):
        return str(question["prompt"])
    # Chat templates render tools and messages roughly in this order.
    return json.dumps([question.get("tools"), question.get("messages")]) if question else ""


def _token_ids(body: Mapping[str, Any]) -> list[list[int]] | None:
    """Return the token ids of the prompt if the request contains them.

    Of a list, they are those of the first prompt, and then those of each other one without what it
    shares with the first.
    """
    for name in ("input_ids", "prompt", "input"):
        if _are_token_ids(value := body.get(name)):
            return [value]
        if _are_lists_of_token_ids(value):
            return value
    shared, items = _scoring_list(body)
    if _are_lists_of_token_ids(parts := [*shared, *items]):
        first = [token for part in parts[: len(shared) + 1] for token in part]
        return [first, *parts[len(shared) + 1 :]]
    return None


def _list_blocks(prompts: Sequence[Sequence[int]], salt: str) -> Blocks:
    """Return the blocks of a list's first prompt, and the length of all of them."""
    return replace(token_blocks(prompts[0], salt=salt), length=sum(map(len, prompts)))


def _count_prompts(body: Mapping[str, Any]) -> int:
    """Return the number of prompts in a request's list; 1 if it has no list.

    The documents of a chat are part of its one prompt.
    """
    if body.get("messages") is not None:
        return 1
    for name in ("items", "documents", "input", "input_ids", "text", "prompt"):
        value: object = body.get(name)
        if isinstance(value, list):
            prompts = cast("list[Any]", value)
            return 1 if _are_token_ids(prompts) else len(prompts)
    return 1


def count_samples(body: Mapping[str, Any]) -> int:
    """Return how many answers a request asks for to each of its prompts."""
    parameters: Any = body.get("sampling_params")
    count: object = body.get("n")
    if count is None and isinstance(parameters, dict):
        count = cast("dict[str, Any]", parameters).get("n")
    return count if isinstance(count, int) and count > 0 else 1


def _are_lists_of_token_ids(value: object) -> TypeGuard[list[list[int]]]:
    return (
        isinstance(value, list)
        and bool(cast("list[Any]", value))
        and all(map(_are_token_ids, cast("list[Any]", value)))
    )


def _are_token_ids(value: object) -> TypeGuard[list[int]]:
    """Return whether a value is the token ids of one prompt, small enough to be hashed."""
    if not isinstance(value, list):
        return False
    ids = cast("list[Any]", value)
    # This is in the path of every request; a loop would take longer than hashing the prompt.
    return set(map(type, ids)) <= {int} and (not ids or (min(ids) >= 0 and max(ids) < 1 << 32))


def _salt(body: Mapping[str, Any]) -> str:
    salt = body.get("cache_salt", body.get("extra_key"))
    return salt if isinstance(salt, str) else ""
