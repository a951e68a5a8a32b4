"""Read the TOML file of ``flashmoa moa serve`` (``read_file``), whose tables are the settings.

A file that serves one system has its keys at the top. A file that serves several has a table
``[systems.NAME]`` for each. Agents refer to tables ``[models.NAME]`` with ``use = "NAME"``, or with
the name alone. ``docs/mixture-of-agents.md`` has examples, and all keys.
"""

from __future__ import annotations

import tomllib
from abc import abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.dataclasses import dataclass as validated

from flashmoa import EngineClient, FlashMoAError
from flashmoa.engine.connections import engine_url
from flashmoa.moa.council import Council
from flashmoa.moa.early_exit import EarlyExit, EngineEmbedder
from flashmoa.moa.models import Fallback, Model
from flashmoa.moa.prompts import (
    AggregationPrompt,
    ChairPrompt,
    DebatePrompt,
    Layout,
    Memory,
    ReviewPrompt,
)
from flashmoa.moa.run import System, SystemSettings
from flashmoa.moa.settings import (
    NO_OTHERS,
    TOKEN_LIMITS,
    Count,
    Limits,
    Quorum,
    Sampling,
    Steps,
    suggest,
)
from flashmoa.moa.systems import Debate, MixtureOfAgents, Staircase

# What a header can have.
_ApiKey = Annotated[str, Field(pattern="^[ -~]*$")]
_EngineUrl = Annotated[str, AfterValidator(engine_url)]


class ConfigError(FlashMoAError):
    """Raised when a file does not describe a mixture; the message names the wrong key."""


@dataclass(frozen=True, slots=True)
class ServedSystem:
    """A mixture, staircase, debate or council, which clients ask for by its name.

    Attributes:
        engines: the clients of its engines, by URL and API key.
        show_answers: whether an answer's record has the texts of all agents.
    """

    name: str
    system: System
    engines: Mapping[tuple[str, str | None], EngineClient]
    show_answers: bool = False

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
    """The tables ``[models.NAME]``, and a system's engines."""

    models: Mapping[str, dict[str, Any]]
    engines: dict[tuple[str, str | None], EngineClient] = field(
        default_factory=dict[tuple[str, str | None], EngineClient]
    )

    def connect(self, url: str, api_key: str | None) -> EngineClient:
        if (url, api_key) not in self.engines:
            self.engines[url, api_key] = EngineClient(url, api_key=api_key)
        return self.engines[url, api_key]


class _Table(BaseModel):
    """A table of the file. Unknown keys in it are errors."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)


class _NamedModel(Sampling):
    """A table ``[models.NAME]``. The agents that use it may add its engine, or replace any key."""

    model_config = ConfigDict(strict=False)

    engine: _EngineUrl | None = None
    engines: list[_EngineUrl] = Field(default_factory=list[str])
    model: str = "default"
    api_key: _ApiKey | None = None
    repeat: Count = 1
    role: str = ""
    limits: Limits | None = None
    extra_body: dict[str, Any] = Field(default_factory=dict[str, Any])

    @model_validator(mode="after")
    def _names_engines_once(self) -> _NamedModel:
        if self.engine is not None and self.engines:
            raise ValueError("a model has engine = 'URL' or engines = ['URL', ...], not both")
        return self


# A model has one key of each pair.
_ALTERNATIVES = ({"engine", "engines"}, {*TOKEN_LIMITS})


class ModelTable(_NamedModel):
    """``repeat`` agents with one model, and their sampling parameters.

    With several ``engines``, agents take turns: each asks another engine first, and has the others
    as backups. ``extra_body`` has parameters of the engine that :class:`Sampling` does not know.
    """

    @model_validator(mode="before")
    @classmethod
    def _use(cls, table: Any, info: ValidationInfo) -> Any:
        """Return a model's table with the keys of the table that it uses."""
        used: Any = {"use": table} if isinstance(table, str) else table
        if not isinstance(used, dict) or "use" not in used:
            return table
        given = dict(cast("dict[str, Any]", used))
        name, models = str(given.pop("use")), cast("_File", info.context).models
        if name not in models:
            advice = suggest(name, models) if models else "add a table [models.NAME]"
            raise ValueError(f"there is no model {name!r}: {advice}")
        replaced = {each for names in _ALTERNATIVES if given.keys() & names for each in names}
        return {key: one for key, one in models[name].items() if key not in replaced} | given

    @model_validator(mode="after")
    def _has_engine(self) -> ModelTable:
        if self.engine is None and not self.engines:
            raise ValueError("a model needs engine = 'URL', or engines = ['URL', ...]")
        return self

    def build(self, file: _File) -> list[Model]:
        urls = [self.engine] if self.engine is not None else self.engines
        turns = deque(file.connect(url, self.api_key) for url in urls)
        sampling = {**self.given_parameters(), **self.extra_body}
        models: list[Model] = []
        for _ in range(self.repeat):
            first, *backups = turns
            models.append(Model(first, self.model, sampling, backups, self.limits, self.role))
            turns.rotate(-1)
        return models


