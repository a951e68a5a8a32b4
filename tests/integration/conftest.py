"""Provide models with experts."""

from pathlib import Path

import pytest
from flashmoa_cpu.tiny_model import build

from tests.integration.support import EXPERTS


@pytest.fixture(scope="session")
def experts_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text to train the tokenizers of models with experts."""
    file = tmp_path_factory.mktemp("experts") / "text.txt"
    file.write_text("A river runs through the valley. " * 50)
    return file


@pytest.fixture(scope="session")
def experts_model(experts_text: Path) -> Path:
    build(experts_text.parent / "model", [experts_text], EXPERTS, seed=0)
    return experts_text.parent / "model"
