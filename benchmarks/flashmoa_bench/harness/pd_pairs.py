"""Start PD pairs (``start_pd_pairs``): two engines each, the stock router, and a shell router."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec

from flashmoa.engine import EngineError
from flashmoa.engine.local import LocalEngine, free_port
from flashmoa_bench.harness.routers import start_pd_router, start_shell_routers

# What each engine of a pair needs on a CPU. The default backup of a decode engine needs a GPU.
_PREFILL = ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port")
_DECODE = (
    *("--disaggregation-mode", "decode"),
    *("--disaggregation-decode-retraction-backup", "cpu_tensor"),
)
# Starts an engine that has the pair's model, given the arguments that make it one of a pair.
StartEngine = Callable[[Sequence[str]], Awaitable[LocalEngine]]


@dataclass(frozen=True, slots=True)
class PairStart:
    """Describes a pair that is started.

    Attributes:
        shell: whether it gets a shell router, for which its engines need the plugin.
        transport: what copies KV from one engine to the other: ``nixl`` or ``mooncake``.
    """

    start_engine: StartEngine
    shell: bool = True
    transport: str = "nixl"


@dataclass(frozen=True, slots=True)
class PdPair:
    """A pair that is running.

    Attributes:
        url: of its shell router, or of the stock router if it has none.
    """

    url: str
    prefill: LocalEngine
    decode: LocalEngine


@asynccontextmanager
async def start_pd_pairs(pairs: Mapping[str, PairStart]) -> AsyncGenerator[dict[str, PdPair]]:
    """Start pairs, and yield them by name once they answer. Shell routers share agents' answers.

    Leaving the context ends the routers; the engines end with their :class:`LocalEngines`.

    Raises: EngineError if an engine or a router does not start, or a package is missing.
    """
    for package in {name for pair in pairs.values() for name in ("sglang_router", pair.transport)}:
        if find_spec(package) is None:
            raise EngineError(
                f"PD pairs need {package}, which is not installed here; "
                "run pip install -r requirements/routers.txt"
            )
    started: dict[str, PdPair] = {}
    async with AsyncExitStack() as stack:
        for name, pair in pairs.items():
            started[name] = await _start_pair(pair, stack)
        shells = [name for name, pair in pairs.items() if pair.shell]
        routed = [(started[name].prefill.url, started[name].url) for name in shells]
        urls = await stack.enter_async_context(start_shell_routers(routed)) if routed else []
        for name, url in zip(shells, urls, strict=True):
            started[name] = PdPair(url, started[name].prefill, started[name].decode)
        yield started


async def _start_pair(pair: PairStart, stack: AsyncExitStack) -> PdPair:
    """Start a pair with the stock router in front of it."""
    bootstrap = free_port()
    transport = ("--disaggregation-transfer-backend", pair.transport)
    prefill = await pair.start_engine([*_PREFILL, str(bootstrap), *transport])
    decode = await pair.start_engine([*_DECODE, *transport])
    router = start_pd_router(prefill.url, bootstrap, decode.url)
    return PdPair(await stack.enter_async_context(router), prefill, decode)
