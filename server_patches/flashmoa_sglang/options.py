"""The plugin's own server arguments.

They stand beside SGLang's on the command line and travel to every process through the
environment, which SGLang's children inherit: SGLang's arguments are a closed dataclass.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

# Seconds; a client that waits longer takes it for a failure.
_LONGEST_WAIT = 60


def _option(default: Any, help_text: str, choices: Sequence[str] = ()) -> Any:
    return field(default=default, metadata={"help": help_text, "choices": choices})


@dataclass(frozen=True, slots=True)
class Options:
    """The plugin's arguments, each as ``--flashmoa-NAME``.

    ``intra_turn``: requests that share what is not computed yet share the computing within one
    forward where the attention backend allows it (``auto``), one level of the radix tree per
    forward (``level``), or not (``off``). ``stream_share``: in (0, 1]. ``saturation``: tokens; 0:
    as measured with ``asyncep``. ``kv_cache``: ``off`` is for prefill-only work that shares
    nothing: no KV outlives its layer.

    Raises: ValueError, which says what is wrong with a value and what it may be.
    """

    schedule: str = _option(
        "sglang",
        "Order of waiting requests: SGLang's --schedule-policy, or shortest job first.",
        ("sglang", "sjf"),
    )
    intra_turn: str = _option(
        "auto", "Sharing of prefixes that are not computed yet.", ("auto", "level", "off")
    )
    stream_share: float = _option(
        0.05, "Share of the engine's time for prompt streams while it decodes for others."
    )
    asyncep: str = _option(
        "off",
        "Experts of a mixture-of-experts model on the device (off), or copied there ahead of the "
        "computation from host memory (h2d) or from other replicas (d2d).",
        ("off", "h2d", "d2d"),
    )
    asyncep_slots: int = _option(
        2, "How many layers' experts the device holds then, beside the first's."
    )
    asyncep_replica: str = _option(
        "", "With d2d: which replica this is, and of how many, as in 0/2."
    )
    asyncep_group: str = _option("default", "With d2d: a name for replicas that belong together.")
    asyncep_wait: float = _option(600.0, "With d2d: seconds to wait at start until all are there.")
    saturation: int = _option(
        0, "Prefills wait for a forward of so many tokens; 0: as measured with h2d."
    )
    saturation_wait: float = _option(0.2, "Seconds that a prefill waits so at most; 0: not at all.")
    kv_cache: str = _option(
        "on",
        "KV of every layer (on), or of one at a time (off), for prefill-only work.",
        ("on", "off"),
    )

    def __post_init__(self) -> None:
        for option in fields(self):
            if choices := option.metadata["choices"]:
                value = getattr(self, option.name)
                self._require(option.name, value in choices, f"one of {', '.join(choices)}")
        self._require("stream_share", 0 < self.stream_share <= 1, "above 0 and at most 1")
        self._require("saturation", self.saturation >= 0, "at least 0")
        within = 0 <= self.saturation_wait <= _LONGEST_WAIT
        self._require("saturation_wait", within, f"between 0 and {_LONGEST_WAIT} seconds")
        self._require("asyncep_slots", self.asyncep_slots >= 1, "at least 1")
        self._require("asyncep_wait", self.asyncep_wait > 0, "above 0")
        is_name = re.fullmatch(r"[\w.-]{1,64}", self.asyncep_group, re.ASCII) is not None
        self._require("asyncep_group", is_name, "1 to 64 letters, digits and any of . _ -")
        if self.asyncep_replica:
            self.replica()

    def _require(self, name: str, holds: bool, wanted: str) -> None:
        if not holds:
            raise ValueError(f"{_flag(name)} must be {wanted}, not {getattr(self, name)!r}.")

    def replica(self) -> tuple[int, int]:
        """Return which replica this is, from 0, and of how many.

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
        """Return the options that this process was started with. Raises: ValueError."""
        given: dict[str, Any] = {}
        for option in fields(cls):
            value = os.environ.get(_variable(option.name))
            if value is not None:
                try:
                    given[option.name] = type(option.default)(value)
                except ValueError as error:
                    message = f"{_flag(option.name)} must be a number, not {value!r}."
                    raise ValueError(message) from error
        return cls(**given)


def add_arguments(_result: None, parser: argparse.ArgumentParser) -> None:
    """Add ``--flashmoa-schedule`` and the like: after ``ServerArgs.add_cli_args``."""
    group = parser.add_argument_group("FlashMoA")
    for option in fields(Options):
        group.add_argument(
            _flag(option.name),
            action=_ToEnvironment,
            help=f"{option.metadata['help']} Default: {option.default or 'none'}.",
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


def _flag(name: str) -> str:
    return f"--flashmoa-{name.replace('_', '-')}"


def _variable(name: str) -> str:
    return f"FLASHMOA_{name.upper()}"
