"""What ``flashmoa serve --flashmoa-asyncep h2d`` chooses by itself. No GPU has run it yet."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flashmoa_sglang import serve
from flashmoa_sglang.asyncep import choices
from flashmoa_sglang.releases import RELEASE

ROOT = Path(__file__).parents[3]
MODEL = str(ROOT / "examples/models/qwen3-30b-a3b")
GRAPHS = RELEASE.NO_GRAPHS.split()


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ASYNCEP", "ASYNCEP_SLOTS", "KV_CACHE"):
        # After this, monkeypatch also undoes values that the arguments set.
        monkeypatch.setenv(f"FLASHMOA_{name}", "")
        monkeypatch.delenv(f"FLASHMOA_{name}")


def h100(_: object) -> int:
    return 81559 << 20


def choose(
    given: str,
    model: str = MODEL,
    free_memory: Callable[[Any], int] | None = h100,
    read_config: Callable[[Any], dict[str, Any]] | None = None,
) -> list[str]:
    """Return the arguments that are chosen on an H100 in addition to those that are given."""
    argv = ["--model-path", model, "--flashmoa-asyncep", "h2d", *shlex.split(given)]
    result = choices.add_choices(argv, free_memory, read_config)
    # The user's arguments come last and prevail.
    assert result[len(result) - len(argv) :] == argv
    return result[: len(result) - len(argv)]


def test_everything_is_chosen_and_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert choose("") == [
        *GRAPHS,
        *("--flashmoa-asyncep-slots", "2"),
        *("--chunked-prefill-size", "131072", "--max-prefill-tokens", "131072"),
        *("--mem-fraction-static", "0.77"),
    ]
    said = capsys.readouterr().err.splitlines()
    mode = "flashmoa serve: --flashmoa-asyncep h2d: chose"
    assert said == [
        f"{mode} {RELEASE.NO_GRAPHS}: a graph would look for experts where they were when it was "
        "made",
        f"{mode} --flashmoa-asyncep-slots 2: with the first layer and all that is no expert, "
        "6.2 GiB of weights stay on the device, and 52.9 GiB of host memory are pinned",
        f"{mode} --chunked-prefill-size 131072 --max-prefill-tokens 131072: long forwards hide the "
        "copies; the tensors of this one take 10.5 GiB",
        f"{mode} --mem-fraction-static 0.77: of 79.6 GiB that are free, 17.9 GiB are left to "
        "forwards, and the KV pool has room for some 584,000 tokens",
    ]


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ("--mem-fraction-static=0.85", {"--chunked-prefill-size 65536"}),
        ("--chunked-prefill-size 16384", {"--max-prefill-tokens 16384", "static 0.94"}),
        ("--max-prefill-tokens 16384", {"--chunked-prefill-size 16384", "static 0.94"}),
        ("--chunked-prefill-size 16384 --max-prefill-tokens 32768", {"static 0.94"}),
        ("--flashmoa-asyncep-slots 4", {"--chunked-prefill-size 131072"}),
        ("--quantization fp8", {"--chunked-prefill-size 131072", "static 0.75"}),
        (f"{RELEASE.NO_GRAPHS}", {"--chunked-prefill-size 131072"}),
    ],
)
def test_what_the_user_gives_is_not_chosen_but_reckoned_with(given: str, chosen: set[str]) -> None:
    text = " ".join(choose(given))
    for part in chosen:
        assert part in text
    for argument in shlex.split(given):
        if argument.startswith("--"):
            assert argument.partition("=")[0] not in text


def test_where_all_is_given_the_model_is_not_read() -> None:
    def read_config(_: object) -> dict[str, Any]:
        raise AssertionError

    given = "--chunked-prefill-size 8192 --max-prefill-tokens 8192 --mem-fraction-static 0.5"
    assert choose(given, read_config=read_config) == GRAPHS


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("--tp 2", "that is reckoned for one GPU only"),
        ("--pp-size 2", "that is reckoned for one GPU only"),
        ("--data-parallel-size 2", "that is reckoned for one GPU only"),
        ("--chunked-prefill-size -1", "without chunks, a forward may be as long as the longest"),
        ("--flashmoa-kv-cache off", "without chunks, a forward may be as long as the longest"),
        ("--max-prefill-tokens 128k", "128k tokens is not a plain number above 0"),
        ("--chunked-prefill-size 0", "without chunks, a forward may be as long as the longest"),
        ("--max-prefill-tokens 0", "0 tokens is not a plain number above 0"),
        ("--dtype float32", "that is not reckoned for --dtype float32"),
        ("--quantization awq", "the memory of quantization 'awq' is not known"),
        ("--mem-fraction-static 0.05", "forwards of 8192 tokens do not fit"),
    ],
)
def test_where_memory_cannot_be_divided_a_sentence_names_the_arguments(
    given: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert choose(given) == GRAPHS
    said = capsys.readouterr().err
    assert f"the device's memory is not divided, because {problem}" in said
    assert (
        "; give --chunked-prefill-size, --max-prefill-tokens and --mem-fraction-static yourself"
        in said
    )


def test_a_model_without_a_configuration_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert choose("", model=str(tmp_path)) == GRAPHS
    said = capsys.readouterr().err
    assert f"because {tmp_path} has no config.json" in said
    assert "; give --chunked-prefill-size" in said


def test_a_model_of_the_hub_is_read_by_its_name() -> None:
    asked: list[str] = []

    def read_config(given: Any) -> dict[str, Any]:
        asked.append(given.model_path)
        return json.loads((Path(MODEL) / "config.json").read_text())

    chosen = choose("", model="Qwen/Qwen3-30B-A3B", read_config=read_config)
    assert asked == ["Qwen/Qwen3-30B-A3B"]
    assert "--mem-fraction-static" in chosen


def test_without_h2d_nothing_is_chosen_or_said(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--model-path", MODEL]
    assert choices.add_choices(argv) == argv
    assert choices.add_choices([*argv, "--flashmoa-asyncep", "d2d"])[:2] == argv
    assert capsys.readouterr().err == ""


def test_a_file_of_arguments_leaves_all_to_the_user(capsys: pytest.CaptureFixture[str]) -> None:
    assert choose("--config server.yaml") == []
    said = capsys.readouterr().err
    assert "nothing is chosen, because what server.yaml (--config) says is read only later" in said
    assert f"give {RELEASE.NO_GRAPHS} and --chunked-prefill-size" in said


def test_on_a_cpu_nothing_is_chosen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(choices, "lacks_accelerator", lambda: True)
    assert choose("", free_memory=None) == []
    assert "nothing is chosen, because no GPU is used" in capsys.readouterr().err


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that puts a shell script in nvidia-smi's place."""
    monkeypatch.setattr(choices, "lacks_accelerator", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))

    def install(script: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    return install


@pytest.mark.parametrize(
    ("visible", "given", "device"),
    [
        (None, "", "0"),
        (None, "--base-gpu-id 3", "3"),
        ("2,5", "", "2"),
        ("2,GPU-5f", "--base-gpu-id 1", "GPU-5f"),
    ],
)
def test_nvidia_smi_is_asked_for_the_gpu_that_is_used(
    smi: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    given: str,
    device: str,
) -> None:
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    smi(f'[ "$1 $2 $3" = "-i {device} --query-gpu=memory.free" ] && echo 81559')
    assert "0.77" in choose(given, free_memory=None)


@pytest.mark.parametrize(
    ("script", "visible", "problem"),
    [
        (None, "", "nvidia-smi does not tell the memory of GPU 0 ("),
        ("exit 6", "", "nvidia-smi does not tell the memory of GPU 0 ("),
        ("echo '[N/A]'", "", "nvidia-smi does not tell the memory of GPU 0 ("),
        ("echo 81559", "7", "CUDA_VISIBLE_DEVICES has no GPU number 1 (--base-gpu-id)"),
    ],
)
def test_a_gpu_whose_memory_is_not_known_is_left_to_the_user(
    smi: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    script: str | None,
    visible: str,
    problem: str,
) -> None:
    if script:
        smi(script)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert choose("--base-gpu-id 1" if visible else "", free_memory=None) == []
    assert f"nothing is chosen, because {problem}" in capsys.readouterr().err


def test_the_server_reads_what_is_chosen(
    smi: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare_server_args(argv: list[str]) -> None:
        raise SystemExit(" ".join(argv))

    for name, attributes in {
        "plugins": {"load_plugins": lambda: None},
        "entrypoints.http_server": {"launch_server": None},
        "server_args": {"prepare_server_args": prepare_server_args},
    }.items():
        monkeypatch.setitem(sys.modules, f"sglang.srt.{name}", SimpleNamespace(**attributes))
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    smi("echo 81559")
    given = ["--model-path", MODEL, "--flashmoa-asyncep", "h2d"]
    with pytest.raises(SystemExit, match=r"--mem-fraction-static 0\.77 .*--flashmoa-asyncep h2d"):
        serve.serve(given)
