"""Messages that docs/troubleshooting.md quotes are in the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
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
