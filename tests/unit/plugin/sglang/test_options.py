"""Test the plugin's server arguments."""

import argparse
import os
import runpy
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flashmoa_sglang.moe.asyncep import problem
from flashmoa_sglang.sglang.options import Options
from flashmoa_sglang.sglang.releases import RELEASE, TESTED, installed

from tests.conftest import ROOT


@pytest.fixture
def parser(monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    for option in fields(Options):
        name = option.name.upper()
        # After this, monkeypatch also undoes values that a test's parser sets.
        monkeypatch.setenv(f"FLASHMOA_{name}", "")
        monkeypatch.delenv(f"FLASHMOA_{name}")
    parser = argparse.ArgumentParser()
    Options.add_arguments(None, parser)
    return parser


def test_arguments_have_their_documented_defaults(parser: argparse.ArgumentParser) -> None:
    parser.parse_args([])
    assert Options.from_environment() == Options()


def test_help_shows_every_default(parser: argparse.ArgumentParser) -> None:
    text = " ".join(parser.format_help().split())
    assert "0: the number that is measured with h2d. Default: 0." in text
    assert "0/2 and 1/2. Default: none." in text


def test_arguments_go_to_the_environment(parser: argparse.ArgumentParser) -> None:
    parser.parse_args(["--flashmoa-schedule", "sjf", "--flashmoa-itl-budget", "1.5"])
    assert Options.from_environment() == Options(schedule="sjf", itl_budget=1.5)


INVALID = """
schedule=fifo intra-turn=on itl-budget=0 itl-budget=much itl-ms=0 itl-ms=40,high=20 itl-ms=40,,5=20
itl-ms=nan asyncep=nvlink asyncep-slots=0 asyncep-replica=2/2 asyncep-replica=-1/2 asyncep-replica=1
asyncep-on-device=1 asyncep-on-device=0 saturation=-1 saturation=0.5 saturation-wait=61
""".split()  # noqa: SIM905


@pytest.mark.parametrize(
    "given", [*INVALID, "asyncep-group=two words", f"asyncep-group={'a' * 65}"]
)
def test_invalid_values_are_refused_by_name(
    parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str], given: str
) -> None:
    with pytest.raises(SystemExit):
        parser.parse_args([f"--flashmoa-{given}"])
    assert f"--flashmoa-{given.partition('=')[0]}" in capsys.readouterr().err


def test_a_replicas_place_is_read(parser: argparse.ArgumentParser) -> None:
    parser.parse_args(["--flashmoa-asyncep-replica", "1/2", "--flashmoa-asyncep", "d2d"])
    assert Options.from_environment().replica() == (1, 2)


def read_file(parser: argparse.ArgumentParser, release: str, file: Path) -> list[str]:
    """Return the arguments of a ``--config`` file, as a release of SGLang reads it."""
    folder = ROOT / ".cache" / "sglang" / release / "sglang"
    if release == installed():
        spec = find_spec("sglang")
        assert spec is not None and spec.origin is not None
        folder = Path(spec.origin).parent
    assert folder.is_dir(), f"{folder} is missing: run make .cache/sglang/{release}/.ready"
    (source,) = (folder / "srt").rglob("server_args_config_parser.py")
    merger = runpy.run_path(str(source))["ConfigArgumentMerger"](parser)
    return merger.merge_config_with_args(["--config", str(file)])


@pytest.mark.parametrize(
    "release",
    [pytest.param(r, marks=[] if r == installed() else pytest.mark.nightly) for r in TESTED],
)
def test_a_config_file_sets_arguments(
    parser: argparse.ArgumentParser, tmp_path: Path, release: str
) -> None:
    given = "schedule sjf itl-budget 1.5 intra-turn off scoring on kv-cache off asyncep hybrid "
    words = (given + "asyncep-slots 3 asyncep-replica 0/2").split()
    pairs = [(f"flashmoa-{name}", value) for name, value in zip(*[iter(words)] * 2, strict=True)]
    file = tmp_path / "server.yaml"
    file.write_text("".join(f"{name}: {value}\n" for name, value in pairs))
    parser.parse_args(read_file(parser, release, file))
    in_file = {key: value for key, value in os.environ.items() if key.startswith("FLASHMOA_")}
    for name in in_file:
        del os.environ[name]
    parser.parse_args([part for name, value in pairs for part in (f"--{name}", value)])
    assert in_file.items() <= os.environ.items() and Options.from_environment().kv_cache == "off"
    # The command line prevails over the file.
    parser.parse_args([*read_file(parser, release, file), "--flashmoa-asyncep-slots", "4"])
    assert Options.from_environment().asyncep_slots == 4


