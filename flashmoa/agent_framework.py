"""Use FlashMoA with Microsoft Agent Framework: a drop-in chat client, and ``link(workflow)``."""

from flashmoa._extras import from_extra

with from_extra("agent-framework", __name__, "Agent Framework"):
    import agent_framework.openai as _  # noqa: F401

from flashmoa.frameworks.agent_framework.client import FlashMoAChatClient
from flashmoa.frameworks.agent_framework.workflow_link import WorkflowLink, link

__all__ = ["FlashMoAChatClient", "WorkflowLink", "link"]
