"""Read the TOML file of ``flashmoa moa serve`` (``read_file``), whose tables are the settings.

A file with one model has its keys at the top. A file with several has a table ``[systems.NAME]``
of these keys for each. In both, agents refer to tables ``[models.NAME]`` by ``use = "NAME"``, or by
the name alone. ``docs/mixture-of-agents.md`` has examples, and all keys.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from flashmoa import EngineClient, FlashMoAError
from flashmoa.engine import engine_url
from flashmoa.moa.debate import Debate
from flashmoa.moa.early_exit import EarlyExit, EngineEmbedder
from flashmoa.moa.mixture import MixtureOfAgents, Staircase
from flashmoa.moa.models import Fallback, Model
from flashmoa.moa.prompts import AggregationPrompt, DebatePrompt, Layout, Memory
from flashmoa.moa.run import System, SystemSettings
from flashmoa.moa.sampling import Sampling, suggest
from flashmoa.moa.settings import Budget, Limits, Quorum, Steps
from flashmoa.moa.topology import Topology

# What a header can have.
_ApiKey = Annotated[str, Field(pattern="^[ -~]*$")]
_Kind = TypeVar("_Kind", bound=BaseModel)
# The tables that only some kinds have, and the kinds that have them.
_TABLES = {
    "topology": ("mixture",),
    "early_exit": ("mixture",),
    "staircase": ("staircase", "debate"),
    "debate": ("debate",),
}


class ConfigError(FlashMoAError):
    """Raised when a file does not describe a mixture; the message names the wrong key."""


@dataclass(frozen=True, slots=True)
class ServedSystem:
    """A model of the server.

    Attributes:
        name: what clients ask for.
        engines: the clients of its engines, by URL and API key.
    """

    name: str
    system: System
    engines: Mapping[tuple[str, str | None], EngineClient]

    @property
    def engine_names(self) -> dict[str, str]:
        """Return what clients read in place of each engine's URL: ``engine 1``, ``engine 2``."""
        urls = dict.fromkeys(engine.url for engine in self.engines.values())
        return {url: f"engine {number}" for number, url in enumerate(urls, 1)}

    async def close(self) -> None:
        """Close the connections to its engines."""
        for engine in self.engines.values():
            await engine.close()


@dataclass(slots=True)
class _File:
    """What the tables of one system refer to: the tables ``[models.NAME]``, and engines."""

    models: Mapping[str, dict[str, Any]]
    engines: dict[tuple[str, str | None], EngineClient] = field(
        default_factory=dict[tuple[str, str | None], EngineClient]
    )

    def connect(self, url: str, api_key: str | None) -> EngineClient:
        """Return the client of an engine. Raises: ValueError if the URL is not one."""
        if (url, api_key) not in self.engines:
            self.engines[url, api_key] = EngineClient(url, api_key=api_key)
        return self.engines[url, api_key]


class _Table(BaseModel):
    """A table of the file. Unknown keys in it are errors."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)


class ModelTable(Sampling):
    """``repeat`` agents with one model, and their sampling parameters.

    With several ``engines``, each agent asks another one first, and the others if that fails.
    ``extra_body`` has parameters of the engine that :class:`Sampling` does not know.
    """

    model_config = ConfigDict(strict=False)

    engine: str | None = None
    engines: list[str] = Field(default_factory=list[str])
    model: str = "default"
    api_key: _ApiKey | None = None
    repeat: int = Field(default=1, ge=1)
    role: str = ""
    limits: Limits | None = None
    extra_body: dict[str, Any] = Field(default_factory=dict[str, Any])

    @model_validator(mode="before")
    @classmethod
    def _use(cls, table: Any, info: ValidationInfo) -> Any:
        """Return the table of a model that is given by its name, or with keys besides ``use``."""
        used: Any = {"use": table} if isinstance(table, str) else table
        if not isinstance(used, dict) or "use" not in used:
            return table
        given = dict(cast("dict[str, Any]", used))
        name, models = str(given.pop("use")), cast("_File", info.context).models
        if name not in models:
            advice = suggest(name, models) if models else "add a table [models.NAME]"
            raise ValueError(f"there is no model {name!r}: {advice}")
        return {**models[name], **given}

    @model_validator(mode="after")
    def _has_engine(self) -> ModelTable:
        if (self.engine is None) == (not self.engines):
            raise ValueError("a model needs engine = 'URL', or engines = ['URL', ...]")
        return self

    def build(self, file: _File) -> list[Model]:
        """Return an agent's model for each agent. Their engines take turns at being the first."""
        urls = [self.engine] if self.engine is not None else self.engines
        engines = [file.connect(url, self.api_key) for url in urls]
        sampling = {**self.given_parameters(), **self.extra_body}
        models: list[Model] = []
        for number in range(self.repeat):
            first = number % len(engines)
            backups = [*engines[first + 1 :], *engines[:first]]
            models.append(
                Model(engines[first], self.model, sampling, backups, self.limits, self.role)
            )
        return models


