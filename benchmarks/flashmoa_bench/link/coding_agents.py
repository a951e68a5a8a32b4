"""Replay recorded coding agents whose contexts together need twice the KV pool.

Each agent is a program with the stock OpenAI client: it asks, runs a tool, and asks again with the
tool's result after the conversation so far. Lengths and times of tools are as recorded
(``flashmoa_bench/recorded/coding_agents.json``). The engine writes the words, and each prompt
carries the engine's answers. *Roomy* is stock SGLang with a pool for all agents, as a bound.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Annotated, Any

import openai

from flashmoa.engine import EngineClient
from flashmoa_bench.harness import clock
from flashmoa_bench.harness.command_line import Option, command, positive, positive_float
from flashmoa_bench.harness.engines import Role
from flashmoa_bench.harness.report import Column, Report
from flashmoa_bench.harness.rounds import RoundPlayer, percentile, run_concurrently
from flashmoa_bench.recorded import RecordedTurn, load_agents

# A short call, which a model of random weights writes in few tokens.
_CALL = "[bash()]"
_TOOL: Any = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {}},
    },
}
# Tokens that the chat template and the call add to the words of a first prompt, an answer and a
# result with the benchmark's own models. The agents' final numbers of tokens check them.
AROUND = RecordedTurn(prompt=240, answer=12, result=81, gap=0)


@dataclass(frozen=True, slots=True)
class Return:
    """A request with the results of tools; ``before`` counts the previous prompt and its answer."""

    seconds: float
    before: int
    cached: int

    @property
    def is_found(self) -> bool:
        """Return whether nearly all of the previous prompt and its answer was still cached."""
        return self.cached >= 0.95 * self.before


@dataclass(frozen=True, slots=True)
class Replay:
    """One replay of all agents: its seconds, and the agents' tokens with their last answers."""

    returns: Sequence[Return]
    seconds: float
    tokens: int


async def play(
    client: openai.AsyncOpenAI,
    turns: Sequence[RecordedTurn],
    words: Sequence[str],
    dice: random.Random,
) -> tuple[list[Return], int]:
    """Play an agent's turns; return the requests after the first one, and the final tokens."""

    def write(tokens: int) -> str:
        return " ".join(dice.choices(words, k=max(1, tokens)))

    messages: list[Any] = [{"role": "user", "content": write(turns[0].prompt - AROUND.prompt)}]
    returns: list[Return] = []
    before = 0
    for turn in turns:
        asked = clock.now()
        first, message, usage = await _ask(client, messages, turn.answer)
        if before:
            details = usage.prompt_tokens_details
            cached = details.cached_tokens if details is not None else None
            returns.append(Return(first - asked, before, cached or 0))
        before = usage.prompt_tokens + usage.completion_tokens
        await clock.sleep(turn.gap)
        result = write(turn.result - AROUND.result)
        call_id = message["tool_calls"][0]["id"]
        messages += [message, {"role": "tool", "tool_call_id": call_id, "content": result}]
    return returns, before


async def _ask(
    client: openai.AsyncOpenAI, messages: list[Any], tokens: int
) -> tuple[float, dict[str, Any], Any]:
    """Return the time of the first token, the answer as a message, and the usage."""
    # The client's types do not know these arguments.
    create: Any = client.chat.completions.create
    answer: Any = await create(
        model="default",
        messages=messages,
        max_tokens=longest_answer(tokens),
        stream=True,
        stream_options={"include_usage": True},
        extra_body=calling_a_tool(tokens),
    )
    first, content = 0.0, ""
    usage: Any = None
    call: dict[str, Any] = {"arguments": ""}
    async for chunk in answer:
        first = first or clock.now()
        usage = chunk.usage or usage
        for choice in chunk.choices:
            content += choice.delta.content or ""
            for part in choice.delta.tool_calls or ():
                call["id"] = part.id or call["id"]
                call["name"] = part.function.name or call["name"]
                call["arguments"] += part.function.arguments or ""
    function = {"name": call["name"], "arguments": call["arguments"]}
    calls: list[Any] = [{"id": call["id"], "type": "function", "function": function}]
    return first, {"role": "assistant", "content": content, "tool_calls": calls}, usage


def longest_answer(tokens: int) -> int:
    """Return a limit that does not cut an answer of about that many tokens."""
    return tokens + 60


def calling_a_tool(tokens: int) -> dict[str, Any]:
    """Return fields of a request whose answer has about that many tokens and calls a tool."""
    pattern = _words(max(1, tokens - AROUND.answer)) + re.escape(_CALL)
    return {"tools": [_TOOL], "temperature": 0, "regex": pattern}


def _words(count: int) -> str:
    """Return a pattern of ``count`` + 1 words; each but the first and the last is one token."""
    return f"[a-z]{{2,9}}( [a-z]{{2,12}}){{{count}}}"


async def learn_words(engine: EngineClient) -> list[str]:
    """Return words that the engine's model writes as one token each."""
    count = 400
    async with openai_client(engine) as client:
        answer = await client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": "Words!"}],
            temperature=0,
            max_tokens=4 * count,
            extra_body={"regex": _words(count)},
        )
    words = (answer.choices[0].message.content or "").split()
    return sorted(set(words[1:-1]))


def openai_client(engine: EngineClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{engine.url}/v1", api_key="none", timeout=3600, max_retries=0
    )


# Options that choose the agents.
AGENTS_OPTIONS = (
    Option("--agents", positive, 12, "agents at once, of 24 recorded agents"),
    Option("--turns", positive, 40, "largest number of turns of each"),
    Option("--scale", positive_float, 4.0, "divides all lengths and the time of tools"),
)


