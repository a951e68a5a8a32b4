"""Hooks around changes of an engine's weights and adapters, during which no prompt stream is open.

SGLang makes them when no request runs. It does not know of prompt streams, whose increments are
made in the schedulers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashmoa_sglang import asyncep


async def without_streams(
    original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any
) -> Any:
    """Close all prompt streams before a change; wraps methods of ``TokenizerManager``."""
    if manager.flashmoa_table is None:
        return await original(manager, *args, **kwargs)
    async with manager.flashmoa_table.closed():
        return await original(manager, *args, **kwargs)


def update_weights(*result: Any) -> Callable[..., Any]:
    """Make the wrapper of ``TokenizerManager.update_weights_from_...``.

    Args: result: what the method returns after ``False`` and the message, if it is refused.
    """

    async def update(original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
        if (refusal := asyncep.update_refusal()) is not None:
            return False, refusal, *result
        return await without_streams(original, manager, *args, **kwargs)

    return update
