"""The adapter for AutoGen; programs import :mod:`flashmoa.autogen`."""
