"""Name the extra of this package that installs a missing package (:func:`from_extra`)."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def from_extra(extra: str, module: str, needs: str) -> Generator[None]:
    """Name the extra that installs what the imports in this context need, if they fail.

    Args:
        extra: the extra's name.
        module: the module of FlashMoA that is imported.
        needs: the packages, in the user's words.

    Raises: the ``ImportError`` again, with the command that installs the extra.
    """
    try:
        yield
    except ImportError as error:
        text = f"{module} needs {needs} ({error}): pip install 'flashmoa[{extra}]'"
        raise type(error)(text, name=error.name) from error
