"""Read the file of ``flashmoa moa serve``, which has one model or several (``read_file``).

A file with one model has its keys at the top, as :class:`MixtureConfig` says. A file with several
has a table of these keys for each, under the name that clients ask for. In both, a model of an
engine that several agents have can be written once::

    [models.small]
    engine = "http://localhost:30000"
    model = "Qwen/Qwen3-4B"
    temperature = 0.7

    [systems.careful]                   # kind = "mixture"
    topology = "4-2-1"
    layers = [
        {models = [{use = "small", repeat = 4}]},
        {models = ["small", {use = "small", temperature = 0.2}]},
        {models = ["small"]},
    ]

    [systems.quick]
    kind = "staircase"
    layers = [{models = ["small", "small"]}, {models = ["small"]}]
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_type_hints

from pydantic import BaseModel, ValidationError

from flashmoa.moa.config import ConfigError, MixtureConfig, ModelConfig
from flashmoa.moa.sampling import suggest

_Table = dict[str, Any]
_Kind = TypeVar("_Kind", bound=BaseModel)


def read_file(path: Path) -> list[MixtureConfig]:
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


def read_tables(file: Mapping[str, Any]) -> list[MixtureConfig]:
    """Return what the tables of a file describe. Raises: ConfigError, as :func:`read_file`."""
    tables = dict(file)
    models = _expect_tables(tables.pop("models", {}), "models")
    configs = _make_configs(tables, models)
    for name, table in models.items():  # Those that no agent uses, too.
        _check_model(name, table)
    return configs


def _make_configs(tables: _Table, models: Mapping[str, _Table]) -> list[MixtureConfig]:
    if "systems" not in tables:
        return [_make_config(tables, models, ())]
    systems = _expect_tables(tables.pop("systems"), "systems")
    if tables:
        names = ", ".join(tables)
        raise ConfigError(f"{names}: a file with [systems.NAME] has no such key outside of them")
    if not systems:
        raise ConfigError("systems is empty; add a table [systems.NAME]")
    configs: list[MixtureConfig] = []
    for name, table in systems.items():
        if "name" in table:
            raise ConfigError(f"systems.{name}.name: the table is called {name!r}; leave it out")
        configs.append(_make_config({**table, "name": name}, models, ("systems", name)))
    return configs


def _expect_tables(value: Any, name: str) -> dict[str, _Table]:
    tables = cast("dict[str, Any]", value) if isinstance(value, dict) else {"": value}
    for key, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(f"{name} must consist of tables [{name}.NAME]; {key!r} is none")
    return tables


def _check_model(name: str, table: _Table) -> None:
    """Check a table [models.NAME]; agents that use it may add the engine."""
    has_engine = "engine" in table or "engines" in table
    _validate(ModelConfig, table if has_engine else {**table, "engine": ""}, ("models", name))


def _make_config(
    table: _Table, models: Mapping[str, _Table], place: tuple[str, ...]
) -> MixtureConfig:
    return _validate(MixtureConfig, _insert_models(table, models, place), place)


def _validate(kind: type[_Kind], table: _Table, place: tuple[str, ...]) -> _Kind:
    """Return what a table describes. Raises: ConfigError, as :func:`read_file`."""
    try:
        return kind.model_validate(table)
    except ValidationError as error:
        problems = [_explain(problem, kind, place) for problem in error.errors(include_url=False)]
        raise ConfigError("; ".join(problems)) from error


def _insert_models(value: Any, models: Mapping[str, _Table], place: tuple[str, ...]) -> Any:
    """Return a value in which lists called ``models`` have tables instead of names of models."""
    if isinstance(value, list):
        items = [
            _insert_models(item, models, (*place, str(number)))
            for number, item in enumerate(cast("list[Any]", value))
        ]
        if place and place[-1] == "models":
            return [_find_model(item, models, (*place, str(n))) for n, item in enumerate(items)]
        return items
    if isinstance(value, dict):
        table = cast("_Table", value)
        # What extra_body has is the engine's, whatever it is called.
        return {
            key: value if key == "extra_body" else _insert_models(value, models, (*place, key))
            for key, value in table.items()
        }
    return value


def _find_model(item: Any, models: Mapping[str, _Table], place: tuple[str, ...]) -> Any:
    """Return the table of a model that is given by its name, or with keys besides ``use``."""
    used: Any = {"use": item} if isinstance(item, str) else item
    if not isinstance(used, dict) or "use" not in used:
        return item
    table = cast("_Table", used)
    name = str(table["use"])
    if name not in models:
        advice = suggest(name, models) if models else "add a table [models.NAME]"
        raise ConfigError(f"{'.'.join(place)}: there is no model {name!r}: {advice}")
    return {**models[name], **{key: table[key] for key in table if key != "use"}}


def _explain(problem: Any, kind: type[BaseModel], place: tuple[str, ...]) -> str:
    """Return a problem as a sentence that names the key and its table."""
    *table, key = [str(part) for part in problem["loc"]] or [""]
    if problem["type"] not in ("extra_forbidden", "unexpected_keyword_argument"):
        where = ".".join(part for part in (*place, *table, key) if part)
        return f"{where or 'the file'}: {problem['msg']}"
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
