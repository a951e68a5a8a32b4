"""A chain of four travel agents, linked: planner -> local -> language -> summary.

The first three run on engine A, the summary on a larger engine B. Each has a destination
guide of some 2,500 tokens in its prompt, so B has much to prefill before its first token;
linked, it does so while the agents before it are still writing.

Without arguments this makes two tiny models, starts two real SGLang engines on this machine's
CPU and measures the chain unlinked, warmed and linked. What tiny models with random weights
say is noise; the timing is real. On your own engines:

    python examples/chain.py --engine-a http://HOST:30000 --model-a NAME \\
                             --engine-b http://HOST:30001 --model-b NAME
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import RoundRobinGroupChat
from rich.console import Console

from flashmoa.autogen import FlashMoAChatCompletionClient
from flashmoa.bench import chain
from flashmoa.bench.models import tiny_model
from flashmoa.engine.local import local_engines

ROOT = Path(__file__).parent
GUIDE = ROOT / "guides" / "nepal.md"
CACHE = ROOT.parent / ".cache"
TASK = "Plan a three day trip to Nepal for two people who like walking and food."
ROLES = {
    "planner": "You propose a day by day plan for the traveller, based on the guide above.",
    "local": "You improve the plan with authentic local places and activities from the guide.",
    "language": "You point out where language or customs matter for this plan, and how to act.",
    "summary": "You merge the plan and every remark into one complete final travel plan.",
}

Client = FlashMoAChatCompletionClient


def build_team(small: Client, large: Client) -> RoundRobinGroupChat:
    """The four agents; only the last one runs on the large model."""
    guide = GUIDE.read_text()
    agents = [
        AssistantAgent(
            name,
            model_client=large if name == "summary" else small,
            system_message=f"{guide}\n\n{role}",
        )
        for name, role in ROLES.items()
    ]
    return RoundRobinGroupChat(agents, max_turns=len(agents))


def client(url: str, model: str, tokens: int) -> Client:
    """Greedy and of fixed length, so that runs can be compared token for token."""
    return FlashMoAChatCompletionClient(
        model=model,
        base_url=url,
        temperature=0,
        max_tokens=tokens,
        extra_body={"ignore_eos": True},
    )


@asynccontextmanager
async def cpu_engines(console: Console) -> AsyncGenerator[tuple[str, str]]:
    """Two SGLang engines with tiny models, one per core."""
    with console.status("making two tiny models (random weights, own tokenizer)"):
        small = await anyio.to_thread.run_sync(tiny_model, "small", [GUIDE], CACHE / "models")
        large = await anyio.to_thread.run_sync(tiny_model, "large", [GUIDE], CACHE / "models")
    with console.status("importing SGLang, once for both engines"):
        scope = local_engines()
        engines = await scope.__aenter__()
    try:
        with console.status("starting engine A on core 0 and engine B on core 1"):
            memory = ["--max-total-tokens", "12000", "--enable-cache-report"]
            a = await engines.start(small, core=0, arguments=memory, wait=False)
            b = await engines.start(large, core=1, arguments=memory)
            await a.wait_until_ready()
        console.print(f"engine A (core 0): {a.url}   engine B (core 1): {b.url}\n")
        yield a.url, b.url
    finally:
        await scope.__aexit__(None, None, None)


async def measure(arguments: argparse.Namespace, console: Console) -> None:
    small = client(arguments.engine_a, arguments.model_a, arguments.tokens)
    large = client(arguments.engine_b, arguments.model_b, arguments.tokens)
    try:
        runs = await chain.measure(
            lambda: build_team(small, large), [small, large], TASK, arguments.repeats, console
        )
    finally:
        await small.close()
        await large.close()
    result = chain.summarise(runs)
    console.print()
    chain.show(result, runs, console)
    chain.save(result, arguments.json)
    console.print(f"\nThe same as JSON: {arguments.json}")


async def main() -> None:
    summary = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument("--engine-a", help="URL of the engine of the first three agents")
    parser.add_argument("--engine-b", help="URL of the summary agent's engine")
    parser.add_argument("--model-a", default="small")
    parser.add_argument("--model-b", default="large")
    parser.add_argument("--tokens", type=int, default=48, help="what each agent writes")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, default=CACHE / "chain.json")
    arguments = parser.parse_args()
    if bool(arguments.engine_a) != bool(arguments.engine_b):
        parser.error("give both --engine-a and --engine-b, or neither")
    console = Console()
    if arguments.engine_a:
        await measure(arguments, console)
        return
    console.print("Real SGLang on this CPU. The models are tiny and untrained: what they say is")
    console.print("noise, the timing is real.\n")
    async with cpu_engines(console) as (arguments.engine_a, arguments.engine_b):
        await measure(arguments, console)


if __name__ == "__main__":
    anyio.run(main)
