"""Talk to SGLang servers: a typed client, and its answers as types."""

from flashmoa.engine.client import EngineClient
from flashmoa.engine.settings import EngineSettings
from flashmoa.engine.wire import (
    Costs,
    Delta,
    EngineInfo,
    KvState,
    Prefilled,
    PromptUsage,
    Span,
    StreamFigures,
    StreamState,
    StreamUse,
    kv_namespace,
    prompt_fields,
)

__all__ = [
    "Costs",
    "Delta",
    "EngineClient",
    "EngineInfo",
    "EngineSettings",
    "KvState",
    "Prefilled",
    "PromptUsage",
    "Span",
    "StreamFigures",
    "StreamState",
    "StreamUse",
    "kv_namespace",
    "prompt_fields",
]
