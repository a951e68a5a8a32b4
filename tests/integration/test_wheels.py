"""Install the wheels of the three packages as a user does: a client alone, and an engine."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import flashmoa
from tests.conftest import GUIDE, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
# The extra that installs the packages of each module.
OPTIONAL = {
    "flashmoa.adk": "adk",
    "flashmoa.agent_framework": "agent-framework",
    "flashmoa.autogen": "autogen",
    "flashmoa.openai": "openai",
}
HANDOFF = """
import sys
from pathlib import Path
import anyio
import flashmoa
from flashmoa.engine.local import local_engines, tiny_model, wait_for_costs
from flashmoa.observe.calls import calls
from flashmoa.observe.summary import link_status

async def main(guide, models):
    async with local_engines() as engines:
        model = tiny_model("test", [guide], models)
        engine = await engines.start(model, core=0, arguments=["--enable-cache-report"])
        assert (await wait_for_costs(engine.url)).costs
        events, text = [], guide.read_text()[:3000]
        async with flashmoa.EngineClient(engine.url) as client:
            async with flashmoa.Workflow(client, listener=events.append) as flow:
                draft = flow.ask([{"role": "user", "content": "Write."}], max_tokens=200)
                read = [{"role": "user", "content": f"{text} {draft}"}]
                await flow.ask(read, max_tokens=4)
    print(flashmoa.__file__, *[link_status(call) for call in calls(events)])

anyio.run(main, *map(Path, sys.argv[1:]))
"""


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command without the variable that tells Python of this checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, env=environment, cwd="/")


def succeed(*command: str | Path) -> str:
    done = run(*command)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    projects = [ROOT, ROOT / "server_patches", ROOT / "benchmarks"]
    succeed(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", folder, *projects)
    return folder


def make_environment(folder: Path) -> Path:
    """Make an empty environment; return its Python."""
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def test_wheels_have_one_version(wheels: Path) -> None:
    names = {wheel.name.split("-py3")[0] for wheel in wheels.iterdir()}
    packages = ("flashmoa", "flashmoa_sglang", "flashmoa_bench")
    assert names == {f"{package}-{flashmoa.__version__}" for package in packages}
    assert f"\n## {flashmoa.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_a_client_is_installed_alone(wheels: Path, tmp_path: Path) -> None:
    """Its error names the command that installs a missing package."""
    python = make_environment(tmp_path / "client")
    succeed(python, "-m", "pip", "install", "--quiet", "--find-links", wheels, "flashmoa")
    succeed(python, "-c", "from flashmoa import EngineClient, Workflow")
    for module, extra in OPTIONAL.items():
        done = run(python, "-c", f"import {module}")
        assert f"pip install 'flashmoa[{extra}]'" in done.stderr
    for command in ("bench", "plan"):
        done = run(python.with_name("flashmoa"), command)
        assert done.returncode == 1 and "else pip install flashmoa-bench" in done.stderr


def test_an_engine_is_installed_beside_sglang(wheels: Path, tmp_path: Path) -> None:
    python = make_environment(tmp_path / "engine")
    packages = Path(
        succeed(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    )
    # SGLang and what else the wheels need are there already, as on a machine that serves models.
    default = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})"
    (packages / "default.pth").write_text(default)
    succeed(python, "-m", "pip", "install", "--quiet", "--no-deps", *wheels.iterdir())
    out = succeed(python, "-c", HANDOFF, GUIDE, ROOT / ".cache" / "models")
    assert str(packages) in out and out.endswith(" whole hit\n")
    assert "--gpu" in succeed(python.with_name("flashmoa"), "plan", "--help")
