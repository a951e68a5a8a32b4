"""Test that the names and messages that the pages quote are in the source."""

import ast
import re
import subprocess
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from tests.conftest import ROOT

PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "docs" / "results" / "README.md",
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "server_patches/README.md")),
]
# `flashmoa/link/prompt.py`, `http/streams.py`, `tests/unit/`
_FILE = re.compile(r"`(\w[\w.-]*(?:/[\w.-]+)*(?:/|\.py))`")
# `flashmoa.openai.run()`, `flashmoa.moa.Agent`; what else has dots are attributes of telemetry.
_NAME = re.compile(r"`(flashmoa\w*(?:\.\w+)*\.(?:[A-Z]\w+(?=[`(])|\w+(?=\()))")


@pytest.fixture(scope="module")
def files() -> set[str]:
    """All files of the repository, and their folders with a slash at the end."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    names = [Path(name) for name in listed.split("\0") if name and (ROOT / name).is_file()]
    folders = {f"{parent}/" for name in names for parent in name.parents}
    return {*map(str, names), *folders}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_names_of_the_source_exist(page: Path, files: set[str]) -> None:
    text = page.read_text()
    ends = {f"/{name}" for name in files}
    unknown = [
        name
        for name in _FILE.findall(text)
        if name not in files and not any(end.endswith(f"/{name}") for end in ends)
    ]
    for name in _NAME.findall(text):
        module, _, attribute = name.rpartition(".")
        try:
            known = hasattr(import_module(module), attribute)
        except ImportError as error:
            # The package of an extra that is not installed.
            known = not (error.name or "").startswith("flashmoa")
        unknown += [] if known else [name]
    assert not unknown


# Words that stand for a value in a quoted message.
_PLACEHOLDER = re.compile(
    r"\.\.\.|/flashmoa/info|\b(?:AGENT|CLASS|ERROR|HOST|METHOD|M|N|NAME|PORT|URL|X|on_failure)\b"
)
MESSAGES_OF_SGLANG = (
    "Requested token count exceeds",
    "The input (N tokens) is longer than",
    "operator torchvision::nms does not exist",
)
# Sections with a table whose first column quotes messages.
SECTIONS = (
    "### `CallStarted.unlinked`",
    "### `LinkWaits.reason`",
    "### `LinkDeclined.reason`",
    "## Installing",
    "## Starting an engine",
    "## Calling an engine",
)


def quoted_messages() -> Iterator[str]:
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    for section in SECTIONS:
        part = text.partition(f"\n{section}")[2]
        rows = re.split(r"\n##", part)[0].splitlines()
        for row in rows:
            if row.startswith("| `"):
                yield from re.findall(r"`([^`]+)`", row.split(" | ")[0])


@pytest.fixture(scope="module")
def strings() -> str:
    """Return the strings of the code, one per line, with a space for each value in them."""
    texts = [(ROOT / "Makefile").read_text()]
    for folder in ("flashmoa", "server_patches"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.JoinedStr):
                    texts.append("".join(_constant(part) for part in node.values))
                else:
                    texts.append(_constant(node))
    return re.sub(r"[ \t]+", " ", "\n".join(texts))


def _constant(node: ast.AST) -> str:
    value = node.value if isinstance(node, ast.Constant) else None
    return value if isinstance(value, str) else " "


@pytest.mark.parametrize("message", dict.fromkeys(quoted_messages()))
def test_quoted_messages_are_in_the_code(message: str, strings: str) -> None:
    if message.startswith(MESSAGES_OF_SGLANG) or " " not in message:
        return
    for part in _PLACEHOLDER.split(message):
        words = part.strip(" '.:()[]/")
        assert words in strings, words