class _PromptTable(_Table):
    """The keys of an :class:`AggregationPrompt`. A layer's keys go before the system's."""

    layout: Layout | None = None
    instruction: str | None = None
    heading: str | None = None
    closing: str | None = None

    def given(self) -> dict[str, Any]:
        return self.model_dump(include={*_PromptTable.model_fields}, exclude_none=True)


class _LayerTable(_PromptTable):
    """A layer's models and prompt, and the quorum of its readers."""

    models: list[ModelTable] = Field(min_length=1)
    quorum: Quorum | None = None


class _FallbackTable(_Table):
    models: list[ModelTable] = Field(default_factory=list[ModelTable])
    best_answer: bool = True


class _DebateTable(_Table):
    rounds: int = 2
    memory: Memory = "all"


@validated(config=NO_OTHERS, frozen=True, slots=True)
class _EarlyExitTable(EarlyExit):
    """An :class:`EarlyExit` whose embedder is the URL of an engine."""

    embedder: _EngineUrl  # pyright: ignore[reportIncompatibleVariableOverride]
    model: str = "default"
    api_key: _ApiKey | None = None

    def build(self, file: _File) -> EarlyExit:
        given: dict[str, Any] = {key.name: getattr(self, key.name) for key in fields(EarlyExit)}
        given["embedder"] = EngineEmbedder(file.connect(self.embedder, self.api_key), self.model)
        return EarlyExit(**given)


class _SystemTable(_PromptTable):
    """The keys that all kinds of systems have in common."""

    name: str = "moa"
    kind: Literal["mixture", "staircase", "debate", "council"] = "mixture"
    show_answers: bool = False
    limits: Limits = Limits()
    quorum: Quorum | None = None
    fallback: _FallbackTable = _FallbackTable()
    layers: list[_LayerTable] = Field(min_length=1)

    @model_validator(mode="after")
    def _has_effect(self) -> _SystemTable:
        if given := self.layers[0].given():
            names = ", ".join(given)
            raise ValueError(f"the first layer reads no answers; give {names} to a later layer")
        if self.layers[-1].quorum is not None:
            raise ValueError("nobody reads the last layer's answers; give quorum to an earlier one")
        return self

    @abstractmethod
    def build(self, file: _File) -> System:
        """Build what the table describes. Raises: ValueError if its parts do not fit together."""

    def build_agents(self, file: _File) -> list[list[Model]]:
        return [[one for each in layer.models for one in each.build(file)] for layer in self.layers]

    def build_settings(self, file: _File) -> SystemSettings:
        others = [one for each in self.fallback.models for one in each.build(file)]
        fallback = Fallback(others, self.fallback.best_answer)
        return SystemSettings(limits=self.limits, fallback=fallback)

    def build_prompt(self, layer: _LayerTable) -> AggregationPrompt:
        return AggregationPrompt(**{**self.given(), **layer.given()})

    def build_pair(self, file: _File) -> tuple[list[Model], Model, AggregationPrompt]:
        """Return the agents of the first layer, and the aggregator with its prompt."""
        layers = self.build_agents(file)
        if len(layers) != 2 or len(layers[1]) != 1:
            needs = "two layers, and one agent in the second"
            raise ValueError(
                f"its layers have {[*map(len, layers)]} agents; this {self.kind} needs {needs}"
            )
        first, [last] = layers
        return first, last, self.build_prompt(self.layers[1])


class _MixtureTable(_SystemTable):
    topology: str | None = None
    early_exit: _EarlyExitTable | None = None

    def build(self, file: _File) -> System:
        return MixtureOfAgents(
            self.build_agents(file),
            self.topology,
            prompt=[self.build_prompt(layer) for layer in self.layers[1:]],
            quorum=[layer.quorum or self.quorum for layer in self.layers[:-1]],
            **self.build_settings(file),
            early_exit=None if self.early_exit is None else self.early_exit.build(file),
        )


class _StaircaseTable(_SystemTable):
    staircase: Steps = Steps()

    def build(self, file: _File) -> System:
        quorum = self.layers[0].quorum or self.quorum
        proposers, last, prompt = self.build_pair(file)
        return Staircase(
            proposers,
            last,
            prompt=prompt,
            steps=self.staircase,
            quorum=quorum,
            **self.build_settings(file),
        )


class _DebateSystemTable(_SystemTable):
    staircase: Steps | None = None
    debate: _DebateTable = _DebateTable()

    def build(self, file: _File) -> System:
        debaters, last, aggregation = self.build_pair(file)
        return Debate(
            debaters,
            self.debate.rounds,
            last,
            prompt=DebatePrompt(memory=self.debate.memory, aggregation=aggregation),
            staircase=self.staircase,
            quorum=self.layers[0].quorum or self.quorum,
            **self.build_settings(file),
        )


