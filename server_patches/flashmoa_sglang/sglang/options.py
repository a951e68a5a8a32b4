"""The plugin's own arguments on SGLang's command line."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from functools import cache
from math import inf
from typing import Any, ClassVar, Self, cast


def option(default: Any, help_text: str, choices: Sequence[str] = ()) -> Any:
    """Declare a field of :class:`ServerOptions`. An empty default means none."""
    return field(default=default, metadata={"help": help_text, "choices": choices})


class ServerOptions:
    """Arguments of a plugin on SGLang's command line: the fields of a frozen dataclass.

    SGLang's own arguments are a dataclass that takes no more fields. So these arguments reach every
    process through the environment, which child processes inherit.
    """

    TITLE: ClassVar[str]

    @classmethod
    def from_environment(cls) -> Self:
        """Return the options of this process.

        Raises: ValueError if a value in the environment is invalid.
        """
        values: dict[str, Any] = {}
        for option in _fields(cls):
            value = os.environ.get(_environment_variable(option.name))
            if value is not None:
                try:
                    values[option.name] = type(option.default)(value)
                except ValueError as error:
                    message = f"{flag(option.name)} must be a number, not {value!r}."
                    raise ValueError(message) from error
        return cls(**values)

    @classmethod
    def add_arguments(cls, _result: None, parser: argparse.ArgumentParser) -> None:
        """Add an argument for each field; runs after ``ServerArgs.add_cli_args``."""
        group = parser.add_argument_group(cls.TITLE)
        for option in _fields(cls):
            default = "none" if option.default == "" else option.default
            group.add_argument(
                flag(option.name),
                action=_EnvironmentAction,
                const=cls,
                help=f"{option.metadata['help']} Default: {default}.",
            )

    def check_choices(self) -> None:
        """Raise ValueError if a field has a value that is not one of its choices."""
        for option in _fields(type(self)):
            if choices := option.metadata["choices"]:
                value = getattr(self, option.name)
                self.require(option.name, value in choices, f"one of {', '.join(choices)}")

    def require(self, name: str, is_valid: bool, wanted: str) -> None:
        """Raise ValueError, which names the argument and its valid values, unless it is valid."""
        if not is_valid:
            raise ValueError(f"{flag(name)} must be {wanted}, not {getattr(self, name)!r}.")


class _EnvironmentAction(argparse._StoreAction):
    """Puts an argument into the environment, and checks it.

    It is a kind of ``store``, because SGLang takes few others from a ``--config`` file.
    """

    def __init__(self, *args: Any, const: type[ServerOptions], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._options = const

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        name = self.dest.removeprefix("flashmoa_")
        choices = {option.name: option.metadata["choices"] for option in _fields(self._options)}
        if "off" in choices[name]:
            # In a file, YAML takes an unquoted on or off for a truth value.
            values = {"true": "on", "false": "off"}.get(values.lower(), values)
        os.environ[_environment_variable(name)] = values
        try:
            self._options.from_environment()
        except ValueError as error:
            parser.error(str(error))


@dataclass(frozen=True, slots=True)
class Options(ServerOptions):
    """The plugin's arguments, each as ``--flashmoa-NAME``; the help texts below explain them.

    Raises: ValueError if a value is invalid; the message says which values are valid.
    """

    TITLE: ClassVar[str] = "FlashMoA"

    schedule: str = option(
        "sglang",
        "Order of waiting requests: sglang (SGLang's --schedule-policy) or sjf (shortest job "
        "first).",
        ("sglang", "sjf"),
    )
    intra_turn: str = option(
        "auto",
        "How requests share prefixes that are not computed yet: auto (a request waits until "
        "another one has computed the prefix) or off.",
        ("auto", "off"),
    )
    itl_budget: float = option(
        2.0,
        "The longest decode step with mixed prefill while prompt streams are open, as a multiple "
        "of the step without prefill. At most 1: streams wait until no request decodes.",
    )
    itl_ms: str = option(
        "",
        "The longest decode step in milliseconds with tokens that ride along with it, whatever the "
        "budget: 40; 40,5=20 for another limit while a request of SGLang's priority 5 decodes; or "
        "5=20 for this limit alone. Where nothing fits, streams wait until no such request "
        "decodes.",
    )
    costs: str = option(
        "",
        "A file with the answer of GET /flashmoa/info of an engine that runs the same model on the "
        "same hardware: this engine reads the costs of forwards from it instead of measuring them "
        "at start.",
    )
    asyncep: str = option(
        "off",
        "Where the experts of a mixture-of-experts model are: on the device (off), or copied there "
        "ahead of the computation from host memory (h2d), from the devices of other replicas (d2d) "
        "or from both (hybrid).",
        ("off", "h2d", "d2d", "hybrid"),
    )
    asyncep_slots: int = option(
        2,
        "With --flashmoa-asyncep: how many layers' experts the device has room for, besides the "
        "first layer's.",
    )
    asyncep_replica: str = option(
        "",
        "With d2d and hybrid: the rank of this replica and the number of replicas, as RANK/SIZE "
        "with ranks from 0: 0/2 and 1/2.",
    )
    asyncep_group: str = option(
        "default",
        "With d2d and hybrid: the name of this group of replicas, if there are several groups on a "
        "machine.",
    )
    asyncep_on_device: float = option(
        0.5,
        "With hybrid: the part of the experts that the replicas' devices have together, between 0 "
        "and 1; the rest is in host memory.",
    )
    saturation: int = option(
        0,
        "Prefills wait until together they have this many tokens; 0: the number that is measured "
        "with h2d.",
    )
    saturation_wait: float = option(
        0.2,
        "The most seconds that a prefill waits for --flashmoa-saturation; 0: prefills do not wait.",
    )
    kv_cache: str = option(
        "on",
        "Keep the KV of every layer (on), or of one layer at a time (off), which is for "
        "prefill-only work.",
        ("on", "off"),
    )
    scoring: str = option(
        "on",
        "On a model that generates text: serve /v1/score, /v1/rerank and /v1/classify by prefills "
        "(on), or leave these routes to SGLang (off).",
        ("on", "off"),
    )
    hold_tool_calls: float = option(
        60.0,
        "Seconds for which the KV of an agent's next prompt is kept while the agent's tools run, "
        "for any client, unless requests need the room; 0: it is ordinary cache.",
    )

    def __post_init__(self) -> None:
        self.check_choices()
        self.require("itl_budget", self.itl_budget > 0, "above 0")
        try:
            limits = self.itl_limits()
        except ValueError:
            limits = {None: -1.0}
        is_limit = all(0 < seconds < inf for seconds in limits.values())
        self.require("itl_ms", is_limit, "milliseconds above 0, as 40, 5=20 or 40,5=20")
        self.require("saturation", self.saturation >= 0, "at least 0")
        # A client that waits longer than a minute assumes that the server has failed.
        self.require("saturation_wait", 0 <= self.saturation_wait <= 60, "between 0 and 60 seconds")
        is_time = 0 <= self.hold_tool_calls <= 3600
        self.require("hold_tool_calls", is_time, "between 0 and 3600 seconds")
        self.require("asyncep_slots", self.asyncep_slots >= 1, "at least 1")
        in_range = 0 < self.asyncep_on_device < 1
        self.require("asyncep_on_device", in_range, "between 0 and 1")
        is_name = re.fullmatch(r"[\w.-]{1,64}", self.asyncep_group, re.ASCII) is not None
        self.require("asyncep_group", is_name, "1 to 64 letters, digits and any of . _ -")
        if self.asyncep_replica:
            self.replica()

    def replica(self) -> tuple[int, int]:
        """Return the rank of this replica, from 0, and the number of replicas.

        Raises: ValueError if ``asyncep_replica`` is not of the form RANK/SIZE.
        """
        match = re.fullmatch(r"(\d{1,4})/(\d{1,4})", self.asyncep_replica, re.ASCII)
        if not match or not int(match[1]) < int(match[2]):
            raise ValueError(
                f"{flag('asyncep_replica')} must be RANK/SIZE, the rank from 0 on: 0/2 and 1/2 "
                f"for two replicas, not {self.asyncep_replica!r}."
            )
        return int(match[1]), int(match[2])

    def itl_limits(self) -> Mapping[int | None, float]:
        """Return the limits of ``itl_ms`` in seconds by priority; ``None`` stands for all others.

        Raises: ValueError if ``itl_ms`` is invalid.
        """
        return _itl_limits(self.itl_ms)

    def on_device(self) -> float:
        return {"d2d": 1.0, "hybrid": self.asyncep_on_device}.get(self.asyncep, 0.0)


@cache
def _itl_limits(text: str) -> Mapping[int | None, float]:
    limits: dict[int | None, float] = {}
    for part in text.split(",") if text else ():
        priority, _, milliseconds = part.rpartition("=")
        limits[int(priority) if priority else None] = float(milliseconds) / 1000
    return limits


def lacks_accelerator() -> bool:
    """Return whether no accelerator can be used, so that SGLang runs on the CPU."""
    import torch

    return not (torch.cuda.is_available() or torch.xpu.is_available())


def device_slowdown() -> float:
    """Return the factor of all times on this engine's modelled GPU (``flashmoa_bench``), else 1.

    It scales waiting times that are short compared with a forward.
    """
    return float(os.environ.get("FLASHMOA_DEVICE_SLOWDOWN", "1"))


def _fields(options: type[ServerOptions]) -> tuple[Field[Any], ...]:
    return fields(cast("Any", options))


def flag(name: str) -> str:
    """Return an option's name on the command line."""
    return f"--flashmoa-{name.replace('_', '-')}"


def _environment_variable(name: str) -> str:
    return f"FLASHMOA_{name.upper()}"
