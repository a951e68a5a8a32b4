"""What ``flashmoa-bench[datasets]`` installs, imported when it is needed."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def package(name: str, needed_by: str, install: str = "'flashmoa-bench[datasets]'") -> Any:
    """Raises: ModuleNotFoundError, which says what to install."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{needed_by} needs {error.name}: pip install {install}", name=error.name
        ) from error
