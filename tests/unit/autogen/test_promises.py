"""Test how long a client remembers the texts that it has promised."""

from __future__ import annotations

import pytest

from flashmoa import EngineClient, Text
from flashmoa.autogen import _promises
from flashmoa.autogen._promises import Promises
from flashmoa.linking.failure_policy import FailurePolicy
from flashmoa.observe import ignore


def test_finished_texts_are_remembered_up_to_a_number_of_characters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts: dict[str, Text] = {}
    finished: dict[str, int] = {}
    monkeypatch.setattr(_promises, "_texts", texts)
    monkeypatch.setattr(_promises, "_finished", finished)
    monkeypatch.setattr(_promises, "_MAX_CHARACTERS", 25)
    promises = Promises(EngineClient("http://engine"), FailurePolicy(), ignore)
    for number in range(4):
        text = Text(f"{number}")
        texts[text.mark] = text
        text.finish("ten letter")
        promises._end(text)
    assert [text.name for text in texts.values()] == ["2", "3"]
    assert list(finished) == list(texts)