def graphs(decode: str, prefill: str, device: str = "cuda", **more: Any) -> dict[str, Any]:
    """Return arguments for CUDA graphs with ``decode`` and ``prefill`` backends."""
    backends = {"decode": decode, "prefill": prefill}
    config = {phase: SimpleNamespace(backend=backend) for phase, backend in backends.items()}
    # SGLang 0.5.12 has flags.
    flags = {
        "disable_cuda_graph": decode == "disabled",
        "disable_piecewise_cuda_graph": prefill == "disabled",
    }
    return {"device": device, "cuda_graph_config": SimpleNamespace(**config), **flags, **more}


H2D, D2D = Options(asyncep="h2d"), Options(asyncep="d2d", asyncep_replica="0/2")


@pytest.mark.parametrize(
    ("options", "arguments", "expected"),
    [
        (Options(), graphs("full", "breakable"), None),
        (Options(), {"speculative_algorithm": "EAGLE"}, None),
        (H2D, {}, None),
        (H2D, graphs("full", "breakable"), f"needs {RELEASE.NO_GRAPHS}"),
        (H2D, graphs("full", "disabled"), f"needs {RELEASE.NO_GRAPHS}"),
        (H2D, graphs("disabled", "disabled"), None),
        (
            H2D,
            graphs("disabled", "disabled", mem_fraction_static=-0.3),
            "give --mem-fraction-static",
        ),
        (H2D, {"speculative_algorithm": "EAGLE"}, "--speculative-algorithm"),
        (H2D, {"enable_lora": True}, "merged into the model's weights"),
        (H2D, {"lora_paths": ["a=b"]}, "does not go with --lora-paths"),
        (H2D, {"moe_a2a_backend": "megamoe"}, "--moe-a2a-backend megamoe"),
        (H2D, {"moe_a2a_backend": "deepep"}, None),
        (H2D, {"dwdp_size": 2}, "does not go with --dwdp-size"),
        (H2D, {"dwdp_size": 1, "enable_lora": False, "lora_paths": []}, None),
        (Options(asyncep="d2d"), {}, "must be RANK/SIZE"),
        (D2D, {}, None),
        (Options(asyncep="hybrid"), {}, "--flashmoa-asyncep hybrid: --flashmoa-asyncep-replica"),
        (D2D, {"dp_size": 2}, "a server for each"),
        (D2D, {"tp_size": 2}, "a server for each"),
    ],
)
def test_asyncep_refuses_other_arguments(
    options: Options, arguments: dict[str, Any], expected: str | None
) -> None:
    defaults = graphs("full", "breakable", device="cpu", speculative_algorithm=None)
    # SGLang 0.5.23 has attn_dp_size besides.
    defaults |= dict.fromkeys(("tp_size", "pp_size", "dp_size", "attn_dp_size"), 1)
    defaults |= {"moe_a2a_backend": "none", "mem_fraction_static": 0.8}
    message = problem(SimpleNamespace(**defaults | arguments), options)
    assert (expected in message) if expected and message else message == expected


@pytest.mark.parametrize(
    ("mode", "part"), [("off", 0.0), ("h2d", 0.0), ("d2d", 1.0), ("hybrid", 0.3)]
)
def test_the_mode_decides_the_part_on_devices(mode: str, part: float) -> None:
    assert Options(asyncep=mode, asyncep_on_device=0.3).on_device() == part


def test_limits_between_tokens_are_by_priorities() -> None:
    assert Options().itl_limits() == {}
    assert Options(itl_ms="40").itl_limits() == {None: 0.04}
    assert Options(itl_ms="-1=2.5, 40,5=20").itl_limits() == {-1: 0.0025, None: 0.04, 5: 0.02}
