"""Engines that all tests share: SGLang is imported once for all, and they last for the session."""

import json
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from flashmoa_sglang.sglang.releases import installed
from hypothesis import settings

from flashmoa.engine import EngineClient
from flashmoa.engine.local import (
    LocalEngine,
    LocalEngines,
    local_engines,
    tiny_model,
    wait_for_costs,
)
from tests.event_loop import no_unhandled_errors, unhandled_errors  # noqa: F401
from tests.integration.engine_costs import remember_costs
from tests.integration.support import FIRST_CORE, SECOND_CORE, Words

# These run in an environment of their own; see tests/integration/openai/test_frameworks.py.
collect_ignore = ["frameworks"]

ROOT = Path(__file__).parent.parent
GUIDE = ROOT / "examples" / "guides" / "nepal.md"
POOL = 12000
# Without it, later releases keep no answers of the Responses API to be continued.
_STORE = [] if installed() == "0.5.12.post1" else ["--enable-response-store"]
# The time of a Hypothesis example depends on the other load of the machine.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def model() -> Path:
    """A model so small that tests take time for the engine and not for arithmetic."""
    return tiny_model("test", [GUIDE], ROOT / ".cache" / "models")


@pytest.fixture(scope="session")
async def engines() -> AsyncGenerator[LocalEngines]:
    async with local_engines() as running:
        yield running


@pytest.fixture(scope="session")
async def engine(engines: LocalEngines, model: Path) -> LocalEngine:
    """An engine with the plugin; a leak that its own memory check finds is a crash."""
    started = await engines.start(
        model,
        core=FIRST_CORE,
        arguments=[
            "--max-total-tokens", str(POOL), "--enable-cache-report",
            # Tests check that no stream is left. test_tool_gaps.py has an engine that holds.
            "--tool-call-parser", "glm", "--flashmoa-hold-tool-calls", "0",
            # A random model might write white space only, to the last token.
            "--constrained-json-disable-any-whitespace",
            *_STORE,
        ],
        environment={"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1"},
    )  # fmt: skip
    assert (await wait_for_costs(started.url)).costs
    await remember_costs(started, model)
    return started


@pytest.fixture(scope="session")
async def downstream(engines: LocalEngines, model: Path) -> LocalEngine:
    """A second engine with the plugin, on the other core."""
    started = await engines.start(
        model,
        core=SECOND_CORE,
        arguments=["--max-total-tokens", str(POOL), "--enable-cache-report"],
        environment={"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1"},
    )
    assert (await wait_for_costs(started.url)).costs
    return started


@pytest.fixture(scope="session")
async def plain_engine(engines: LocalEngines, model: Path) -> LocalEngine:
    """A stock SGLang server: the CPU platform, but no plugin."""
    return await engines.start(
        model,
        core=SECOND_CORE,
        arguments=["--max-total-tokens", str(POOL), "--enable-cache-report"],
        environment={"SGLANG_PLUGINS": "none"},
    )


@pytest.fixture
async def client(engine: LocalEngine) -> AsyncGenerator[EngineClient]:
    async with EngineClient(engine.url, timeout=60) as connected:
        yield connected


@pytest.fixture
async def downstream_client(downstream: LocalEngine) -> AsyncGenerator[EngineClient]:
    async with EngineClient(downstream.url, timeout=60) as connected:
        yield connected


@pytest.fixture(scope="session")
def guide() -> str:
    return GUIDE.read_text()


@pytest.fixture(scope="session")
def words(model: Path) -> Words:
    """``words(count, seed)`` returns a text of ``count`` single-token words."""
    import random

    tokens = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    # The vocabulary is byte-level; such a token has a space before it.
    vocabulary = [f" {token[1:]}" for token in tokens if token[0] == "Ġ" and token[1:].isalpha()]

    def text(count: int, seed: int) -> str:
        return "The" + "".join(random.Random(seed).choices(vocabulary, k=count - 1))

    return text
