"""Turn the prompts of requests into blocks (`PromptHasher`), which is all that policies see."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from itertools import chain
from typing import Any, TypeGuard, cast

from flashmoa.engine import prompt_fields
from flashmoa.router.cache_tables import Blocks, text_blocks, token_blocks, token_count
from flashmoa.router.client_requests import parse_object
from flashmoa.router.errors import EngineLost
from flashmoa.router.forwarding import Connections

_TOKENIZE_SECONDS = 5.0
# Number of characters of a list's items that are hashed with what they share. It suffices for the
# engine to be recognised that has them cached.
_SAMPLE = 4096


class PromptHasher:
    """Turns prompts into blocks of tokens, for which it asks engines, and remembers them.

    If an engine does not tokenise, or not in time, or a request has a list of prompts, or more than
    text, the blocks are those of the text, so that requests with the same beginning still match.

    Args:
        tokenize: returns whether to ask engines at all.
        max_remembered: the most blocks of prompts that are remembered.
    """

    def __init__(
        self, connections: Connections, tokenize: Callable[[], bool], max_remembered: int = 1 << 20
    ) -> None:
        self._connections = connections
        self._max_remembered = max_remembered
        self._tokenize = tokenize
        # The keys are digests of the prompts, because prompts are long.
        self._remembered: OrderedDict[bytes, Blocks] = OrderedDict()
        # The number of remembered blocks plus the number of prompts.
        self._remembered_size = 0

    async def blocks(
        self, body: Mapping[str, Any], engine: str, headers: Mapping[str, str]
    ) -> Blocks:
        """Return the blocks of the prompt in a request's body, or of its list of prompts.

        Args:
            engine: URL of the engine that is asked to tokenise the prompt.
            headers: the client's API key.
        """
        prompt = _read_prompt(body)
        if not prompt.question or not self._tokenize():
            return prompt.blocks()
        key = blake2b(json.dumps([prompt.question, prompt.salt]).encode(), digest_size=16).digest()
        if (remembered := self._remembered.get(key)) is not None:
            self._remembered.move_to_end(key)
            return remembered
        tokens = await self._ask_tokens(prompt.question, engine, headers)
        if tokens is None:
            return prompt.blocks()
        blocks = token_blocks(tokens, salt=prompt.salt)
        if key not in self._remembered:  # Another request may have asked for the same prompt.
            self._remembered[key] = blocks
            self._remembered_size += 1 + len(blocks.hashes)
        while self._remembered_size > self._max_remembered:
            _, oldest = self._remembered.popitem(last=False)
            self._remembered_size -= 1 + len(oldest.hashes)
        return blocks

    def known_blocks(self, body: Mapping[str, Any]) -> Blocks:
        """Return the blocks of a prompt without asking an engine.

        They have only the prompt's length if other prompts' blocks come from engines' tokens, since
        hashes of text would match none of those.
        """
        prompt = _read_prompt(body)
        is_unknown = prompt.question and self._tokenize()
        blocks = prompt.blocks()
        return replace(blocks, hashes=()) if is_unknown else blocks

    async def _ask_tokens(
        self, question: Mapping[str, Any], engine: str, headers: Mapping[str, str]
    ) -> list[int] | None:
        url, body = f"{engine}/v1/tokenize", json.dumps(question).encode()
        sent = {**headers, "content-type": "application/json"}
        with suppress(EngineLost):
            answer = await self._connections.ask("POST", url, sent, body, seconds=_TOKENIZE_SECONDS)
            if answer is not None and answer.status_code == 200:
                tokens = parse_object(answer.body).get("tokens")
                return tokens if _are_token_ids(tokens) else None
        return None


@dataclass(frozen=True, slots=True)
class _Prompt:
    """What a request says of its prompt, or of its list of prompts.

    Attributes:
        blocks: returns the blocks of its tokens, or else of its text.
        salt: prompts share blocks only if they have the same.
        question: the body of a request to ``/v1/tokenize``; empty if its text is not that of one
            prompt.
    """

    blocks: Callable[[], Blocks]
    salt: str
    question: dict[str, Any] = field(default_factory=dict[str, Any])


def _read_prompt(body: Mapping[str, Any]) -> _Prompt:
    salt: Any = body.get("cache_salt", body.get("extra_key"))
    salt = salt if isinstance(salt, str) else ""
    if (messages := body.get("messages")) is not None:
        question = {"messages": messages, **prompt_fields(body)}
        if "model" in body:
            question["model"] = body["model"]
        # Chat templates render tools and messages roughly in this order.
        text = json.dumps([body.get("tools"), messages])
        return _Prompt(partial(text_blocks, text, salt=salt), salt, question)
    shared, items = _prompt_parts(body)
    parts, is_list = [*shared, *items], len(items) > 1
    if parts and all(map(_are_token_ids, parts)):
        first = list(chain.from_iterable(parts[: len(shared) + 1]))
        blocks, length = token_blocks(first, salt=salt), sum(map(len, parts))
        return _Prompt(lambda: replace(blocks, length=length, is_list=is_list), salt)
    texts = [part if isinstance(part, str) else json.dumps(part) for part in parts]
    text = "".join(texts)
    if len(parts) == len(items) == 1:
        question = {"prompt": text}
        if isinstance(body.get("add_special_tokens"), bool):
            question["add_special_tokens"] = body["add_special_tokens"]
        return _Prompt(partial(text_blocks, text, salt=salt), salt, question)
    # The engine computes what the items share only once, so the list is about as much work as one
    # prompt with all items. Its beginning suffices to recognise it.
    head, first = (sum(map(len, texts[:end])) for end in (len(shared), len(shared) + 1))
    blocks = text_blocks(text[: max(head + _SAMPLE, first)], salt=salt)
    length = token_count(len(text))
    return _Prompt(lambda: replace(blocks, length=length, is_list=is_list), salt)


def _prompt_parts(body: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return what the prompts of a list share, a query or labels, and what each adds to it.

    The prompts of ``/generate`` and the texts of ``/v1/embeddings`` share nothing.
    """
    for name in ("input_ids", "text", "prompt", "input"):
        if (value := body.get(name)) is not None:
            labels: object = body.get("labels") if name == "input" else None
            return _as_list(labels), [value] if _are_token_ids(value) else _as_list(value)
    shared = [body["query"]] if "query" in body else []
    return shared, _as_list(body.get("items", body.get("documents")))


def _as_list(value: object) -> list[Any]:
    if isinstance(value, list):
        return cast("list[Any]", value)
    return [] if value is None else [value]


def _are_token_ids(value: object) -> TypeGuard[list[int]]:
    """Return whether a value is the token ids of one prompt, small enough to be hashed."""
    if not isinstance(value, list):
        return False
    ids = cast("list[Any]", value)
    # This is in the path of every request; a loop would take longer than hashing the prompt.
    return set(map(type, ids)) <= {int} and (not ids or (min(ids) >= 0 and max(ids) < 1 << 32))