def chosen_agents(options: argparse.Namespace) -> list[list[RecordedTurn]]:
    """Return a command line's agents, evenly from short to long ones, with scaled turns."""
    agents, scale = load_agents(), options.scale
    step = len(agents) / options.agents
    places = [int((number + 0.5) * step) for number in range(options.agents)]
    return [
        [
            RecordedTurn(
                max(AROUND.prompt + 1, round(turn.prompt / scale)),
                max(AROUND.answer + 1, round(turn.answer / scale)),
                max(AROUND.result + 1, round(turn.result / scale)),
                turn.gap / scale,
            )
            for turn in agents[place][: options.turns]
        ]
        for place in places
    ]


def tokens_of(turns: Sequence[RecordedTurn]) -> int:
    """Return an agent's tokens with its last answer."""
    grown = sum(turn.answer + turn.result for turn in turns)
    return turns[0].prompt + grown - turns[-1].result


async def replay(
    engine: EngineClient, agents: Sequence[Sequence[RecordedTurn]], words: Sequence[str], seed: int
) -> Replay:
    """Replay all agents at once on an empty cache."""
    await engine.flush_cache()
    started = clock.now()
    async with openai_client(engine) as client:

        async def run(number: int) -> tuple[list[Return], int]:
            return await play(client, agents[number], words, random.Random(seed + number))

        played = await run_concurrently(run, range(len(agents)))
    returns = [each for one, _ in played for each in one]
    return Replay(returns, clock.now() - started, sum(tokens for _, tokens in played))


_ARGUMENTS = ("--enable-cache-report", "--tool-call-parser", "pythonic")
ROLES = (
    Role("roomy", plugin=False, arguments=_ARGUMENTS, optional=True),
    Role("stock", plugin=False, arguments=_ARGUMENTS),
    Role("flashmoa", plugin=True, arguments=_ARGUMENTS),
)


@dataclass(frozen=True, slots=True)
class AgentsRow:
    """One way, over all rounds; times in seconds."""

    way: Annotated[str, Column("")]
    found: Annotated[float, Column("found", "{:.1%}")]
    mean: Annotated[float, Column("mean", "{:.3f}")]
    of_stock: Annotated[float, Column("of stock", "{:.2f}x")]
    p50: Annotated[float, Column("p50", "{:.3f}")]
    p90: Annotated[float, Column("p90", "{:.3f}")]
    p99: Annotated[float, Column("p99", "{:.3f}")]
    seconds: Annotated[float, Column("all agents", "{:.1f}")]


def summarise(rounds: dict[str, list[Replay]]) -> list[AgentsRow]:
    def mean_seconds(way: str) -> float:
        return mean(each.seconds for one in rounds[way] for each in one.returns)

    rows: list[AgentsRow] = []
    for way, replays in rounds.items():
        returns = [each for one in replays for each in one.returns]
        times = [each.seconds for each in returns]
        rows.append(
            AgentsRow(
                way=way,
                found=mean(each.is_found for each in returns),
                mean=mean(times),
                of_stock=mean(times) / mean_seconds("stock"),
                p50=percentile(times, 0.5),
                p90=percentile(times, 0.9),
                p99=percentile(times, 0.99),
                seconds=mean(one.seconds for one in replays),
            )
        )
    return rows


async def _measure(report: Report) -> None:
    options = report.options
    agents = chosen_agents(options)
    need = sum(map(tokens_of, agents))
    pools = {"roomy": 2 * need, "stock": int(need * options.pool)}
    pools["flashmoa"] = pools["stock"]
    roles = [
        replace(role, arguments=(*role.arguments, "--max-total-tokens", str(pools[role.name])))
        for role in ROLES
        if role.name != "roomy" or options.roomy
    ]
    seeds = random.Random(options.seed)
    async with report.connect(roles, pools["stock"]) as engines:
        words = await learn_words(engines["flashmoa"])

        async def run(way: str) -> Replay:
            return await replay(engines[way], agents, words, seeds.randrange(1 << 30))

        ways = [role.name for role in roles if role.name in engines]
        with RoundPlayer(report.console, options.repeats, len(ways)) as player:
            for way in ways:
                await replay(engines[way], [agents[0][:2]], words, options.seed)
            rounds = await player.play(ways, run, warm_up=False)
        rows = summarise(rounds)
        gave_way = sum(rank.gave_way for rank in (await engines["flashmoa"].info()).kv)
    report.show(
        f"{len(agents)} coding agents in a pool for {options.pool:.0%} of their tokens, seconds",
        rows,
        "found: returns from tools that find at least 95 % of the prompt before and its answer. "
        "mean, p50, p90, p99: of their times to the first token.",
        left=("",),
    )
    tokens = rounds["stock"][-1].tokens
    report.console.print(
        f"The pool had {pools['stock']:,} of the {tokens:,} tokens that the agents had in the end. "
        f"Prompts gave way to requests {gave_way} times.\n"
    )
    report.save({"rows": rows, "pool": pools["stock"], "tokens": tokens, "gave_way": gave_way})


main = command(
    "coding_agents",
    __doc__,
    _measure,
    ROLES,
    *AGENTS_OPTIONS,
    Option("--pool", positive_float, 0.5, "KV pool over the agents' final tokens"),
    Option("--roomy", bool, about="also with a pool for all agents"),
    defaults={"repeats": 1},
)
