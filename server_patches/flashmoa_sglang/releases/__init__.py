"""The differences between SGLang's releases, each release as one class.

``RELEASE`` is the instance for the installed release. The rest of the plugin uses whatever differs
between releases only through it. A release between two tested ones is served by the class of the
older one; the checks at start (``plugin.py``) then accept or refuse it.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from flashmoa_sglang.releases.base import Release
from flashmoa_sglang.releases.v0_5_12 import Release0512
from flashmoa_sglang.releases.v0_5_23 import Release0523

TESTED = ("0.5.12.post1", "0.5.18", "0.5.23")
# The keys are the first release that each class serves, the oldest first.
_CLASSES: dict[tuple[int, ...], type[Release]] = {
    (0, 5, 12): Release0512,
    (0, 5, 18): Release,
    (0, 5, 23): Release0523,
}


def installed() -> str:
    """Return the installed SGLang release.

    Raises: PackageNotFoundError if SGLang is not installed.
    """
    return version("sglang")


def too_old(release: str) -> str | None:
    """Return an error message if a release is older than the oldest tested one, else ``None``."""
    number = _number(release)
    # A build from a checkout without tags has the version 0.0.0; its hooks are checked at start.
    if number >= min(_CLASSES) or not any(number):
        return None
    return (
        f"SGLang {release} is too old for flashmoa-sglang. Tested releases: {', '.join(TESTED)}. "
        "Install one of them."
    )


def served_as(release: str) -> tuple[int, ...]:
    """Return the release for which the class was written that serves ``release``.

    It is the newest that is not newer than that.
    """
    return max((one for one in _CLASSES if one <= _number(release)), default=min(_CLASSES))


def class_for(release: str) -> type[Release]:
    return _CLASSES[served_as(release)]


def _number(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", release)[:3])


def _installed_class() -> type[Release]:
    try:
        return class_for(installed())
    except PackageNotFoundError:  # Some parts of the plugin are used without SGLang.
        return Release


RELEASE = _installed_class()()
