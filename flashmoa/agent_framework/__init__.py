"""Use FlashMoA with Microsoft Agent Framework: a drop-in chat client, and ``link(workflow)``."""

from flashmoa._extras import FromExtra

with FromExtra("agent-framework", __name__, "Agent Framework"):
    import agent_framework.openai as _  # noqa: F401

from flashmoa.agent_framework._client import FlashMoAChatClient
from flashmoa.agent_framework._workflow_link import WorkflowLink, link

__all__ = ["FlashMoAChatClient", "WorkflowLink", "link"]
