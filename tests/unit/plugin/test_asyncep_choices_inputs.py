"""What decides the choices of ``--flashmoa-asyncep``: files of arguments, GPUs and the host."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from flashmoa_sglang import serve
from flashmoa_sglang.asyncep import choices, host_memory
from flashmoa_sglang.releases import RELEASE

from tests.unit.plugin.asyncep_choosing import MODEL, choose, h100


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    # Arguments of the plugin go into the environment.
    with mock.patch.dict(os.environ):
        yield


@pytest.mark.parametrize("mode", ["", "flashmoa-asyncep: h2d\nflashmoa-asyncep-slots: 3\n"])
def test_a_file_of_arguments_is_read_as_the_command_line(
    tmp_path: Path, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(
        f"{mode}model-path: {MODEL}\nchunked-prefill-size: 16384\nenable-dp-attention: false\n"
        "cuda-graph-backend-decode: disabled\n"
    )
    argv = ["--config", str(file)] if mode else ["--flashmoa-asyncep", "h2d", "--config", str(file)]
    argv += ["--host", "::"]
    result = choices.add_choices(argv, h100, host_bytes=64 << 30)
    assert result[-len(argv) :] == argv
    chosen = " ".join(result[: -len(argv)])
    assert "--max-prefill-tokens 16384" in chosen and "--mem-fraction-static 0.94" in chosen
    assert "--chunked-prefill-size" not in chosen
    assert ("--flashmoa-asyncep-slots" in chosen) == (not mode)
    if "--cuda-graph-backend-decode" in RELEASE.NO_GRAPHS:
        assert "--cuda-graph-backend-decode" not in chosen
    assert "not" not in capsys.readouterr().err.replace("is no expert", "")


@pytest.mark.parametrize(("mode", "kv_cache"), [("off", "on"), ("h2d", "off")])
def test_on_and_off_in_a_file_are_no_truth_values(
    tmp_path: Path, mode: str, kv_cache: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(f"flashmoa-asyncep: {mode}\nflashmoa-kv-cache: {kv_cache}\n")
    argv = ["--model-path", MODEL, "--config", str(file)]
    result = choices.add_choices(argv, h100, host_bytes=64 << 30)
    assert (result == argv) == (mode == "off")
    assert ("without chunks" in capsys.readouterr().err) == (kv_cache == "off")


@pytest.mark.parametrize("text", [None, "- a list", "a: [", "a: 1"])
def test_a_file_of_arguments_that_cannot_be_read_is_left_to_sglang(
    tmp_path: Path, text: str | None
) -> None:
    file = tmp_path / "server.yaml"
    if text:
        file.write_text(text)
    assert "--mem-fraction-static" in choose(f"--config {file}")


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
        (None, "--tp 2 --dp 2 --base-gpu-id 4", "4,5,6,7"),
        (None, "--tp 2 --dp 2 --enable-dp-attention", "0,1"),
        ("5,6,7", "--tp 2 --gpu-id-step 2", "5,7"),
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
    smi(f'[ "$1 $2 $3" = "-i {device} --query-gpu=memory.free" ] && echo "90000\n81559"')
    command = choices._parse(shlex.split(given))
    assert choices._ask_nvidia_smi(command) == h100(None)


@pytest.mark.parametrize(
    ("script", "visible", "problem"),
    [
        (None, "", "nvidia-smi does not tell the memory of GPU 0 ("),
        ("exit 6", "", "nvidia-smi does not tell the memory of GPU 0 ("),
        ("echo '[N/A]'", "", "nvidia-smi does not tell the memory of GPU 0 ("),
        ("echo 81559", "7", "CUDA_VISIBLE_DEVICES has no GPU number 1 (--base-gpu-id,"),
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


def test_more_machines_than_gpus_are_named(
    smi: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    smi("echo 81559")
    assert choose("--nnodes 2", free_memory=None) == []
    problem = "nothing is chosen, because --nnodes 2 machines are more than the GPUs"
    assert problem in capsys.readouterr().err


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
    # On 0.5.12 it would ask SGLang's platforms, which import what is replaced here.
    monkeypatch.setattr(RELEASE, "server_arguments", lambda argv: argv)
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    smi("echo 81559")
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 64 << 30)
    given = ["--model-path", MODEL, "--flashmoa-asyncep", "h2d"]
    with pytest.raises(SystemExit, match=r"--mem-fraction-static 0\.77 .*--flashmoa-asyncep h2d"):
        serve.serve(given)
