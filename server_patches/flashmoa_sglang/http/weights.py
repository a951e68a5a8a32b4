"""Weight updates, where the experts are in host memory: refused.

What a layer's parameters point to then is a slot, or the copy that goes there: an update would be
lost with the next forward for some layers, and be half there for others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashmoa_sglang.options import Options

REFUSAL = (
    "With --flashmoa-asyncep the experts are in host memory, and weights cannot be updated in "
    "place. Restart the engine with the new weights, or run it without --flashmoa-asyncep."
)


async def update(original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``TokenizerManager.update_weights_from_...``: success and message."""
    if Options.from_environment().asyncep == "off":
        return await original(manager, *args, **kwargs)
    return False, REFUSAL


async def update_from_disk(
    original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any
) -> Any:
    """The same for ``update_weights_from_disk``, which says how many requests it paused, too."""
    if Options.from_environment().asyncep == "off":
        return await original(manager, *args, **kwargs)
    return False, REFUSAL, 0
