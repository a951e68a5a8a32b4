"""What the plugin uses inside SGLang, hooked or not, and whether the installed one has it.

A name that is missing would end an engine when it is used, perhaps long after its start. So all of
them are looked for before the engine starts: in SGLang's source, which takes a fraction of what
importing it does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flashmoa_sglang.internals.check import Check
from flashmoa_sglang.internals.sglang_source import Source
from flashmoa_sglang.internals.used_names import used

logger = logging.getLogger(__name__)

# What only some engines do, as their arguments say it.
EVERYBODY, ASYNCEP, KV_OFF, PD, CPU, DEVICE = (
    "every engine",
    "--flashmoa-asyncep",
    "--flashmoa-kv-cache off",
    "--disaggregation-mode",
    "--device cpu",
    "--flashmoa-device",
)
FEATURES = (ASYNCEP, KV_OFF, PD, CPU, DEVICE)


@cache
def installed() -> Source | None:
    """Return the installed SGLang's source; ``None`` where there is none."""
    package = find_spec("sglang")
    if package is None or not package.submodule_search_locations:
        return None
    return Source(Path(package.submodule_search_locations[0]))


def looked_at(
    release: str,
    source: Source,
    feature: str = EVERYBODY,
    hooks: Mapping[str, Callable[..., Any]] | None = None,
) -> Check:
    """Look for what engines with a feature use of SGLang, or for what all of them do.

    Args:
        feature: of ``FEATURES``, or ``EVERYBODY``.
        hooks: the hook functions by what they are called around or after.
    """
    check = Check(source)
    for target, function in (hooks or {}).items():
        check.hook(target, function)
    check.uses(used(release, feature))
    if check.untold:
        logger.debug("Not looked at in SGLang %s: %s", release, ", ".join(sorted(check.untold)))
    return check
