"""What clients read in place of engines' URLs."""

from __future__ import annotations

import pytest

from flashmoa.moa.serve.answers import without_urls

ENGINES = {"http://gpu1:3000": "engine 1", "http://gpu1:30001": "engine 2", "http://gpu1": "other"}


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("http://gpu1:3000: cannot be reached.", "engine 1: cannot be reached."),
        ("http://gpu1:30001/v1 failed", "engine 2/v1 failed"),
        ("see http://gpu1.", "see other."),
        ("http://gpu1-b and http://gpu1.lan", "http://gpu1-b and http://gpu1.lan"),
    ],
)
def test_each_url_has_the_name_of_its_own_engine(text: str, seen: str) -> None:
    assert without_urls(text, ENGINES) == seen
