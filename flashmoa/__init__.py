"""FlashMoA: multi-agent LLM workflows, fast on self-hosted models.

While one agent writes, its tokens stream into the prompts of the agents that will read
them, and the engines of those agents prefill the prompts. ``flashmoa.autogen`` links AutoGen
teams; this package itself does not depend on any agent framework.
"""

from flashmoa.engine import EngineClient, EngineSettings
from flashmoa.errors import FlashMoAError
from flashmoa.link.failure_policy import FailurePolicy, UpstreamCancelled
from flashmoa.link.options import LinkOptions
from flashmoa.link.streamed_text import Text
from flashmoa.workflow import Answer, Workflow

__version__ = "0.2.0"

__all__ = [
    "Answer",
    "EngineClient",
    "EngineSettings",
    "FailurePolicy",
    "FlashMoAError",
    "LinkOptions",
    "Text",
    "UpstreamCancelled",
    "Workflow",
]
