"""Test LiteLLM's client on a server of mixtures."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashmoa.engine.local import LocalEngine
from flashmoa.moa.serve.application import ServeOptions
from tests.integration.frameworks import run_frameworks
from tests.integration.moa.serving import served


@pytest.mark.anyio
@pytest.mark.nightly
async def test_litellm_reads_answers_and_errors(engine: LocalEngine, tmp_path: Path) -> None:
    async with served(engine, tmp_path, ServeOptions(api_key="secret")) as url:
        await run_frameworks(
            "test_litellm.py",
            FLASHMOA_MOA=url,
            # Otherwise it fetches the prices of models from the network.
            LITELLM_LOCAL_MODEL_COST_MAP="True",
        )
