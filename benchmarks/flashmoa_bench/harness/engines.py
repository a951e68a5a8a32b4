"""Connect a benchmark to its engines: running engines, or engines that it starts on this CPU."""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyio
from rich.console import Console

from flashmoa.engine import EngineClient
from flashmoa.engine.local import (
    WITHOUT_OVERLAP,
    LocalEngine,
    LocalEngines,
    local_engines,
    tiny_model,
    wait_for_costs,
)
from flashmoa.errors import EngineError
from flashmoa_bench.harness.modelled_gpus import device_environment
from flashmoa_bench.harness.routers import PairStart, start_pd_pairs

# Makes SGLang load only the plugin of modelled GPUs. The CPU platform has its own entry points.
STOCK = {"SGLANG_PLUGINS": "flashmoa_modelled_gpu"}
_SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]


@dataclass(frozen=True, slots=True)
class Role:
    """Describes one of the engines that a benchmark compares.

    Attributes:
        plugin: whether it runs FlashMoA's plugin; otherwise it is a stock engine.
        arguments: SGLang's and the plugin's arguments, for an engine that is started here. Both
            engines of a PD pair take them.
        optional: whether URLs of the other engines are enough for a comparison.
        shape, core: tiny model and core for an engine that is started here; ``None`` for the
            command line's.
        model: folder of a model to serve instead of a tiny one.
        is_pd_pair: whether it is a prefill and a decode engine behind the stock router and, with
            the plugin, a shell router.
    """

    name: str
    plugin: bool
    arguments: tuple[str, ...] = ()
    optional: bool = False
    shape: str | None = None
    core: int | None = None
    model: Path | None = None
    is_pd_pair: bool = False

    @property
    def flag(self) -> str:
        """Return the command-line option for its URL."""
        return f"--{self.name.replace('_', '-')}-url"

    def description(self) -> str:
        kind = "FlashMoA's plugin" if self.plugin else "stock SGLang"
        if self.is_pd_pair:
            kind = f"PD pair, {kind}"
        return " ".join([kind, *self.arguments])


@dataclass(frozen=True, slots=True)
class Engines:
    """Connected engines, by the names of their roles.

    A PD pair that was started here has three clients: ``NAME`` for its router, ``NAME_prefill`` and
    ``NAME_decode`` for its engines. Reports print the ``notes``.
    """

    clients: Mapping[str, EngineClient]
    notes: Mapping[str, str]

    def __getitem__(self, name: str) -> EngineClient:
        return self.clients[name]

    def __contains__(self, name: str) -> bool:
        return name in self.clients


@asynccontextmanager
async def connect_engines(
    roles: Sequence[Role],
    arguments: argparse.Namespace,
    tokens: int,
    console: Console,
    documents: Sequence[Path] = (),
) -> AsyncGenerator[Engines]:
    """Connect to the engines whose URLs are given; without URLs, start engines for all roles.

    Args:
        arguments: the parsed command line.
        tokens: size of the KV pool of an engine that is started here.
        documents: files to train its tokenizer on; by default random words.

    Raises: EngineError if URLs are missing or an engine does not start; PluginMissing if an engine
        lacks its plugin.
    """
    urls = _given_urls(roles, arguments)
    origin = "running, meant to be " if urls else ""
    async with AsyncExitStack() as stack:
        if not urls:
            urls = await stack.enter_async_context(
                _start_engines(roles, arguments, tokens, console, documents)
            )
        clients = {
            name: await stack.enter_async_context(EngineClient(url)) for name, url in urls.items()
        }
        notes = {role.name: origin + role.description() for role in roles if role.name in urls}
        notes |= {name: "an engine of a PD pair" for name in urls if name not in notes}
        for role in roles:
            if role.plugin and role.name in clients:
                await wait_for_costs(clients[role.name].url)
        yield Engines(clients, notes)


