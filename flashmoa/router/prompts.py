"""Turn the prompts of requests into blocks (`PromptHasher`), which is all that policies see."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import chain
from typing import Any, TypeGuard, cast

from flashmoa.engine import prompt_fields
from flashmoa.router.blocks import Blocks, text_blocks, token_blocks, token_count
from flashmoa.router.client_requests import parse_object
from flashmoa.router.errors import EngineLost
from flashmoa.router.forwarding import Connections

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
        self, connections: Connections, tokenize: Callable[[], bool], max_remembered: int = 1 << 20
    ) -> None:
        self._connections = connections
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
        prompt = _read_prompt(body)
        if prompt.tokens is not None or not prompt.question or not self._tokenize():
            return prompt.blocks()
        key = blake2b(json.dumps([prompt.question, prompt.salt]).encode(), digest_size=16).digest()
        if (remembered := self._remembered.get(key)) is not None:
            self._remembered.move_to_end(key)
            return prompt.extend(remembered)
        asks = engine not in self._untokenizing and not _RENDERED & body.keys()
        tokens = await self._ask_tokens(prompt.question, engine, headers) if asks else None
        if tokens is None:
            return prompt.blocks()
        return prompt.extend(self._remember(key, token_blocks(tokens, salt=prompt.salt)))

    def known_blocks(self, body: Mapping[str, Any]) -> Blocks:
        """Return the blocks of a prompt without asking an engine.

        They have only the prompt's length if other prompts' blocks come from engines' tokens, since
        hashes of text would match none of those.
        """
        prompt = _read_prompt(body)
        blocks = prompt.blocks()
        return replace(blocks, hashes=()) if prompt.tokens is None and self._tokenize() else blocks

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
        with suppress(EngineLost):
            sent = {**headers, "content-type": "application/json"}
            answer = await self._connections.ask(
                "POST",
                engine + _TOKENIZE,
                sent,
                json.dumps(question).encode(),
                seconds=_TOKENIZE_SECONDS,
            )
            if answer is not None and answer.status_code in (404, 405):
                self._untokenizing.add(engine)
            if answer is not None and answer.status_code == 200:
                tokens = parse_object(answer.body).get("tokens")
                return tokens if _are_token_ids(tokens) else None
        return None


@dataclass(frozen=True, slots=True)
class _Prompt:
    """What a request says of its prompt, or of its list of prompts.

    Attributes:
        salt: prompts share blocks only if they have the same.
        items: the number of prompts.
        tokens: if the request contains the tokens, those of the first prompt.
        token_length: the number of all of them.
        question: the body of a request to ``/v1/tokenize``; empty if there is no text. Of a list's
            items it has only the first ones; the engine computes what they share only once, so the
            list is about as much work as one prompt with all items.
        rest: number of characters that are not in it.
    """

    salt: str
    items: int
    tokens: list[int] | None = None
    token_length: int = 0
    question: dict[str, Any] = field(default_factory=dict[str, Any])
    rest: int = 0

    def blocks(self) -> Blocks:
        """Return the blocks of the tokens, or else of the text."""
        if self.tokens is not None:
            blocks = token_blocks(self.tokens, salt=self.salt)
            return replace(blocks, length=self.token_length, items=self.items)
        text = self.question.get("prompt", "")
        if "messages" in self.question:
            # Chat templates render tools and messages roughly in this order.
            text = json.dumps([self.question.get("tools"), self.question["messages"]])
        return self.extend(text_blocks(text, salt=self.salt))

    def extend(self, beginning: Blocks) -> Blocks:
        """Return the blocks of all, given those of the question's text."""
        length = beginning.length + token_count(self.rest)
        return replace(beginning, length=length, items=self.items)


def _read_prompt(body: Mapping[str, Any]) -> _Prompt:
    salt: Any = body.get("cache_salt", body.get("extra_key"))
    salt = salt if isinstance(salt, str) else ""
    if body.get("messages") is not None:
        given = {name: body.get(name) for name in ("model", "messages")}
        question = {name: value for name, value in given.items() if value is not None}
        # The documents of a chat are part of its one prompt.
        texts = map(_item_text, _as_list(body.get("documents", [])))
        rest = sum(len(text or "") for text in texts)
        return _Prompt(salt, 1, question=question | prompt_fields(body), rest=rest)
    shared, items = _prompt_parts(body)
    count = max(1, len(items))
    if _are_lists_of_token_ids(parts := [*shared, *items]):
        first = list(chain.from_iterable(parts[: len(shared) + 1]))
        return _Prompt(salt, count, tokens=first, token_length=sum(map(len, parts)))
    texts = [text for part in parts if (text := _item_text(part)) is not None]
    if len(texts) < len(parts):
        return _Prompt(salt, count)
    text = "".join(texts)
    head = sum(map(len, texts[: len(shared)]))
    sampled = head + max(_SAMPLE, len(texts[len(shared)]) if items else 0)
    question = {"prompt": text[:sampled]}
    if isinstance(body.get("add_special_tokens"), bool):
        question["add_special_tokens"] = body["add_special_tokens"]
    return _Prompt(salt, count, question=question, rest=max(0, len(text) - sampled))


def _prompt_parts(body: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return what the prompts of a list share, a query or labels, and what each adds to it.

    The prompts of ``/generate`` and the texts of ``/v1/embeddings`` share nothing.
    """
    for name in ("input_ids", "text", "prompt", "input"):
        if (value := body.get(name)) is not None:
            labels: object = body.get("labels") if name == "input" else None
            shared = [] if labels is None else _as_list(labels)
            return shared, [value] if _are_token_ids(value) else _as_list(value)
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


def _are_lists_of_token_ids(values: list[Any]) -> TypeGuard[list[list[int]]]:
    return bool(values) and all(map(_are_token_ids, values))


def _are_token_ids(value: object) -> TypeGuard[list[int]]:
    """Return whether a value is the token ids of one prompt, small enough to be hashed."""
    if not isinstance(value, list):
        return False
    ids = cast("list[Any]", value)
    # This is in the path of every request; a loop would take longer than hashing the prompt.
    return set(map(type, ids)) <= {int} and (not ids or (min(ids) >= 0 and max(ids) < 1 << 32))
