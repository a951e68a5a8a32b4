"""Talk to SGLang servers: a typed client, its answers as types, and its errors."""

from flashmoa.engine.client import EngineClient
from flashmoa.engine.connections import engine_url, self_hosted_url
from flashmoa.engine.plain import WithoutPlugin
from flashmoa.engine.wire import (
    Costs,
    Delta,
    EngineInfo,
    KvState,
    Prefilled,
    PromptUsage,
    Span,
    StreamState,
    StreamUse,
    kv_namespace,
    prompt_fields,
)
from flashmoa.errors import (
    BadAnswer,
    EngineDraining,
    EngineError,
    EngineTimeout,
    EngineUnreachable,
    MalformedRequest,
    PluginMissing,
    PromptTooLarge,
    RequestRefused,
    StreamGone,
    StreamOutOfOrder,
    StreamUnknown,
    TooManyStreams,
)

__all__ = [
    "BadAnswer",
    "Costs",
    "Delta",
    "EngineClient",
    "EngineDraining",
    "EngineError",
    "EngineInfo",
    "EngineTimeout",
    "EngineUnreachable",
    "KvState",
    "MalformedRequest",
    "PluginMissing",
    "Prefilled",
    "PromptTooLarge",
    "PromptUsage",
    "RequestRefused",
    "Span",
    "StreamGone",
    "StreamOutOfOrder",
    "StreamState",
    "StreamUnknown",
    "StreamUse",
    "TooManyStreams",
    "WithoutPlugin",
    "engine_url",
    "kv_namespace",
    "prompt_fields",
    "self_hosted_url",
]
