"""Test the plugin's own requests to SGLang."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from flashmoa_sglang.http.engine import Engine
from flashmoa_sglang.http.errors import EngineFailed
from flashmoa_sglang.messages import RequestMark
from flashmoa_sglang.sglang.releases import RELEASE


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stands for SGLang's ``TokenizerManager``; ``outputs`` are the outputs of each request."""
    messages = SimpleNamespace(GenerateReqInput=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", messages)
    monkeypatch.setattr(RELEASE, "resolve_arguments", lambda arguments: arguments)

    async def generate_request(_obj: object, _request: object) -> AsyncGenerator[Any]:
        for meta in made.outputs:
            yield {"meta_info": meta}

    made = SimpleNamespace(
        tokenizer=None,
        server_args=SimpleNamespace(disaggregation_mode="null"),
        generate_request=generate_request,
        outputs=[],
        _result_dispatcher=SimpleNamespace(_mapping={}),
    )
    return made


@pytest.mark.parametrize(
    ("outputs", "says"),
    [
        ([{"finish_reason": {"type": "abort", "message": "too late"}}], "aborted .*: too late. S"),
        ([{"finish_reason": None}, {"finish_reason": {"type": "abort"}}], "aborted .*: aborted. S"),
        ([], "without an answer"),
    ],
)
async def test_a_prefill_without_a_result_has_failed(
    manager: Any, outputs: list[dict[str, Any]], says: str
) -> None:
    engine, manager.outputs = Engine(manager), outputs
    with pytest.raises(EngineFailed, match=says):
        await engine.generate([1, 2], RequestMark(timed=True))
    # The next request succeeds.
    manager.outputs = [{"finish_reason": {"type": "length"}, "prompt_tokens": 2}]
    assert (await engine.generate([1, 2], RequestMark()))["prompt_tokens"] == 2
