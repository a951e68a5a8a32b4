"""Explain in a sentence why SGLang ended (``find_cause``), from the end of its output."""

from __future__ import annotations

import re

# Patterns to search for in the output, each with the sentence that explains it. The first pattern
# that is found counts. Its groups replace the sentence's {}.
_CAUSES = (
    (r"^(flashmoa-sglang .+)$", "{}"),
    (
        r"(?:error: )(unrecognized arguments: .+|argument .+)$",
        "SGLang does not accept its arguments: {}; see python -m sglang.launch_server --help",
    ),
    (
        r"\[Errno 98\]|[Aa]ddress already in use",
        "a port that SGLang needs is in use; choose another one with --port",
    ),
    (
        r"gated repo|Access to model \S+ is restricted",
        "the model can only be downloaded with an account: set HF_TOKEN to a Hugging Face token",
    ),
    (
        r"We couldn't connect to 'https?://\S+'|LocalEntryNotFoundError"
        r"|Repo id must be in the form|is not a valid model identifier",
        "the model is not a folder here and could not be downloaded; check --model-path and the "
        "network, or give the path of a folder",
    ),
    (
        r"Unrecognized model in (\S+?)\. ",
        "{} is not a model that SGLang knows: its config.json has no model_type",
    ),
    (
        r"Cannot find any model weights with `(.+?)`",
        "{} has no weights (*.safetensors files)",
    ),
    (
        r"'(\w+)' is not a registered model|Model architectures (.+?) are not supported",
        "this SGLang release does not know the model's architecture {}",
    ),
    (
        r"Not enough memory\. Please try to increase --mem-fraction-static",
        "the model's weights leave no room for the KV pool; raise --mem-fraction-static, divide "
        "the model among more GPUs (--tp), or use a smaller one",
    ),
    (
        r"out of memory|OutOfMemoryError|DefaultCPUAllocator|^MemoryError"
        r"|Cannot allocate memory",
        "there is not enough memory; lower --mem-fraction-static or --max-total-tokens, or use a "
        "smaller model",
    ),
    (
        r"Failed to find C compiler|InvalidCxxCompiler|fatal error: Python\.h",
        "SGLang compiles kernels, but found no C compiler or Python headers: "
        "apt-get install gcc python3-dev",
    ),
    (
        r"nvcc: (?:command )?not found|Could not find nvcc|CUDA_HOME environment variable",
        "SGLang compiles kernels, but found no CUDA toolkit; install one and set CUDA_HOME",
    ),
    (r"No space left on device", "the disk is full; free some space"),
    (
        r"^(?:ModuleNotFoundError|ImportError): (.+)\Z",
        "install the missing package: {}",
    ),
)


def find_cause(output: str) -> str | None:
    """Return why SGLang ended, from the end of its output; ``None`` if the cause is unknown."""
    text = output.strip()
    for pattern, sentence in _CAUSES:
        match = re.search(pattern, text, re.MULTILINE)
        if match is not None:
            return sentence.format(*(group for group in match.groups() if group))
    return None
