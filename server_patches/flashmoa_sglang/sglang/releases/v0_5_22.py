"""SGLang 0.5.22."""

from __future__ import annotations

from flashmoa_sglang.sglang.releases.base import Release


class Release0522(Release):
    LOSES_STATES = True
    PARTS_ENCODER = None
