"""The plugin's own server arguments.

They stand beside SGLang's on the command line and travel to every process through the
environment, which SGLang's children inherit: SGLang's arguments are a closed dataclass.
"""

from __future__ import annotations

import argparse
import os
import re
from dataclasses import dataclass, fields
from typing import Any

_CHOICES = {
    "schedule": ("sglang", "sjf"),
    "intra_turn": ("auto", "level", "off"),
    "asyncep": ("off", "h2d", "d2d"),
    "kv_cache": ("on", "off"),
}

# Seconds; whoever waits longer takes it for a failure.
_LONGEST_WAIT = 60


@dataclass(frozen=True, slots=True)
class Options:
    """``schedule``: the order of waiting requests; SGLang's own, or shortest job first.

    ``intra_turn``: how requests that share what is not computed yet share the computing:
    within one forward where the attention backend allows it (``auto``), one level of the
    radix tree per forward (``level``), or not (``off``).

    ``stream_share``: the share of the engine's time that prompt streams may take while it
    decodes for others; in (0, 1].

    ``saturation``: prefills wait until a forward has so many tokens; 0: as measured with
    ``asyncep``. ``saturation_wait``: for so many seconds at most; 0: not at all.

    ``asyncep``: where the experts of a mixture-of-experts model are: on the device (``off``), in
    host memory (``h2d``), or divided among replicas (``d2d``); these two copy them ahead of the
    computation into so many ``asyncep_slots``.

    ``asyncep_replica``: with ``d2d``, which replica this is and of how many, ``RANK/SIZE``;
    ``asyncep_group``: what they call themselves; ``asyncep_wait``: seconds for all to come.

    ``kv_cache``: ``off`` for prefill-only work that shares nothing: no KV outlives its layer.
    """

    schedule: str = "sglang"
    intra_turn: str = "auto"
    stream_share: float = 0.05
    asyncep: str = "off"
    asyncep_slots: int = 2
    asyncep_replica: str = ""
    asyncep_group: str = "default"
    asyncep_wait: float = 600.0
    saturation: int = 0
    saturation_wait: float = 0.2
    kv_cache: str = "on"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{_flag(name)} must be one of {', '.join(choices)}.")
        if not 0 < self.stream_share <= 1:
            raise ValueError(f"{_flag('stream_share')} must be above 0 and at most 1.")
        if self.saturation < 0:
            raise ValueError(f"{_flag('saturation')} must not be below 0.")
        if not 0 <= self.saturation_wait <= _LONGEST_WAIT:
            raise ValueError(f"{_flag('saturation_wait')} must be in [0, {_LONGEST_WAIT}].")
        self._check_asyncep()

    def _check_asyncep(self) -> None:
        if self.asyncep_slots < 1:
            raise ValueError(f"{_flag('asyncep_slots')} must be at least 1.")
        if self.asyncep_replica:
            self.replica()
        if not re.fullmatch(r"[\w.-]{1,64}", self.asyncep_group, re.ASCII):
            raise ValueError(
                f"{_flag('asyncep_group')} must be 1 to 64 letters, digits and any of . _ -"
            )
        if not self.asyncep_wait > 0:
            raise ValueError(f"{_flag('asyncep_wait')} must be above 0.")

    def replica(self) -> tuple[int, int]:
        """Which replica this is, from 0, and of how many.

        Raises: ValueError where ``asyncep_replica`` does not say that.
        """
        found = re.fullmatch(r"(\d{1,4})/(\d{1,4})", self.asyncep_replica, re.ASCII)
        if not found or not int(found[1]) < int(found[2]):
            raise ValueError(
                f"{_flag('asyncep_replica')} must be RANK/SIZE, the rank from 0 on: 0/2 and 1/2 "
                f"for two replicas, not {self.asyncep_replica!r}."
            )
        return int(found[1]), int(found[2])

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
        "asyncep": "Experts on the device (off), or copied there from host memory (h2d) or from "
        "other replicas (d2d).",
        "asyncep_slots": "How many layers' experts the device holds then, beside the first's.",
        "asyncep_replica": "With d2d: which replica this is, and of how many, as in 0/2.",
        "asyncep_group": "With d2d: a name for the replicas that belong together.",
        "asyncep_wait": "With d2d: how many seconds to wait at start until all are there.",
        "saturation": "Prefills wait for a forward of so many tokens; 0: as measured with h2d.",
        "saturation_wait": "Seconds that a prefill waits so at most; 0: not at all.",
        "kv_cache": "KV of every layer (on), or of one at a time (off), for prefill-only work.",
    }
    for option in fields(Options):
        group.add_argument(
            _flag(option.name),
            action=_ToEnvironment,
            help=f"{helps[option.name]} Default: {option.default or 'none'}.",
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
