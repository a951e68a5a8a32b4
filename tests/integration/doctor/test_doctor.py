"""The doctor at running engines."""

from __future__ import annotations

import pytest

from flashmoa.doctor import Asked, check_engine
from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine
from tests.integration.support import settled

pytestmark = pytest.mark.anyio


async def test_an_engine_that_links(engine: LocalEngine, client: EngineClient) -> None:
    found = {one.about: one for one in await check_engine(Asked(f"{engine.url}/v1", model="x"))}
    assert not [one for one in found.values() if one.level == "mend"]
    assert found["link"].text.startswith("hit")
    assert "asked for 'x'" in found["model"].text
    assert found["chat template"].level == "ok"
    # Nothing of it stays.
    await settled(client)


async def test_an_engine_without_the_plugin(plain_engine: LocalEngine) -> None:
    (finding,) = await check_engine(Asked(plain_engine.url))
    assert finding.level == "mend" and "without the plugin" in finding.text
    assert "pip install ./server_patches" in finding.remedy
