"""Test that what the pages name in the source exists."""

from __future__ import annotations

import re
import subprocess
from importlib import import_module
from pathlib import Path

import pytest

from tests.conftest import ROOT

PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
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
