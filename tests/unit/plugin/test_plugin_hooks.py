"""A hook that cannot be applied stops the process with a message that says why."""

from __future__ import annotations

import subprocess
import sys

import pytest
from flashmoa_sglang.releases import installed

PRELUDE = """
import flashmoa_sglang.serve  # This prepares the import of SGLang.
import flashmoa_sglang.plugin as plugin
from flashmoa_sglang.plugin import Hook
"""

MISSING = """
plugin.SCHEDULER_HOOKS[0] = Hook(
    "sglang.srt.managers.scheduler.Scheduler.no_such_method", "around", print
)
from sglang.srt.plugins import load_plugins
load_plugins()
print("still running")
"""

NOT_APPLIED = """
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
HookRegistry._apply_target = classmethod(lambda cls, target, hooks: 1 / 0)
load_plugins()
print("still running")
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + script],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "target"),
    [(MISSING, "no_such_method"), (NOT_APPLIED, "did not take the hook on sglang.srt.")],
)
def test_a_broken_hook_stops_the_start(script: str, target: str) -> None:
    done = run(script)
    assert done.returncode != 0
    assert "still running" not in done.stdout
    assert f"flashmoa-sglang cannot run: SGLang {installed()}" in done.stderr
    assert target in done.stderr
