"""Provide models with experts, and a model that may think."""

import shutil
from pathlib import Path

import pytest
from flashmoa_cpu.tiny_model import build
from tokenizers import Tokenizer

from tests.integration.support import EXPERTS, IS_0_5_12


@pytest.fixture(scope="session")
def thinking_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, for engines with a reasoning parser.

    SGLang 0.5.12 starts with such a parser only if the ends of a thought are tokens.
    """
    if not IS_0_5_12:
        return model
    copied = Path(shutil.copytree(model, tmp_path_factory.mktemp("thinking") / model.name))
    tokenizer = Tokenizer.from_file(str(copied / "tokenizer.json"))
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.save(str(copied / "tokenizer.json"))
    return copied


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
