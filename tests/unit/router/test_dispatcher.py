"""Test the router's queue, and what answers tell it of the prompts that it has placed."""

import anyio

from flashmoa.router.cache_tables import EngineTraits, token_blocks
from flashmoa.router.dispatcher import Dispatcher, NoEngine
from flashmoa.router.flops import TOKENS
from flashmoa.router.policy import PrefixAware
from flashmoa.router.saturation import FullLoad
from tests.unit.router.support import load

SMALL = EngineTraits(TOKENS, FullLoad(20))
PROMPT = token_blocks([1] * 32)


async def test_requests_wait_in_order() -> None:
    dispatcher = Dispatcher(PrefixAware())
    dispatcher.policy.join("a", SMALL)
    served: list[int] = []

    async def ask(number: int) -> None:
        async with dispatcher.place(token_blocks([number] * 32)) as place:
            served.append(number)
            place.receive(b"")

    async with anyio.create_task_group() as group, dispatcher.place(PROMPT):
        group.start_soon(ask, 2)
        await anyio.wait_all_tasks_blocked()
        with anyio.CancelScope() as leaving:
            leaving.cancel()
            await ask(9)
        group.start_soon(ask, 3)
        await anyio.wait_all_tasks_blocked()
        assert served == [] and dispatcher.waiting == 2
    assert served == [2, 3] and dispatcher.waiting == 0


async def test_a_request_fails_if_no_engine_is_left() -> None:
    dispatcher = Dispatcher(PrefixAware())
    dispatcher.policy.join("a", SMALL)
    outcomes: list[str] = []

    async def ask() -> None:
        try:
            async with dispatcher.place(token_blocks([2] * 32)) as place:
                outcomes.append(place.engine)
        except NoEngine:
            outcomes.append("none")

    async with dispatcher.place(PROMPT), anyio.create_task_group() as group:
        group.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        dispatcher.policy.leave("a")
        dispatcher.reconsider()
    dispatcher.policy.join("b", SMALL)
    await ask()
    assert outcomes == ["none", "b"]


async def test_load_falls_with_the_first_piece_or_the_end() -> None:
    policy = PrefixAware()
    policy.join("a", EngineTraits())
    dispatcher = Dispatcher(policy)
    async with dispatcher.place(PROMPT) as placement:
        assert load(policy, "a") == 32
        placement.receive(b'data: {"text": "a"}\n\n')
        assert load(policy, "a") == 0 and policy.matched_tokens("a", PROMPT) == 31
        async with dispatcher.place(token_blocks([2] * 32)):
            assert load(policy, "a") == 32
        assert load(policy, "a") == 0
