"""Calls of the Responses API on real SGLang are linked, and answered the same."""

import asyncio
import inspect
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine
from flashmoa.observe import Event, LinkDeclined, LinkOpened
from flashmoa.observe.calls import calls
from flashmoa.openai import OpenAI, run
from tests.integration.openai.programs import TASK, Clients, chain, play_linked, statuses
from tests.waiting import until

REQUEST: dict[str, Any] = {"temperature": 0, "max_output_tokens": 48}


@pytest.fixture(autouse=True)
def _served_name(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask for the model by its name, as this route of SGLang demands."""
    monkeypatch.setitem(REQUEST, "model", str(model))


LOOK: dict[str, Any] = {
    "type": "function",
    "name": "look",
    "parameters": {
        "type": "object",
        "properties": {"far": {"type": "boolean"}},
        "required": ["far"],
        "additionalProperties": False,
    },
    "strict": True,
}


async def ask(client: Any, *contents: str, stream: bool = False) -> str:
    """Return a client's answer to instructions, if there are two contents, and a user's text."""
    *guide, text = contents
    request = {**REQUEST, "instructions": "".join(guide) or None, "input": text, "stream": stream}
    answer = client.responses.create(**request)
    found: Any = await answer if inspect.isawaitable(answer) else answer
    if not stream:
        return found.output_text
    events = [each async for each in found] if hasattr(found, "__aiter__") else [*found]
    return "".join([each.delta for each in events if each.type == "response.output_text.delta"])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_second_run_is_linked_and_answers_the_same(
    clients: Clients, guide: str, stream: bool
) -> None:
    program = partial(chain, clients, guide[:3000], TASK, stream=stream, ask=ask)
    unlinked = await program()
    assert await play_linked(f"responses {stream}", program) == unlinked
    events: list[Event] = []
    assert await play_linked(f"responses {stream}", program, events) == unlinked
    assert statuses(events) == [None, "hit", "hit"]


async def test_a_program_without_an_event_loop_is_linked(
    clients: Clients, engine: LocalEngine, downstream: LocalEngine, guide: str
) -> None:
    events: list[Event] = []

    def play() -> None:
        with OpenAI(base_url=engine.url) as first, OpenAI(base_url=downstream.url) as second:

            def program() -> list[str]:
                both: Any = Clients(first, second)  # type: ignore[arg-type]
                return asyncio.run(chain(both, guide[:3000], TASK, ask=ask))

            unlinked = program()
            for _ in range(2):
                events.clear()
                with run("blocking responses", listener=events.append):
                    assert program() == unlinked

    await asyncio.to_thread(play)
    assert len(calls(events)) == 3 and "hit" in statuses(events)


async def test_a_request_after_a_tool_is_linked_in_the_first_run(
    clients: Clients, client: EngineClient, guide: str
) -> None:
    events: list[Event] = []

    async def program(*, waits: bool) -> str:
        items: list[Any] = [{"role": "user", "content": TASK}]
        request = {**REQUEST, "instructions": guide[:3000], "tools": [LOOK]}
        forced: Any = {"tool_choice": "required", "parallel_tool_calls": False}
        forced = {**request, **forced, "max_output_tokens": 100}
        called = await clients.first.responses.create(input=items, **forced)
        items += [item.to_dict() for item in called.output]
        ids = [item.call_id for item in called.output if item.type == "function_call"]
        await until(lambda: not waits or any(isinstance(event, LinkOpened) for event in events))
        items += [
            {"type": "function_call_output", "call_id": id_, "output": "A fine place."}
            for id_ in ids
        ]
        done = await clients.first.responses.create(input=items, **request)
        return f"{len(ids)} {done.output_text}"

    unlinked = await program(waits=False)
    assert unlinked.startswith("1 ")
    for _ in ("first", "second"):
        events.clear()
        await client.flush_cache()
        assert await play_linked("looking", partial(program, waits=True), events) == unlinked
        assert statuses(events) == [None, "hit"]


async def test_what_continues_a_stored_answer_runs_unlinked(clients: Clients) -> None:
    async def program() -> str:
        first: Any = await clients.first.responses.create(input=TASK, **REQUEST)
        more = {"previous_response_id": first.id, "input": "Go on."}
        return (await clients.first.responses.create(**more, **REQUEST)).output_text

    unlinked = await program()
    events: list[Event] = []
    for _ in range(2):
        assert await play_linked("stored", program, events) == unlinked
    assert statuses(events) == [None] * 4
    declined = [event.reason for event in events if isinstance(event, LinkDeclined)]
    assert all("stored at the server (previous_response_id)" in reason for reason in declined)
