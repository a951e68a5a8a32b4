"""Which engines come to a place in the plugin, if not all do."""

from __future__ import annotations

import re
from collections.abc import Mapping

from flashmoa_sglang.internals import ASYNCEP, CPU, DEVICE, EVERYBODY, KV_OFF, PD

# The feature that they have, by the beginning of the place; the longest one counts.
_FEATURE: Mapping[str, str] = {
    "asyncep/": ASYNCEP,
    "asyncep/__init__.py:_own_offloader": EVERYBODY,
    "cpu/": CPU,
    "modelled_gpu/": DEVICE,
    "kv_free.py": KV_OFF,
    "kv_free.py:_pool": EVERYBODY,
    "kv_free.py:bytes_of": EVERYBODY,
    "kv_free.py:peak_memory": EVERYBODY,
    "messages.py:unsent": PD,
    "scheduler/queue.py:let_go": PD,
}
# The same for functions and methods of any release.
_FEATURE_IN_RELEASES: Mapping[str, str] = {
    "_mask_on_cpu": CPU,
    "cpu_platform": CPU,
    "release_metadata_buffer": PD,
    "write_location": CPU,
}


def feature(where: str) -> str:
    """Return the feature that engines have which come there, or ``EVERYBODY``."""
    if where.startswith("releases/"):
        parts = re.split("[:.]", where)
        return next((its for name, its in _FEATURE_IN_RELEASES.items() if name in parts), EVERYBODY)
    known = [beginning for beginning in _FEATURE if where.startswith(beginning)]
    return _FEATURE[max(known, key=len)] if known else EVERYBODY
