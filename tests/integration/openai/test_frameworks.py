"""Test agent frameworks on OpenAI's newest client, which does not go with SGLang's packages."""

from pathlib import Path

import pytest

from flashmoa.engine.local import LocalEngine
from tests.integration.framework_scripts import run_frameworks


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("venv", "files"),
    [
        (
            "frameworks",
            [
                "test_frameworks.py",
                "test_tools.py",
                "test_adk.py",
                "test_agent_framework.py",
                "test_http2.py",
            ],
        ),
        ("frameworks-openai2", ["test_older_openai.py"]),
    ],
)
async def test_the_newest_frameworks_answer_the_same_linked(
    engine: LocalEngine, downstream: LocalEngine, model: Path, venv: str, files: list[str]
) -> None:
    served = {"FLASHMOA_ENGINES": f"{engine.url} {downstream.url}", "FLASHMOA_MODEL": str(model)}
    await run_frameworks(*files, venv=venv, **served)
