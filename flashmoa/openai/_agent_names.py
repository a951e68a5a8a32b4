"""Name the agent on whose behalf a request is sent (:func:`calling_agent`)."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

# Frames of code in these folders are not the user's: the standard library, installed packages, and
# this package, which may be installed from its source folder.
_LIBRARIES = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    str(Path(__file__).parents[1]),
    "<frozen",
)
_MOST_FRAMES = 3


def calling_agent() -> str:
    """Return the name of the LangGraph node that is running, else the user's functions that call.

    Functions are named with the lines of their calls, the outermost first (``main:12 > ask:31``).
    """
    return _langgraph_node() or " > ".join(_calling_lines()) or "call"


def _langgraph_node() -> str | None:
    config_module = sys.modules.get("langchain_core.runnables.config")
    if config_module is None:
        return None
    config: Any = config_module.var_child_runnable_config.get()
    node: object = config.get("metadata", {}).get("langgraph_node") if config else None
    return node if isinstance(node, str) else None


def _calling_lines() -> list[str]:
    frames = (each for each in _frames() if not each.f_code.co_filename.startswith(_LIBRARIES))
    calls = [f"{each.f_code.co_name}:{each.f_lineno}" for each in islice(frames, _MOST_FRAMES)]
    return [call for call in reversed(calls) if not call.startswith("<module>")]


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
