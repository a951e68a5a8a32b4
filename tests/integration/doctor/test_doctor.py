"""Test the doctor on running engines."""

from flashmoa.cli.checks import check_engine
from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine
from tests.integration.support import wait_until_idle


async def test_engine_that_links_has_nothing_to_fix(
    engine: LocalEngine, client: EngineClient
) -> None:
    findings = await check_engine(f"{engine.url}/v1", model="x")
    assert not [finding for finding in findings if finding.level == "fix"]
    by_topic = {finding.about: finding for finding in findings}
    assert by_topic["link"].text.startswith("hit")
    assert "requests for 'x'" in by_topic["model"].text
    assert by_topic["chat template"].level == "ok"
    # The check leaves no stream open.
    await wait_until_idle(client)


async def test_engine_without_the_plugin_gets_a_remedy(plain_engine: LocalEngine) -> None:
    (finding,) = await check_engine(plain_engine.url)
    assert finding.level == "note" and "without the plugin" in finding.text
    assert "prefix cache" in finding.text
    assert "pip install ./server_patches" in finding.remedy