class _CouncilTable(_SystemTable):
    judge: ModelTable | None = None

    def build(self, file: _File) -> System:
        members, chairman, _ = self.build_pair(file)
        if self.judge is not None and self.judge.repeat != 1:
            raise ValueError(f"judge.repeat is {self.judge.repeat}; a council has one judge")
        judge = None if self.judge is None else self.judge.build(file)[0]
        given = {**self.given(), **self.layers[1].given()}
        # The reviewers' prompt, which comes first, has the titles of the answers.
        titles = {name: given[name] for name in ("heading",) if name in given}
        return Council(
            members,
            chairman,
            judge=judge,
            review=ReviewPrompt(**titles),
            prompt=ChairPrompt(**given),
            quorum=self.layers[0].quorum or self.quorum,
            **self.build_settings(file),
        )


_Kind = TypeVar("_Kind", bound=BaseModel)
_KINDS: dict[str, type[_SystemTable]] = {
    "mixture": _MixtureTable,
    "staircase": _StaircaseTable,
    "debate": _DebateSystemTable,
    "council": _CouncilTable,
}
_MODELS = (ModelTable, _LayerTable, _FallbackTable, _DebateTable, *_KINDS.values())
_SETTINGS = (Limits, Quorum, Steps, _EarlyExitTable)
_KEYS = {
    *(name for table in _MODELS for name in table.model_fields),
    *(key.name for table in _SETTINGS for key in fields(table)),
}


def read_file(path: Path) -> list[ServedSystem]:
    """Return the systems that a file describes, in its order.

    Raises:
        OSError: if it cannot be read.
        ConfigError: if it is not valid; the message names the key, its table and the valid values.
    """
    try:
        return read_tables(tomllib.loads(path.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def read_tables(tables: Mapping[str, Any]) -> list[ServedSystem]:
    """Return the systems that a file's tables describe. Raises: ConfigError."""
    tables = dict(tables)
    models = _expect_tables(tables.pop("models", {}), "models")
    for name, table in models.items():
        _check(_NamedModel, table, ("models", name))
    if "systems" not in tables:
        return [_build(tables, models, ())]
    named = _expect_tables(tables.pop("systems"), "systems")
    if tables:
        names = ", ".join(tables)
        raise ConfigError(f"{names}: a file with [systems.NAME] has no such key outside of them")
    if not named:
        raise ConfigError("systems is empty; add a table [systems.NAME]")
    for name, table in named.items():
        if "name" in table:
            raise ConfigError(f"systems.{name} has its name already; leave out name = ...")
    return [
        _build({**table, "name": name}, models, ("systems", name)) for name, table in named.items()
    ]


def _expect_tables(value: Any, name: str) -> dict[str, dict[str, Any]]:
    tables = cast("dict[str, Any]", value) if isinstance(value, dict) else {"": value}
    for key, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(f"{name} must consist of tables [{name}.NAME]; {key!r} is none")
    return tables


def _build(
    table: dict[str, Any], models: Mapping[str, dict[str, Any]], place: tuple[str, ...]
) -> ServedSystem:
    file, kind = _File(models), table.get("kind", "mixture")
    if kind not in [*_KINDS]:
        raise ConfigError(
            f"{'.'.join((*place, 'kind'))} is {kind!r}; use one of {', '.join(_KINDS)}"
        )
    found = _check(_KINDS[kind], table, place, file)
    try:
        return ServedSystem(found.name, found.build(file), file.engines, found.show_answers)
    except ValueError as error:
        raise ConfigError(f"{'.'.join(place) or found.name}: {error}") from error


def _check(
    kind: type[_Kind], table: dict[str, Any], place: tuple[str, ...], file: _File | None = None
) -> _Kind:
    """Return a table with its values. Raises: ConfigError, which names each key and its table."""
    try:
        return kind.model_validate(table, context=file)
    except ValidationError as error:
        problems = [_explain(problem, place) for problem in error.errors(include_url=False)]
        raise ConfigError("; ".join(problems)) from error


def _explain(problem: Any, place: tuple[str, ...]) -> str:
    """Return a problem as a sentence that names the key and its table."""
    *table, key = [*place, *(str(part) for part in problem["loc"])] or [""]
    if problem["type"] not in ("extra_forbidden", "unexpected_keyword_argument"):
        where = ".".join([*table, key])
        return f"{where or 'the file'}: {problem['msg'].removeprefix('Value error, ')}"
    advice = suggest(key, _KEYS, "see the keys in docs/mixture-of-agents.md")
    if key in _KEYS:
        advice = "it is one of another table, or of another kind"
    return f"{'.'.join(table) or 'the file'} has no key {key!r}: {advice}"
