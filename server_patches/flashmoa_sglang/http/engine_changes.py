"""Hooks around changes of an engine's weights and adapters, which no prompt stream may outlast.

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


async def unload_adapter(
    original: Callable[..., Any], manager: Any, obj: Any, *args: Any, **kwargs: Any
) -> Any:
    """Close an adapter's streams; wraps ``TokenizerManager._unload_lora_adapter_locked``.

    SGLang itself waits for the adapter's requests only; the others go on. It unloads adapters for
    requests of others, too, where it has room for a few.
    """
    if manager.flashmoa_table is None:
        return await original(manager, obj, *args, **kwargs)
    async with manager.flashmoa_table.closed(obj.lora_name):
        return await original(manager, obj, *args, **kwargs)


def update_weights(*result: Any) -> Callable[..., Any]:
    """Make the wrapper of ``TokenizerManager.update_weights_from_...``.

    Args: result: what the method returns after ``False`` and the message, if it is refused.
    """

    async def update(original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
        if (refusal := asyncep.update_refusal()) is not None:
            return False, refusal, *result
        return await without_streams(original, manager, *args, **kwargs)

    return update
