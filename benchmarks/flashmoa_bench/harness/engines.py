"""The engines that a benchmark compares: running ones, or its own on this CPU."""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import anyio
from rich.console import Console

from flashmoa.engine import EngineClient, EngineError
from flashmoa.engine.local import WITHOUT_OVERLAP, LocalEngine, local_engines
from flashmoa.engine.tiny_models import tiny_model

# A stock SGLang server; the CPU platform stays, it is an entry point of another group.
_STOCK = {"SGLANG_PLUGINS": "none"}
_SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
_WORDS = 20_000
_PROC = Path("/proc")
_SCHEDULER = b"sglang::scheduler"


@dataclass(frozen=True, slots=True)
class Role:
    """One engine of a comparison.

    Attributes:
        plugin: FlashMoA's engine, or a stock one.
        arguments: SGLang's and the plugin's, for an engine that is started here.
        shape, core: of such an engine, where the command line's are not meant.
        model: a folder that such an engine serves, instead of a tiny model made for it.
        optional: left out of the comparison where others are given as URLs and it is not.
    """

    name: str
    plugin: bool
    arguments: tuple[str, ...] = ()
    optional: bool = False
    shape: str | None = None
    core: int | None = None
    model: Path | None = None

    @property
    def flag(self) -> str:
        """Return the command line's flag for its URL."""
        return f"--{self.name.replace('_', '-')}-url"

    def description(self) -> str:
        kind = "FlashMoA's plugin" if self.plugin else "stock SGLang"
        return " ".join([f"{kind}", *self.arguments])


@dataclass(frozen=True, slots=True)
class Engines:
    """Connected engines by the names of their roles, and what is to be said of them.

    Attributes:
        started: those that were started here.
    """

    clients: Mapping[str, EngineClient]
    notes: Mapping[str, str]
    started: Mapping[str, LocalEngine]

    def __getitem__(self, name: str) -> EngineClient:
        return self.clients[name]

    def __contains__(self, name: str) -> bool:
        return name in self.clients


@asynccontextmanager
async def connected(
    roles: Sequence[Role],
    arguments: argparse.Namespace,
    tokens: int,
    console: Console,
    documents: Sequence[Path] = (),
) -> AsyncGenerator[Engines]:
    """Connect to the engines of ``roles``: those whose URLs are given, else engines started here.

    Args:
        arguments: parsed by :func:`flashmoa_bench.harness.command_line.command_line`.
        tokens: the KV pool of an engine started here.
        documents: what its tokenizer learns from, if not from random words.

    Raises: EngineError where some URLs are missing, or an engine does not start.
    """
    urls = _urls(roles, arguments)
    origin = "running, meant to be " if urls else ""
    started: dict[str, LocalEngine] = {}
    async with AsyncExitStack() as stack:
        if not urls:
            started = await stack.enter_async_context(
                _started(roles, arguments, tokens, console, documents)
            )
            urls = {name: engine.url for name, engine in started.items()}
        clients = {
            name: await stack.enter_async_context(EngineClient(url)) for name, url in urls.items()
        }
        notes = {role.name: origin + role.description() for role in roles if role.name in urls}
        await _check(roles, clients)
        yield Engines(clients, notes, started)


def _urls(roles: Sequence[Role], arguments: argparse.Namespace) -> dict[str, str]:
    given = {role.name: getattr(arguments, f"{role.name}_url") for role in roles}
    urls = {name: url for name, url in given.items() if url}
    missing = [role for role in roles if role.name not in urls and not role.optional]
    if urls and missing:
        flags = ", ".join(role.flag for role in missing)
        raise EngineError(f"with running engines all are needed; give {flags}, too")
    return urls


async def _check(roles: Sequence[Role], clients: Mapping[str, EngineClient]) -> None:
    """Check that the engines which should have the plugin have it.

    Raises: PluginMissing if one does not.
    """
    for role in roles:
        if role.plugin and role.name in clients:
            await clients[role.name].info()


@asynccontextmanager
async def _started(
    roles: Sequence[Role],
    arguments: argparse.Namespace,
    tokens: int,
    console: Console,
    documents: Sequence[Path],
) -> AsyncGenerator[dict[str, LocalEngine]]:
    if find_spec("sglang") is None or find_spec("flashmoa_sglang") is None:
        raise EngineError("SGLang and the plugin are not installed here; give engines' URLs")
    models: dict[str, Path] = {}
    for shape in {role.shape or arguments.shape for role in roles if role.model is None}:
        with console.status(f"making a tiny model of shape {shape}"):
            models[shape] = await anyio.to_thread.run_sync(
                tiny_model, shape, documents or texts(arguments), arguments.cache / "models"
            )
    cores = {role.name: arguments.core if role.core is None else role.core for role in roles}
    async with AsyncExitStack() as stack:
        with console.status("importing SGLang, once for all engines"):
            engines = await stack.enter_async_context(local_engines())
        running: dict[str, LocalEngine] = {}
        with console.status(f"starting {len(roles)} engines"):
            for role in roles:
                running[role.name] = await engines.start(
                    role.model or models[role.shape or arguments.shape],
                    core=cores[role.name],
                    arguments=_arguments(role, arguments, tokens),
                    environment=None if role.plugin else _STOCK,
                )
        stack.enter_context(_elsewhere(set(cores.values())))
        yield running


def _arguments(role: Role, arguments: argparse.Namespace, tokens: int) -> list[str]:
    more: list[str] = arguments.plugin_arguments if role.plugin else []
    return [
        *("--max-total-tokens", str(tokens)),
        *WITHOUT_OVERLAP,
        *arguments.engine_arguments,
        *more,
        *role.arguments,
    ]


@contextmanager
def _elsewhere(cores: set[int]) -> Generator[None]:
    """Keep this process off the engines' cores, if there is another one."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, before - cores or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def texts(arguments: argparse.Namespace) -> list[Path]:
    """Return what a tokenizer is trained on: ``--text``, or the same random words every time."""
    given: Path | None = getattr(arguments, "text", None)
    if given is not None:
        return [given]
    dice = random.Random(0)
    made = arguments.cache / "words.txt"
    if not made.exists():
        words = ("".join(dice.choices(_SYLLABLES, k=dice.randint(1, 4))) for _ in range(_WORDS))
        made.parent.mkdir(parents=True, exist_ok=True)
        scratch = made.with_suffix(".partial")
        scratch.write_text(" ".join(words))
        scratch.replace(made)
    return [made]


def single_token_words(model: Path) -> list[str]:
    """Return the words of a byte-level vocabulary that are one token with the space before them."""
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    return [
        " " + token[1:] for token in vocabulary if token.startswith("Ġ") and token[1:].isalpha()
    ]


def peak_resident(leader: int) -> int | None:
    """Return the most memory, in bytes, that an engine's scheduler process ever had resident.

    Args:
        leader: process id of the leader of the session that the engine's processes are in.

    ``None`` if there is no such process, or no ``/proc``.
    """
    peaks = [_high_water(process) for process in _schedulers(leader)]
    return max((peak for peak in peaks if peak is not None), default=None)


def _schedulers(leader: int) -> Iterator[Path]:
    for process in _PROC.glob("[0-9]*"):
        try:
            command = process / "cmdline"
            if os.getsid(int(process.name)) == leader and command.read_bytes().startswith(
                _SCHEDULER
            ):
                yield process
        except OSError:
            continue  # It has ended meanwhile, or belongs to another user.


def _high_water(process: Path) -> int | None:
    try:
        lines = (process / "status").read_text().splitlines()
    except OSError:
        return None
    # As in "VmHWM:     1024 kB".
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), None)
