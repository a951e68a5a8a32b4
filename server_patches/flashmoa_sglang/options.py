"""The plugin's own server arguments.

They stand beside SGLang's on the command line and travel to every process through the
environment, which SGLang's children inherit: SGLang's arguments are a closed dataclass.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, fields
from typing import Any

_SCHEDULES = ("sglang", "sjf")
_INTRA_TURN = ("auto", "level", "off")


@dataclass(frozen=True, slots=True)
class Options:
    """``schedule``: the order of waiting requests; SGLang's own, or shortest job first.

    ``intra_turn``: how requests that share what is not computed yet share the computing:
    within one forward where the attention backend allows it (``auto``), one level of the
    radix tree per forward (``level``), or not (``off``).

    ``stream_share``: the share of the engine's time that prompt streams may take while it
    decodes for others; in (0, 1].
    """

    schedule: str = "sglang"
    intra_turn: str = "auto"
    stream_share: float = 0.2

    def __post_init__(self) -> None:
        for name, choices in (("schedule", _SCHEDULES), ("intra_turn", _INTRA_TURN)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{_flag(name)} must be one of {', '.join(choices)}.")
        if not 0 < self.stream_share <= 1:
            raise ValueError(f"{_flag('stream_share')} must be above 0 and at most 1.")

    @classmethod
    def from_environment(cls) -> Options:
        """Raises: ValueError, saying which argument is wrong and what it may be."""
        given: dict[str, Any] = {}
        for option in fields(cls):
            value = os.environ.get(_variable(option.name))
            if value is not None:
                given[option.name] = _parsed(option.name, value, type(option.default))
        return cls(**given)


def add_arguments(_result: None, parser: argparse.ArgumentParser) -> None:
    """After ``ServerArgs.add_cli_args``: ``--flashmoa-schedule`` and the like."""
    group = parser.add_argument_group("FlashMoA")
    helps = {
        "schedule": "Order of waiting requests: SGLang's --schedule-policy, or shortest job first.",
        "intra_turn": "Sharing of prefixes that are not computed yet.",
        "stream_share": "Share of the engine's time for prompt streams while it decodes for "
        "others.",
    }
    for option in fields(Options):
        group.add_argument(
            _flag(option.name),
            action=_ToEnvironment,
            help=f"{helps[option.name]} Default: {option.default}.",
        )


class _ToEnvironment(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        os.environ[_variable(self.dest.removeprefix("flashmoa_"))] = values
        try:
            Options.from_environment()
        except ValueError as error:
            parser.error(str(error))


def _parsed(name: str, value: str, kind: type) -> Any:
    try:
        return kind(value)
    except ValueError as error:
        raise ValueError(f"{_flag(name)} must be a number, not {value!r}.") from error


def _flag(name: str) -> str:
    return f"--flashmoa-{name.replace('_', '-')}"


def _variable(name: str) -> str:
    return f"FLASHMOA_{name.upper()}"
