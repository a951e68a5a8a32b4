"""What keeps the KV of some requests apart from that of others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_FIELDS = ("cache_salt", "extra_key", "lora_path")


def kv_namespace(body: Mapping[str, Any]) -> dict[str, str]:
    """Tell the namespace of a request's KV: cache salt, extra key, LoRA adapter, if it has any.

    A prompt stream serves requests of its own namespace only. The adapter may be part of the
    model's name, ``base:adapter``; which part that is the engine knows.

    Args:
        body: of a chat completion or a generation.

    Returns: fields of the body that opens a prompt stream.
    """
    found = {name: body[name] for name in _FIELDS if isinstance(body.get(name), str) and body[name]}
    model = body.get("model")
    return {**found, "model": model} if isinstance(model, str) and ":" in model else found
