"""Where engines are."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

_LOCAL = "http://127.0.0.1:30000"


def engine_url(base_url: str) -> str:
    """An engine's root from its own URL or its OpenAI one (``.../v1``)."""
    try:
        parts = urlsplit(base_url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # Brackets or a port that are none.
        usable = False
    if not usable:
        raise ValueError(f"{base_url!r} is not an engine's URL; give http://HOST:PORT")
    return base_url.rstrip("/").removesuffix("/v1").rstrip("/")


def self_hosted_url(base_url: str | None) -> str:
    """An engine's root: as given, else ``OPENAI_BASE_URL`` of the environment, else where SGLang
    listens by default."""
    return engine_url(base_url or os.environ.get("OPENAI_BASE_URL") or _LOCAL)
