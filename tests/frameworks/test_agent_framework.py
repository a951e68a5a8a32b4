"""Test Agent Framework's chats with OpenAI's newest client, on real engines.

In the main environment, its client is the newest that goes with SGLang's packages.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from flashmoa.engine import EngineClient
from flashmoa.frameworks.conformance import check_adapter
from tests.frameworks.conftest import URLS
from tests.integration.frameworks.agent_framework.test_chats import CHATS, run_chat


@pytest.mark.parametrize(("build", "linkable"), CHATS)
async def test_chats_are_linked(guide: str, build: Any, linkable: int) -> None:
    async with EngineClient(URLS[0]) as first, EngineClient(URLS[1]) as second:
        engines = (first, second)
        run = partial(run_chat, build, engines, guide)
        await check_adapter(run, engines, linkable=linkable)
