"""What the examples have in common: the engine they ask, yours or one on this CPU."""

from __future__ import annotations

import argparse
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
from flashmoa_bench.models import tiny_model

from flashmoa.engine.local import local_engines

GUIDE = Path(__file__).parent / "guides" / "nepal.md"
_MODELS = Path(__file__).parent.parent / ".cache" / "models"


def arguments(about: str | None) -> argparse.Namespace:
    """``--engine`` and ``--model``; without, an engine is started here."""
    parser = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    parser.add_argument("--engine", help="URL of a running engine, http://HOST:PORT")
    parser.add_argument("--model", default="tiny", help="as the engine serves it")
    return parser.parse_args()


@asynccontextmanager
async def engine(given: str | None) -> AsyncGenerator[str]:
    """The URL of the engine that was given, or of one with a tiny untrained model on this CPU:
    what that says is noise."""
    if given is not None:
        yield given
        return
    print("Starting an SGLang engine on this CPU with a tiny, untrained model ...")
    model = await anyio.to_thread.run_sync(tiny_model, "small", [GUIDE], _MODELS)
    async with local_engines() as engines:
        started = await engines.start(
            model, arguments=["--max-total-tokens", "12000", "--enable-cache-report"]
        )
        yield started.url
