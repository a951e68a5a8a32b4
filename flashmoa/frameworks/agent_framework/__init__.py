"""The adapter for Microsoft Agent Framework; programs import :mod:`flashmoa.agent_framework`."""
