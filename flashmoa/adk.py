"""Use FlashMoA with Google's Agent Development Kit (ADK): a drop-in model, and a plugin that links.

Needs the extra ``adk``.
"""

from flashmoa.frameworks.adk import FlashMoALlm, LinkPlugin

__all__ = ["FlashMoALlm", "LinkPlugin"]
