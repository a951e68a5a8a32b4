"""Rewrites the list that the plugin is shipped with."""

from __future__ import annotations

from flashmoa_sglang.internals.used_names import LIST

from tests.unit.plugin.used_names.listed import text

LIST.write_text(text(), encoding="utf-8")