class _PromptTable(_Table):
    """An :class:`AggregationPrompt`; a key that is not given is that of the whole file's."""

    layout: Layout | None = None
    instruction: str | None = None
    heading: str | None = None
    closing: str | None = None

    def given(self) -> dict[str, Any]:
        names = {"layout", "instruction", "heading", "closing"}
        return self.model_dump(include=names, exclude_none=True)


class _LayerTable(_PromptTable):
    """The models of one layer, their prompt, and the quorum of those who read them."""

    models: list[ModelTable] = Field(min_length=1)
    quorum: Quorum | None = None


class _FallbackTable(_Table):
    models: list[ModelTable] = Field(default_factory=list[ModelTable])
    best_answer: bool = True


def _compile(pattern: Any) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, TypeError, OverflowError) as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error


class _DebateTable(_Table):
    """The arguments of :class:`Debate`.

    ``ballot`` is a regular expression: an answer's ballot is the first group of its last match, or
    the whole match if it has no group.
    """

    rounds: int = 2
    memory: Memory = "all"
    ballot: Annotated[re.Pattern[str] | None, BeforeValidator(_compile)] = None

    def extract(self, answer: str) -> str | None:
        """Return the ballot in an answer."""
        matches = list(self.ballot.finditer(answer)) if self.ballot is not None else []
        return matches[-1][min(1, len(matches[-1].groups()))] if matches else None


def _check_threshold(table: Any) -> Any:
    keys = cast("dict[str, Any]", table) if isinstance(table, dict) else {}
    if "threshold" in keys and keys.get("rule") != "threshold":
        raise ValueError("threshold is set, but rule = 'sample' has none; set rule = 'threshold'")
    return cast("Any", table)


@dataclass(frozen=True, slots=True)
class _EarlyExitTable(EarlyExit):
    """An :class:`EarlyExit` whose embedder is the URL of an engine."""

    embedder: Annotated[str, AfterValidator(engine_url)]  # pyright: ignore[reportIncompatibleVariableOverride]
    model: str = "default"
    api_key: _ApiKey | None = None

    def build(self, file: _File, topology: Topology) -> EarlyExit:
        largest = max(len(read) for layer in topology.layers for read in layer)
        if not self.applies_to(largest):
            raise ValueError(
                f"early_exit.min_answers is {self.min_answers}, but at most {largest} answers are "
                "read together, so that none is ever left out"
            )
        given: dict[str, Any] = {key.name: getattr(self, key.name) for key in fields(EarlyExit)}
        given["embedder"] = EngineEmbedder(file.connect(self.embedder, self.api_key), self.model)
        return EarlyExit(**given)


class SystemTable(_PromptTable):
    """A whole file, or the table of one model in a file with several."""

    name: str = "moa"
    kind: Literal["mixture", "staircase", "debate"] = "mixture"
    topology: str | None = None
    early_exit: Annotated[_EarlyExitTable | None, BeforeValidator(_check_threshold)] = None
    limits: Limits = Limits()
    quorum: Quorum | None = None
    budget: Budget | None = None
    fallback: _FallbackTable = _FallbackTable()
    staircase: Steps | None = None
    debate: _DebateTable = _DebateTable()
    layers: list[_LayerTable] = Field(min_length=1)

    def build(self, file: _File) -> System:
        """Build what the table describes. Raises: ValueError if its parts do not fit together."""
        for table, kinds in _TABLES.items():
            if table in self.model_fields_set and self.kind not in kinds:
                raise ValueError(
                    f"{table} is set, but a {self.kind} has none; remove it, or change kind"
                )
        layers = [
            [one for each in layer.models for one in each.build(file)] for layer in self.layers
        ]
        others = [one for each in self.fallback.models for one in each.build(file)]
        early_exit = None
        if self.early_exit is not None:
            topology = Topology.of([*map(len, layers)], self.topology)
            early_exit = self.early_exit.build(file, topology)
        fallback = Fallback(others, self.fallback.best_answer)
        settings = SystemSettings(limits=self.limits, budget=self.budget, fallback=fallback)
        quorums = [layer.quorum or self.quorum for layer in self.layers]
        votes = self.kind == "debate" and self.debate.ballot is not None
        if self.layers[-1].quorum is not None and not votes:
            raise ValueError("the last layer has a quorum, but no agent reads its answers")
        if self.kind == "mixture":
            prompts = [self._prompt(layer) for layer in self.layers[1:]]
            return MixtureOfAgents(
                layers,
                self.topology,
                prompt=prompts,
                early_exit=early_exit,
                quorum=quorums[:-1],
                **settings,
            )
        widths = [len(layer) for layer in layers]
        if len(layers) != (1 if votes else 2) or not (votes or widths[-1] == 1):
            needs = "one layer" if votes else "two layers, and one agent in the second"
            raise ValueError(f"its layers have {widths} agents; this {self.kind} needs {needs}")
        if votes:
            prompt = DebatePrompt(memory=self.debate.memory)
            conclusion = self.debate.extract
        else:
            aggregation = self._prompt(self.layers[1], layout="question-first")
            if self.kind == "staircase":
                return Staircase(
                    layers[0],
                    layers[1][0],
                    prompt=aggregation,
                    steps=self.staircase,
                    quorum=quorums[0],
                    **settings,
                )
            prompt = DebatePrompt(memory=self.debate.memory, aggregation=aggregation)
            conclusion = layers[1][0]
        return Debate(
            layers[0],
            self.debate.rounds,
            conclusion,
            prompt=prompt,
            staircase=self.staircase,
            quorum=quorums[0],
            **settings,
        )

    def _prompt(self, layer: _LayerTable, **defaults: Any) -> AggregationPrompt:
        return AggregationPrompt(**{**defaults, **self.given(), **layer.given()})


