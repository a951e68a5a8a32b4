"""The end of SGLang's output is explained in a sentence."""

from __future__ import annotations

import pytest

from flashmoa.cli.causes import find_cause

OUTPUTS = {
    "OSError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/no/such'. Use "
    "`repo_type` argument if needed.": "not a folder here and could not be downloaded",
    "OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't "
    "find them in the cached files.": "not a folder here and could not be downloaded",
    "ValueError: Unrecognized model in /x/empty. Should have a `model_type` key in its "
    "config.json.": "/x/empty is not a model that SGLang knows",
    "RuntimeError: Cannot find any model weights with `/x/model`": "/x/model has no weights",
    "ValueError: Cannot find model module. 'FooForCausalLM' is not a registered model in the "
    "Transformers library": "architecture FooForCausalLM",
    "sglang serve: error: unrecognized arguments: --no-such 3": "--no-such 3",
    "flashmoa-sglang cannot run: SGLang 0.5.20 has no x.y. Tested releases: 0.5.18.": (
        "flashmoa-sglang cannot run: SGLang 0.5.20 has no x.y"
    ),
    "ERROR:    [Errno 98] error while attempting to bind on address": "choose another one",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB": "not enough memory",
    "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: "
    "mem_fraction_static=0.8": "raise --mem-fraction-static",
    "RuntimeError: [enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't "
    "allocate memory": "not enough memory",
    "RuntimeError: Failed to find C compiler. Please specify via CC environment variable.": (
        "apt-get install gcc"
    ),
    "Traceback (most recent call last):\nModuleNotFoundError: No module named 'msgspec'": (
        "install the missing package: No module named 'msgspec'"
    ),
}


@pytest.mark.parametrize("output", OUTPUTS, ids=OUTPUTS.values())
def test_known_causes_become_a_sentence(output: str) -> None:
    around = f"Traceback (most recent call last):\n  File x, line 1\n{output}"
    cause = find_cause(
        f"{around}\n[2026] kill_process_tree called\n" if "msgspec" not in output else output
    )
    assert cause is not None and OUTPUTS[output] in cause


def test_warnings_of_successful_starts_are_not_causes() -> None:
    warnings = (
        "Ignore import error: No module named 'triton'\nModuleNotFoundError: No module named 'x'"
    )
    assert find_cause(f"{warnings}\nThe server is fired up and ready to roll!\nAborted") is None
