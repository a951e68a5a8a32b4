"""Programs of calls of OpenAI's client, which the tests run linked and unlinked."""

import os
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
import openai

from flashmoa._concurrency import all_of
from flashmoa.observe import Event, LinkClosed, LinkDeclined, LinkOpened
from flashmoa.observe.calls import calls
from flashmoa.openai import AsyncOpenAI, run

# How many random programs are run of each kind; 50 with ``make nightly``.
PROGRAMS = int(os.environ.get("FLASHMOA_PROGRAMS", "4"))
TASK = "Plan three days in Nepal for two people."
TOKENS = 48
SETTINGS: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": TOKENS}
# Letters that come soon in every text of a random model, and never in a call of a tool.
STOP = ["x", "z", "q", "j"]
BODY = {"ignore_eos": True}

Program = Callable[[], Awaitable[list[str]]]


@dataclass(frozen=True, slots=True)
class Clients:
    """One client for each of two engines."""

    first: openai.AsyncOpenAI
    second: openai.AsyncOpenAI


@asynccontextmanager
async def open_clients(engine: str, downstream: str) -> AsyncGenerator[Clients]:
    """Yield clients of the engines at two URLs."""
    async with (
        AsyncOpenAI(base_url=engine, max_retries=0) as first,
        AsyncOpenAI(base_url=f"{downstream}/v1", max_retries=0) as second,
    ):
        yield Clients(first, second)


async def ask(client: openai.AsyncOpenAI, *contents: str, stream: bool = False) -> str:
    """Return the answer to a system message, if there are two contents, and a user's."""
    roles = ("system", "user")[-len(contents) :]
    messages: list[Any] = [
        {"role": role, "content": content} for role, content in zip(roles, contents, strict=True)
    ]
    request: dict[str, Any] = {"messages": messages, "extra_body": BODY, **SETTINGS}
    if not stream:
        return (await client.chat.completions.create(**request)).choices[0].message.content or ""
    pieces: list[str] = []
    async for chunk in await client.chat.completions.create(**request, stream=True):
        pieces += [choice.delta.content or "" for choice in chunk.choices]
    return "".join(pieces)


@dataclass(slots=True)
class _Links:
    """How many links a run has opened."""

    opened: int = 0
    changed: anyio.Event = field(default_factory=anyio.Event)

    def count(self, event: Event) -> None:
        if isinstance(event, LinkOpened):
            self.opened += 1
            self.changed.set()
            self.changed = anyio.Event()


_links: ContextVar[_Links | None] = ContextVar("_links", default=None)


async def links_opened(number: int) -> None:
    """Wait until a watched run has opened ``number`` links.

    On a busy machine, a short answer may be there before the links that it streams into.
    """
    links = _links.get()
    with anyio.move_on_after(30):
        while links is not None and links.opened < number:
            await links.changed.wait()


async def chain(
    clients: Clients, guide: str, task: str, *, stream: bool = False, ask: Callable[..., Any] = ask
) -> list[str]:
    """Return the answers of three agents. The second reads one answer, the third reads both."""
    plan = await ask(clients.first, task, stream=stream)
    await links_opened(1)
    check = await ask(clients.second, f"{guide}\nCheck plans.", f"Check:\n{plan}", stream=stream)
    await links_opened(2)
    whole = f"{task}\nPlan: {plan}\n\nRemarks: {check.strip()}\n\nSum it up."
    return [plan, check, await ask(clients.first, f"{guide}\nSum up.", whole, stream=stream)]


@dataclass(frozen=True, slots=True)
class Agent:
    """A call of a random program.

    Attributes:
        sources: the places of the calls whose answers it reads, in their order in the prompt.
        strips: whether it strips them.
    """

    role: str
    sources: tuple[int, ...]
    strips: bool
    streams: bool
    is_first: bool


Rounds = Sequence[Sequence[Agent]]


def random_program(seed: int) -> list[list[Agent]]:
    """Return rounds of calls. Calls of a round run at once, and read answers of earlier rounds."""
    dice = random.Random(seed)
    rounds: list[list[Agent]] = []
    made = 0
    for _ in range(dice.randint(2, 4)):
        agents: list[Agent] = []
        for _ in range(dice.choice([1, 1, 2])):
            sources = dice.sample(range(made), dice.randint(min(made, 1), min(made, 3)))
            flags = (dice.random() < 0.5 for _ in range(3))
            agents.append(Agent(f"You are agent {dice.random()}.", tuple(sources), *flags))
        rounds.append(agents)
        made += len(agents)
    return rounds


def read(agent: Agent, answers: Sequence[str]) -> str:
    """Return what an agent of a random program is asked, given the answers so far."""
    texts = [answers[source] for source in agent.sources]
    return "\n\n".join(
        [TASK, *([text.strip() for text in texts] if agent.strips else texts), "Go on."]
    )


async def play(
    rounds: Sequence[Sequence[Agent]], call: Callable[[Agent, str], Awaitable[str]]
) -> list[str]:
    """Return the answers of a random program's agents, whose calls are made by ``call``."""
    answers: list[str] = []
    for agents in rounds:
        calls = [partial(call, agent, read(agent, answers)) for agent in agents]
        answers += await all_of(calls)
    return answers


async def play_linked(
    name: str, program: Callable[[], Any], events: list[Event] | None = None
) -> Any:
    """Return what a program returns, run as a run of the program of that name.

    Args:
        events: a list for the run's events, if it is to be watched.
    """
    links = _Links()
    token = _links.set(links if events is not None else None)

    def listener(event: Event) -> None:
        links.count(event)
        if events is not None:
            events.append(event)

    try:
        async with run(name, listener=listener):
            return await program()
    finally:
        _links.reset(token)


def statuses(events: Sequence[Event]) -> list[str | None]:
    """Return the status of each call's prompt stream, in the order of the calls."""
    found = [call.usage and call.usage.prompt_stream for call in calls(events)]
    return [stream.status if stream else None for stream in found]


def closed(events: Sequence[Event]) -> list[str]:
    """Return why links were closed."""
    return [event.reason for event in events if isinstance(event, LinkClosed)]


async def check_programs(
    make: Callable[[Rounds, Clients, str], Program], clients: Clients, guide: str
) -> None:
    """Check that random programs of a framework answer the same linked, and are linked."""
    events: list[Event] = []
    for seed in range(PROGRAMS):
        program = make(random_program(seed), clients, guide[:2000])
        name = f"{make.__name__} {seed}"
        unlinked = await program()
        assert await play_linked(name, program) == unlinked
        assert await play_linked(name, program, events) == unlinked
    made = [call.started for call in calls(events)]
    linked = [call for call in made if call.stream_id is not None]
    late = [call for call in made if call.late]
    declined = [event for event in events if isinstance(event, LinkDeclined)]
    row = (len(made), len(linked), len(late), len(declined))
    print(f"{make.__name__}: %d calls, %d linked, %d late, %d declined, texts the same" % row)
    # The calls of a run's first round cannot be linked.
    first = sum(len(random_program(seed)[0]) for seed in range(PROGRAMS))
    assert len(linked) >= 0.9 * (len(made) - first - len(late))