def read_file(path: Path) -> list[ServedSystem]:
    """Return what a file describes, in its order.

    Raises:
        OSError: if it cannot be read.
        ConfigError: if it is not valid; the message names the key, its table and what is valid.
    """
    try:
        return read_tables(tomllib.loads(path.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def read_tables(tables: Mapping[str, Any]) -> list[ServedSystem]:
    """Return what the tables of a file describe. Raises: ConfigError, as :func:`read_file`."""
    tables = dict(tables)
    models = _expect_tables(tables.pop("models", {}), "models")
    if "systems" not in tables:
        systems = [_build(tables, models, ())]
    else:
        named = _expect_tables(tables.pop("systems"), "systems")
        if tables:
            names = ", ".join(tables)
            raise ConfigError(
                f"{names}: a file with [systems.NAME] has no such key outside of them"
            )
        if not named:
            raise ConfigError("systems is empty; add a table [systems.NAME]")
        systems = [
            _build({"name": name, **table}, models, ("systems", name))
            for name, table in named.items()
        ]
    for name, table in models.items():  # Those that no agent uses, too; these may add the engine.
        has_engine = "engine" in table or "engines" in table
        whole = table if has_engine else {**table, "engine": ""}
        _validate(ModelTable, whole, _File(models), ("models", name))
    return systems


def _expect_tables(value: Any, name: str) -> dict[str, dict[str, Any]]:
    tables = cast("dict[str, Any]", value) if isinstance(value, dict) else {"": value}
    for key, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(f"{name} must consist of tables [{name}.NAME]; {key!r} is none")
    return tables


def _build(
    table: dict[str, Any], models: Mapping[str, dict[str, Any]], place: tuple[str, ...]
) -> ServedSystem:
    file = _File(models)
    found = _validate(SystemTable, table, file, place)
    if place and found.name != place[-1]:
        raise ConfigError(
            f"{'.'.join(place)}.name: the table is called {place[-1]!r}; leave it out"
        )
    try:
        return ServedSystem(found.name, found.build(file), file.engines)
    except ValueError as error:
        raise ConfigError(f"{'.'.join(place) or found.name}: {error}") from error


def _validate(
    kind: type[_Kind], table: dict[str, Any], file: _File, place: tuple[str, ...]
) -> _Kind:
    """Return what a table describes. Raises: ConfigError, as :func:`read_file`."""
    try:
        return kind.model_validate(table, context=file)
    except ValidationError as error:
        problems = [_explain(problem, kind, place) for problem in error.errors(include_url=False)]
        raise ConfigError("; ".join(problems)) from error


def _explain(problem: Any, kind: type[BaseModel], place: tuple[str, ...]) -> str:
    """Return a problem as a sentence that names the key and its table."""
    *table, key = [str(part) for part in problem["loc"]] or [""]
    if problem["type"] not in ("extra_forbidden", "unexpected_keyword_argument"):
        where = ".".join(part for part in (*place, *table, key) if part)
        return f"{where or 'the file'}: {problem['msg'].removeprefix('Value error, ')}"
    where = ".".join([*place, *table])
    known = _keys_at(kind, table)
    return f"{where or 'the file'} has no key {key!r}: {suggest(key, known)}"


def _keys_at(table: Any, path: list[str]) -> list[str]:
    """Return the keys of the table at a path."""
    for part in path:
        types: dict[str, Any] = get_type_hints(table)
        if part in types:
            table = _find_table(types[part]) or table
    return list(table.model_fields if issubclass(table, BaseModel) else get_type_hints(table))


def _find_table(annotation: Any) -> Any:
    """Return the type of a table, or of the tables in a list, by its annotation."""
    if is_dataclass(annotation):
        return annotation
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_find_table(argument) for argument in get_args(annotation))
    return next((table for table in found if table is not None), None)
