"""The engines a benchmark compares: running ones, or its own on one core of this CPU."""

from __future__ import annotations

import argparse
import os
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec

import anyio
from rich.console import Console

from flashmoa.bench.models import texts, tiny_model
from flashmoa.engine import EngineClient, EngineError
from flashmoa.engine.local import local_engines

# A stock SGLang server; the CPU platform stays, it is an entry point of another group.
_STOCK = {"SGLANG_PLUGINS": "none"}


@dataclass(frozen=True, slots=True)
class Role:
    """One engine of a comparison.

    Attributes:
        plugin: FlashMoA's engine, or a stock one.
        arguments: SGLang's and the plugin's, for an engine that is started here.
        optional: left out of the comparison where others are given as URLs and it is not.
    """

    name: str
    plugin: bool
    arguments: tuple[str, ...] = ()
    optional: bool = False

    def description(self) -> str:
        kind = "FlashMoA's plugin" if self.plugin else "stock SGLang"
        return " ".join([f"{kind}", *self.arguments])


@dataclass(frozen=True, slots=True)
class Engines:
    """Connected engines by the names of their roles, and what is to be said of them."""

    clients: Mapping[str, EngineClient]
    notes: Mapping[str, str]

    def __getitem__(self, name: str) -> EngineClient:
        return self.clients[name]

    def __contains__(self, name: str) -> bool:
        return name in self.clients


@asynccontextmanager
async def connected(
    roles: Sequence[Role], arguments: argparse.Namespace, tokens: int, console: Console
) -> AsyncGenerator[Engines]:
    """The engines of ``roles``: those whose URLs are given, else started here.

    Args:
        arguments: parsed by :func:`flashmoa.bench.arguments.command_line`.
        tokens: the KV pool of an engine started here.

    Raises: EngineError where some URLs are missing, or an engine does not start.
    """
    urls = _urls(roles, arguments)
    origin = "running, meant to be " if urls else ""
    async with AsyncExitStack() as stack:
        if not urls:
            urls = await stack.enter_async_context(_started(roles, arguments, tokens, console))
        clients = {
            name: await stack.enter_async_context(EngineClient(url)) for name, url in urls.items()
        }
        notes = {role.name: origin + role.description() for role in roles if role.name in urls}
        await _check(roles, clients)
        yield Engines(clients, notes)


def _urls(roles: Sequence[Role], arguments: argparse.Namespace) -> dict[str, str]:
    given = {role.name: getattr(arguments, f"{role.name}_url") for role in roles}
    urls = {name: url for name, url in given.items() if url}
    missing = [role.name for role in roles if role.name not in urls and not role.optional]
    if urls and missing:
        flags = ", ".join(f"--{name}-url" for name in missing)
        raise EngineError(f"with running engines all are needed; give {flags}, too")
    return urls


async def _check(roles: Sequence[Role], clients: Mapping[str, EngineClient]) -> None:
    """Raises: PluginMissing where an engine should have the plugin and does not."""
    for role in roles:
        if role.plugin and role.name in clients:
            await clients[role.name].info()


@asynccontextmanager
async def _started(
    roles: Sequence[Role], arguments: argparse.Namespace, tokens: int, console: Console
) -> AsyncGenerator[dict[str, str]]:
    if find_spec("sglang") is None or find_spec("flashmoa_sglang") is None:
        raise EngineError("SGLang and the plugin are not installed here; give engines' URLs")
    with console.status(f"making a tiny model of shape {arguments.shape}"):
        model = await anyio.to_thread.run_sync(
            tiny_model, arguments.shape, texts(arguments), arguments.cache / "models"
        )
    async with AsyncExitStack() as stack:
        with console.status("importing SGLang, once for all engines"):
            engines = await stack.enter_async_context(local_engines())
        urls: dict[str, str] = {}
        with console.status(f"starting {len(roles)} engines on core {arguments.core}"):
            for role in roles:
                engine = await engines.start(
                    model,
                    core=arguments.core,
                    arguments=_arguments(role, arguments, tokens),
                    environment=None if role.plugin else _STOCK,
                )
                urls[role.name] = engine.url
        stack.enter_context(_elsewhere(arguments.core))
        yield urls


def _arguments(role: Role, arguments: argparse.Namespace, tokens: int) -> list[str]:
    more: list[str] = arguments.plugin_arguments if role.plugin else []
    return [
        *("--max-total-tokens", str(tokens)),
        *arguments.engine_arguments,
        *more,
        *role.arguments,
    ]


@contextmanager
def _elsewhere(core: int) -> Generator[None]:
    """Keep this process off the engines' core, if there is another one."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, before - {core} or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
