"""What ``flashmoa serve --flashmoa-asyncep`` chooses by itself. No GPU has run it yet."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from flashmoa_sglang.asyncep import choices
from flashmoa_sglang.releases import RELEASE

from tests.unit.plugin.asyncep_choosing import GRAPHS, MODEL, QWEN3_235B, choose, h100


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
        # One long prompt fills a chunk, which is longer than all that several prompts may have.
        ("--chunked-prefill-size 131072 --max-prefill-tokens 16384", {"static 0.77"}),
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


@pytest.mark.parametrize("given", ["", "--quantization fp8"])
def test_weights_that_are_quantised_after_loading_need_the_hosts_memory_as_they_are_stored(
    given: str,
) -> None:
    with pytest.raises(SystemExit, match="the experts of 47 layers need 5"):
        choose(given, host_bytes=30 << 30)
    stored = json.loads((Path(MODEL) / "config.json").read_text())
    stored["quantization_config"] = {"quant_method": "fp8"}
    assert choose(given, read_config=lambda _: stored, host_bytes=30 << 30)


def test_where_all_is_given_an_unknown_model_is_not_mentioned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = "--chunked-prefill-size 8192 --max-prefill-tokens 8192 --mem-fraction-static 0.5"
    assert choose(given, model=str(tmp_path)) == GRAPHS
    assert "is not divided" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "weights", "on_host"),
    [
        ("--flashmoa-asyncep d2d --flashmoa-asyncep-replica 0/2", 32.7, None),
        ("--flashmoa-asyncep d2d --flashmoa-asyncep-replica 7/8", 12.9, None),
        ("--flashmoa-asyncep hybrid --flashmoa-asyncep-replica 0/2", 19.5, 26.4),
        (
            "--flashmoa-asyncep hybrid --flashmoa-asyncep-on-device 0.25 "
            "--flashmoa-asyncep-replica 1/2",
            12.9,
            39.7,
        ),
    ],
)
def test_a_replicas_share_is_reckoned_with(
    given: str, weights: float, on_host: float | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--chunked-prefill-size" in choose(given)
    said = capsys.readouterr().err
    assert f"{weights} GiB of weights stay on the device" in said
    assert ("pinned" not in said) if on_host is None else (f"{on_host} GiB of host memory" in said)


def test_a_share_that_leaves_no_room_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    given = "--quantization fp8 --flashmoa-asyncep d2d --flashmoa-asyncep-replica 0/2"
    assert choose(given, read_config=lambda _: QWEN3_235B) == GRAPHS
    assert "are for weights (117.8 GiB)" in capsys.readouterr().err
    given = given.replace("0/2", "0/8")
    assert "--mem-fraction-static" in choose(given, read_config=lambda _: QWEN3_235B)


@pytest.mark.parametrize(
    ("given", "weights", "fraction"), [("--tp 2", 3.1, "0.81"), ("--tp 4 --dp 2", 1.6, "0.83")]
)
def test_tensor_parallelism_divides_weights_and_forwards(
    given: str, weights: float, fraction: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert choose(given)[-2:] == ["--mem-fraction-static", fraction]
    said = capsys.readouterr().err
    assert f"{weights} GiB of weights stay" in said and "52.9 GiB of host memory are pin" in said


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("--tp 3", "32 heads and experts of width 768 are not divisible by 3 (--tp-size)"),
        ("--pp-size 2", "that is not reckoned for --pp-size"),
        ("--tp 2 --ep 2", "that is not reckoned for --ep-size"),
        ("--nnodes 2 --tp 16", "that is not reckoned for --nnodes"),
        ("--tp 2 --attn-dp-size 2", "that is not reckoned for --attn-dp-size"),
        ("--tp 2 --attn-cp-size 2", "that is not reckoned for --attn-cp-size"),
        ("--tp 2 --attention-context-parallel-size 2", "that is not reckoned for --attn-cp-size"),
        ("--tp 2 --moe-dp-size 2", "that is not reckoned for --moe-dp-size"),
        ("--tp 2 --dcp-size 2", "that is not reckoned for --dcp-size"),
        ("--tp 2 --dp 2 --enable-dp-attention", "that is not reckoned for --enable-dp-attention"),
        ("--moe-a2a-backend deepep", "that is not reckoned for --moe-a2a-backend"),
        (
            "--flashmoa-asyncep d2d",
            "--flashmoa-asyncep-replica must be RANK/SIZE",
        ),
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


def test_without_asyncep_nothing_is_chosen_or_said(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--model-path", MODEL]
    assert choices.add_choices(argv, h100) == argv
    assert capsys.readouterr().err == ""
