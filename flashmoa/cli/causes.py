"""Why SGLang ended, told from the end of its output: a sentence instead of a stack trace."""

from __future__ import annotations

import re

# The first that is found counts; groups of a pattern stand in its sentence.
_CAUSES = (
    (r"^(flashmoa-sglang .+)$", "{}"),
    (r"(?:error: )(unrecognized arguments: .+|argument .+)$", "SGLang does not take these: {}"),
    (
        r"\[Errno 98\]|[Aa]ddress already in use",
        "a port that it needs is taken; choose another one with --port",
    ),
    (
        r"gated repo|Access to model \S+ is restricted",
        "the model may be downloaded only after logging in: set HF_TOKEN",
    ),
    (
        r"We couldn't connect to 'https?://\S+'|LocalEntryNotFoundError"
        r"|Repo id must be in the form|is not a valid model identifier",
        "the model is neither a folder here nor could it be downloaded; check --model-path and "
        "the network, or give the path of a folder",
    ),
    (
        r"Unrecognized model in (\S+?)\. ",
        "{} is no model that it knows: config.json there names no model_type",
    ),
    (r"Cannot find any model weights with `(.+?)`", "{} has no weights (*.safetensors)"),
    (
        r"'(\w+)' is not a registered model|Model architectures (.+?) are not supported",
        "this SGLang release does not know the model's architecture {}",
    ),
    (
        r"out of memory|OutOfMemoryError|DefaultCPUAllocator|Not enough memory"
        r"|^MemoryError|Cannot allocate memory",
        "there is not enough memory; lower --mem-fraction-static or --max-total-tokens, or take a "
        "smaller model",
    ),
    (
        r"Failed to find C compiler|InvalidCxxCompiler|fatal error: Python\.h",
        "it compiles kernels and finds no C compiler or Python's headers: "
        "apt-get install gcc python3-dev",
    ),
    (
        r"nvcc: (?:command )?not found|Could not find nvcc|CUDA_HOME environment variable",
        "it compiles kernels and finds no CUDA toolkit; install one and set CUDA_HOME",
    ),
    (r"No space left on device", "the disk is full"),
    (r"^(?:ModuleNotFoundError|ImportError): (.+)\Z", "a Python package is missing: {}"),
)


def cause(output: str) -> str | None:
    """A sentence about the end of SGLang's output, if it says something known."""
    text = output.strip()
    for pattern, sentence in _CAUSES:
        found = re.search(pattern, text, re.MULTILINE)
        if found is not None:
            return sentence.format(*(group for group in found.groups() if group))
    return None
