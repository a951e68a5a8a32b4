"""Two engines, a small model's and a larger one's: running ones, or two on this CPU's cores."""

from __future__ import annotations

import argparse
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
from rich.console import Console

from flashmoa.autogen import FlashMoAChatCompletionClient
from flashmoa.engine.local import WITHOUT_OVERLAP, local_engines
from flashmoa_bench.models import tiny_model

# Tokens that an engine on this CPU has KV for.
_POOL = 12000


def duo_arguments(description: str | None, tokens: int) -> argparse.ArgumentParser:
    """A parser of what :func:`duo` needs. ``tokens``: what each agent writes by default."""
    summary = (description or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument("--engine-a", metavar="URL", help="engine of the smaller model")
    parser.add_argument("--engine-b", metavar="URL", help="engine of the larger model")
    parser.add_argument("--model-a", default="small", help="as engine A serves it")
    parser.add_argument("--model-b", default="large", help="as engine B serves it")
    parser.add_argument("--tokens", type=int, default=tokens, help="what each agent writes")
    parser.add_argument("--cache", type=Path, default=Path(".cache"), help="for tiny models")
    return parser


def run_program(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run it; interrupted, it ends without a traceback, once its engines have ended."""
    try:
        anyio.run(main)
    except KeyboardInterrupt:
        raise SystemExit(130) from None


@asynccontextmanager
async def duo(
    arguments: argparse.Namespace, texts: Sequence[Path], console: Console
) -> AsyncGenerator[tuple[FlashMoAChatCompletionClient, FlashMoAChatCompletionClient]]:
    """Clients of the two engines; without URLs, engines are started, one per core.

    Args:
        texts: what the tiny models' tokenizer learns from.

    Raises: ValueError where one URL is given without the other.
    """
    urls = (arguments.engine_a, arguments.engine_b)
    if bool(urls[0]) != bool(urls[1]):
        raise ValueError("give both --engine-a and --engine-b, or neither")
    async with AsyncExitStack() as stack:
        if not urls[0]:
            urls = await stack.enter_async_context(on_this_cpu(arguments.cache, texts, console))
        clients = (
            greedy(urls[0], arguments.model_a, arguments.tokens),
            greedy(urls[1], arguments.model_b, arguments.tokens),
        )
        for client in clients:
            stack.push_async_callback(client.close)
        yield clients


def greedy(url: str, model: str, tokens: int) -> FlashMoAChatCompletionClient:
    """Of fixed length and temperature 0, so that runs can be compared token for token."""
    return FlashMoAChatCompletionClient(
        model=model,
        base_url=url,
        temperature=0,
        max_tokens=tokens,
        extra_body={"ignore_eos": True},
    )


@asynccontextmanager
async def on_this_cpu(
    cache: Path, texts: Sequence[Path], console: Console
) -> AsyncGenerator[tuple[str, str]]:
    """URLs of two engines with tiny models, one per core.

    Args:
        cache: where the models are kept. texts: what their tokenizer learns from.

    Raises: EngineError where one does not start.
    """
    console.print("Real SGLang on this CPU. The models are tiny and untrained: what they say is")
    console.print("noise, the timing is real.\n")
    with console.status("making two tiny models (random weights, own tokenizer)"):
        small = await anyio.to_thread.run_sync(tiny_model, "small", texts, cache / "models")
        large = await anyio.to_thread.run_sync(tiny_model, "large", texts, cache / "models")
    async with AsyncExitStack() as stack:
        with console.status("importing SGLang, once for both engines"):
            engines = await stack.enter_async_context(local_engines())
        with console.status("starting engine A on core 0 and engine B on core 1"):
            memory = ["--max-total-tokens", str(_POOL), "--enable-cache-report"]
            settings = [*memory, *WITHOUT_OVERLAP]
            a = await engines.start(small, core=0, arguments=settings, wait=False)
            b = await engines.start(large, core=1, arguments=settings)
            await a.wait_until_ready()
        console.print(f"engine A (core 0): {a.url}   engine B (core 1): {b.url}\n")
        yield a.url, b.url
