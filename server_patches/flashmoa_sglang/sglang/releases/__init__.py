"""The differences between SGLang's releases, each release as one class.

``RELEASE`` is the instance for the installed release. The rest of the plugin uses whatever differs
between releases only through it. A release between two tested ones is served by the class of the
older one; the checks at start (``hooks.py``) then accept or refuse it.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from flashmoa_sglang.sglang.releases.base import Release
from flashmoa_sglang.sglang.releases.v0_5_12 import Release0512
from flashmoa_sglang.sglang.releases.v0_5_21 import Release0521
from flashmoa_sglang.sglang.releases.v0_5_22 import Release0522

# The tested releases, the oldest first.
_CLASSES: dict[str, type[Release]] = {
    "0.5.12.post1": Release0512,
    "0.5.21": Release0521,
    "0.5.22": Release0522,
    "0.5.23": Release,
}
TESTED = tuple(_CLASSES)


def installed() -> str:
    """Return the installed SGLang release.

    Raises: PackageNotFoundError if SGLang is not installed.
    """
    return version("sglang")


def too_old(release: str) -> str | None:
    """Return an error message if a release is older than the oldest tested one, else ``None``."""
    number = _number(release)
    # A build from a checkout without tags has the version 0.0.0; its hooks are checked at start.
    if number >= _number(TESTED[0]) or not any(number):
        return None
    return (
        f"SGLang {release} is too old for flashmoa-sglang. Tested releases: {', '.join(TESTED)}. "
        "Install one of them."
    )


def served_as(release: str) -> str:
    """Return the newest tested release that is not newer than ``release``; its class serves it."""
    older = (one for one in TESTED if _number(one) <= _number(release))
    return max(older, key=_number, default=TESTED[0])


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
