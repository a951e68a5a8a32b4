"""Name the extra of this package that installs a missing package (:class:`FromExtra`)."""

from __future__ import annotations

from types import TracebackType


class FromExtra:
    """Surrounds imports of packages that only an extra installs, and names the extra if they fail.

    Args:
        extra: the extra's name.
        module: the module of FlashMoA that is imported.
        needs: the packages, in the user's words.
    """

    def __init__(self, extra: str, module: str, needs: str) -> None:
        self._extra = extra
        self._need = f"{module} needs {needs}"

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        """Raise the error again, with the command that installs the extra."""
        if isinstance(error, ImportError):
            text = f"{self._need} ({error}): pip install 'flashmoa[{self._extra}]'"
            raise type(error)(text, name=error.name) from error
