"""The programs of docs/recipes.md answer the same linked, and hit their streams."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from flashmoa import EngineClient
from tests.conftest import ROOT
from tests.integration.support import slow, wait_until_idle


@pytest.mark.parametrize(
    ("program", "shown"),
    [
        ("openai_client", ['"status": ?"hit"']),
        ("agent_framework_chain", ["local: hit", "summary: hit"]),
        ("own_framework", [r"[12] of 3 calls linked"]),
        slow("langgraph_chain", [r"LinkClosed\(agent='summary'.*reason='used'"]),
        slow("openai_runs", [r"[1-9]\d* tokens of the prompts were streamed"]),
    ],
)
async def test_a_program_says_that_its_answers_are_the_same_linked(
    program: str,
    shown: list[str],
    client: EngineClient,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))  # They import each other.
    monkeypatch.setattr(sys, "argv", [f"{program}.py", "--engine", client.url])
    await client.flush_cache()
    example: Any = importlib.import_module(program)
    await example.main()
    printed = capsys.readouterr().out
    assert "The same unlinked: True" in printed
    assert all(re.search(text, printed) for text in shown), printed
    await wait_until_idle(client)


def test_the_set_up_makes_the_model_of_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """README's first engine serves it, also without the demo."""
    # Inside another make, such as `make test`, this make would also print its folder.
    monkeypatch.delenv("MAKELEVEL", raising=False)
    monkeypatch.delenv("MAKEFLAGS", raising=False)
    make = ["make", "--dry-run", "setup", f"MODEL={tmp_path / 'missing'}"]
    steps = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert steps.splitlines()[-1] == ".venv/bin/python examples/smollm2.py"
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    smollm2: Any = importlib.import_module("smollm2")
    folder = smollm2.MODELS / "SmolLM2-135M-Instruct"
    assert folder == ROOT / ".cache/models/SmolLM2-135M-Instruct"
    monkeypatch.setattr(smollm2, "smollm2", lambda cache, _progress: cache / folder.name)
    smollm2.main()
    assert ".cache/models/SmolLM2-135M-Instruct" in capsys.readouterr().out


@pytest.mark.slow
def test_the_model_of_the_demo_is_made_of_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a fresh clone: its weights are unpacked, so that SGLang serves them on a CPU."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    folder: Path = importlib.import_module("smollm2").smollm2(tmp_path, print)
    config = json.loads((folder / "config.json").read_text())
    assert (config["dtype"], config.get("quantization_config")) == ("float32", None)
    with safe_open(folder / "model.safetensors", "pt") as weights:
        kinds = {str(weights.get_slice(name).get_dtype()) for name in weights.keys()}  # noqa: SIM118
    assert kinds == {"F32"}
