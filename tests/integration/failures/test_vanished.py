"""Test that a killed client's streams live no longer than it had announced."""

import signal
import sys
from subprocess import DEVNULL, PIPE

import anyio
import pytest

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine
from tests.integration.support import Words, wait_until_held, wait_until_idle

CLIENT = """
import sys, anyio, flashmoa

async def main(url, known):
    settings = flashmoa.EngineSettings(stream_ttl_seconds=2)
    async with flashmoa.EngineClient(url, engine_settings=settings) as engine:
        async with flashmoa.Workflow(engine) as flow:
            draft = flow.text("draft")
            flow.ask([{"role": "user", "content": f"{known} {draft}"}], max_tokens=4)
            draft.write("Of this more will never come.")
            await anyio.sleep_forever()

anyio.run(main, *sys.argv[1:])
"""


@pytest.mark.slow
async def test_the_streams_of_a_killed_client_expire_after_their_ttl(
    engine: LocalEngine, client: EngineClient, words: Words
) -> None:
    await client.flush_cache()
    command = [sys.executable, "-c", CLIENT, engine.url, words(300, 740)]
    async with await anyio.open_process(command, stdin=DEVNULL, stdout=PIPE, stderr=None) as gone:
        await wait_until_held(client)
        # The client keeps the stream alive for longer than its TTL.
        until = anyio.current_time() + 4
        while anyio.current_time() < until:
            assert (await client.info()).prompt_streams == 1
            await anyio.sleep(0.1)
        gone.send_signal(signal.SIGKILL)
        killed = anyio.current_time()
        await gone.wait()
        with anyio.fail_after(30):
            await wait_until_idle(client)
    assert anyio.current_time() - killed < 20
