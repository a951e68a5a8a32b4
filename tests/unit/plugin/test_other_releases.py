"""SGLang releases that are not installed here have all that the plugin uses in them, too."""

from __future__ import annotations

import pytest
from flashmoa_sglang import internals, releases
from flashmoa_sglang.internals import Source

from tests.conftest import ROOT

OTHERS = [release for release in releases.TESTED if release != releases.installed()]

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("feature", [internals.EVERYBODY, *internals.FEATURES])
@pytest.mark.parametrize("release", OTHERS)
def test_another_release_has_all_that_is_used(release: str, feature: str) -> None:
    folder = ROOT / ".cache" / "sglang" / release / "sglang"
    assert folder.is_dir(), f"{folder} is missing: run make .cache/sglang/{release}/.ready"
    assert internals.looked_at(release, Source(folder), feature).problem == ""