def _given_urls(roles: Sequence[Role], arguments: argparse.Namespace) -> dict[str, str]:
    options = {role.name: getattr(arguments, f"{role.name}_url", None) for role in roles}
    urls = {name: url for name, url in options.items() if url}
    missing = [role for role in roles if role.name not in urls and not role.optional]
    if urls and missing:
        flags = ", ".join(role.flag for role in missing)
        raise EngineError(f"with running engines all are needed; give {flags}, too")
    return urls


@asynccontextmanager
async def _start_engines(
    roles: Sequence[Role],
    arguments: argparse.Namespace,
    tokens: int,
    console: Console,
    documents: Sequence[Path],
) -> AsyncGenerator[dict[str, str]]:
    """Start engines for all roles, and yield the URLs of engines and routers, by name."""
    if find_spec("sglang") is None or find_spec("flashmoa_sglang") is None:
        raise EngineError("SGLang and the plugin are not installed here; give engines' URLs")
    models: dict[str, Path] = {}
    for shape in {role.shape or arguments.shape for role in roles if role.model is None}:
        with console.status(f"making a tiny model of shape {shape}"):
            texts, cache = documents or [random_words(arguments.cache)], arguments.cache / "models"
            models[shape] = await anyio.to_thread.run_sync(tiny_model, shape, texts, cache)
    cores = {role.name: arguments.core if role.core is None else role.core for role in roles}
    if arguments.device:
        # These engines mostly sleep. They must not wait for one another.
        cores = dict.fromkeys(cores)
    async with AsyncExitStack() as stack:
        with console.status("importing SGLang, once for all engines"):
            engines = await stack.enter_async_context(local_engines())
        urls, pairs = dict[str, str](), dict[str, PairStart]()
        with console.status(f"starting {len(roles)} engines"):
            for role in roles:
                model = role.model or models[role.shape or arguments.shape]
                if arguments.device:
                    # A hash of the context is the next token, and takes hardly any time.
                    model = f"hash:{model}"
                start = partial(
                    _start,
                    engines,
                    model,
                    _engine_arguments(role, arguments, tokens),
                    core=cores[role.name],
                    environment={
                        **device_environment(arguments, role.name),
                        **({} if role.plugin else STOCK),
                    },
                )
                if role.is_pd_pair:
                    pairs[role.name] = PairStart(start, shell=role.plugin)
                    continue
                urls[role.name] = (await start()).url
                if role.plugin and not arguments.device:
                    # Another engine that starts on the same core would disturb the measurement.
                    await wait_for_costs(urls[role.name])
            for name, pair in (await stack.enter_async_context(start_pd_pairs(pairs))).items():
                urls |= {f"{name}_prefill": pair.prefill.url, f"{name}_decode": pair.decode.url}
                urls[name] = pair.url
        stack.enter_context(_keep_off_cores({core for core in cores.values() if core is not None}))
        yield urls


async def _start(
    engines: LocalEngines,
    model: Path | str,
    arguments: Sequence[str],
    more: Sequence[str] = (),
    **settings: Any,
) -> LocalEngine:
    return await engines.start(model, arguments=[*arguments, *more], **settings)


def _engine_arguments(role: Role, arguments: argparse.Namespace, tokens: int) -> list[str]:
    plugin_arguments: list[str] = arguments.plugin_arguments if role.plugin else []
    # An engine on a modelled GPU takes the GPU's KV pool and schedule.
    on_this_cpu = ["--max-total-tokens", str(tokens), *WITHOUT_OVERLAP]
    return [
        *([] if arguments.device else on_this_cpu),
        *arguments.engine_arguments,
        *plugin_arguments,
        *role.arguments,
    ]


@contextmanager
def _keep_off_cores(cores: set[int]) -> Generator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, before - cores or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def random_words(cache: Path) -> Path:
    """Return a file of random words, the same words every time."""
    file = cache / "words.txt"
    if not file.exists():
        dice = random.Random(0)
        words = ("".join(dice.choices(_SYLLABLES, k=dice.randint(1, 4))) for _ in range(20_000))
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch = file.with_suffix(f".{os.getpid()}")
        scratch.write_text(" ".join(words))
        scratch.replace(file)
    return file
