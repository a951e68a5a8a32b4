"""How a router works."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashmoa.router.policies import Policy


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """How a router works.

    Attributes:
        engines: URLs.
        policy: of a kind in ``flashmoa.router``; prefix-aware if there is none.
        api_key: for the router's own questions; requests carry their clients' own.
        model_config: the model's ``config.json``, where its engines' path cannot be read here.
        saturation_margin: kappa of the threshold; 0: engines take everything.
        tokenize: whether engines are asked for prompts' tokens; ``None``: if one of them publishes
            KV events, which are about tokens. It takes milliseconds per new prompt.
        max_body_bytes: of a request. max_waiting: requests in the queue.
        watch_seconds: between two looks at an engine.
        hung_seconds: until one that accepts connections and does not answer counts as gone.
    """

    engines: Sequence[str]
    policy: Policy | None = None
    api_key: str | None = None
    model_config: Mapping[str, Any] | None = None
    saturation_margin: float = 1.2
    tokenize: bool | None = None
    max_body_bytes: int = 32 << 20
    max_waiting: int = 10_000
    watch_seconds: float = 2.0
    hung_seconds: float = 40.0
