"""Use FlashMoA with Microsoft Agent Framework: a drop-in chat client, and ``link(workflow)``."""

try:
    import agent_framework.openai as _  # noqa: F401
except ImportError as error:
    raise ImportError(
        "Agent Framework is not installed: pip install 'flashmoa[agent-framework]'"
    ) from error

from flashmoa.agent_framework._client import FlashMoAChatClient
from flashmoa.agent_framework._workflow_link import WorkflowLink, link

__all__ = ["FlashMoAChatClient", "WorkflowLink", "link"]
