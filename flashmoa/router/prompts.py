"""Convert the prompts of requests to blocks for the policy (`find_blocks`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from itertools import chain
from typing import Any, TypeGuard, cast

from flashmoa.engine import prompt_fields
from flashmoa.router.cache_tables import Blocks, text_blocks, token_blocks
from flashmoa.router.forwarding import Connections, RouterError, parse_object


async def find_blocks(
    body: Mapping[str, Any],
    connections: Connections,
    engine: str | None,
    headers: Mapping[str, str],
) -> Blocks:
    """Return the blocks of the prompt, or prompts, in a request's body.

    If ``engine`` tells the prompt's tokens in time, these are cut into blocks. Otherwise, the text
    is, so that requests with the same beginning still match. ``headers`` has the client's API key.
    """
    salt: Any = body.get("cache_salt", body.get("extra_key"))
    salt = salt if isinstance(salt, str) else ""
    if engine is not None and (question := _question(body)) is not None:
        content = json.dumps(question).encode()
        headers = {**headers, "content-type": "application/json"}
        url = f"{engine}/v1/tokenize"
        with suppress(RouterError):
            answer = await connections.ask(url, headers, content)
            tokens = parse_object(answer.body).get("tokens") if answer else None
            if _are_token_ids(tokens):
                return token_blocks(tokens, salt=salt)
    return _guess_blocks(body, salt)


def _question(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the request to ``/v1/tokenize`` for a prompt that is one text, otherwise ``None``."""
    if (messages := body.get("messages")) is not None:
        model = {"model": body["model"]} if "model" in body else {}
        return {"messages": messages, **prompt_fields(body), **model}
    parts = _prompt_parts(body)
    if len(parts) != 1 or not isinstance(parts[0], str):
        return None
    given = {k: v for k, v in body.items() if k == "add_special_tokens" and isinstance(v, bool)}
    return {"prompt": parts[0], **given}


def _guess_blocks(body: Mapping[str, Any], salt: str) -> Blocks:
    """Return the blocks of the tokens in a body, otherwise of its text, over all its prompts."""
    if (messages := body.get("messages")) is not None:
        # Chat templates render tools and messages roughly in this order.
        return text_blocks(json.dumps([body.get("tools"), messages]), salt=salt)
    parts = _prompt_parts(body)
    if parts and all(map(_are_token_ids, parts)):
        return token_blocks(list(chain.from_iterable(parts)), salt=salt)
    texts = (part if isinstance(part, str) else json.dumps(part) for part in parts)
    return text_blocks("".join(texts), salt=salt)


def _prompt_parts(body: Mapping[str, Any]) -> list[Any]:
    """Return the prompt; for several prompts, their query or labels, and their items."""
    for name in ("input_ids", "text", "prompt", "input"):
        if (value := body.get(name)) is not None:
            shared = _as_list(body.get("labels")) if name == "input" else []
            return shared + ([value] if _are_token_ids(value) else _as_list(value))
    shared = [body["query"]] if "query" in body else []
    return shared + _as_list(body.get("items", body.get("documents")))


def _as_list(value: object) -> list[Any]:
    if isinstance(value, list):
        return cast("list[Any]", value)
    return [] if value is None else [value]


def _are_token_ids(value: object) -> TypeGuard[list[int]]:
    """Return whether a value is a list of token ids that are small enough to be hashed."""
    if not isinstance(value, list):
        return False
    ids = cast("list[Any]", value)
    # Every request comes here, and a loop would take longer than hashing the prompt.
    return set(map(type, ids)) <= {int} and (not ids or (min(ids) >= 0 and max(ids) < 1 << 32))
