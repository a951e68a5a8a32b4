"""Say how links use an engine (:class:`EngineSettings`)."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Literal


@dataclass(frozen=True)
class EngineSettings:
    """Says how links use an engine. Every client of engines takes it as ``engine_settings``.

    Attributes:
        stream_ttl_seconds: how long the engine keeps what links have prefilled if this process
            vanishes.
        without_plugin: what links do on a server without the plugin: ``prefill`` prompts in a few
            steps, as far as that pays (:class:`StepCosts`), or nothing (``off``).

    Raises: ValueError for another choice, or seconds that are not positive and finite.
    """

    stream_ttl_seconds: float = 30.0
    without_plugin: Literal["prefill", "off"] = "prefill"

    def __post_init__(self) -> None:
        seconds, choice = self.stream_ttl_seconds, self.without_plugin
        if not (isfinite(seconds) and seconds > 0):
            raise ValueError(f"stream_ttl_seconds must be a positive number, not {seconds!r}")
        if choice not in ("prefill", "off"):
            raise ValueError(f"without_plugin must be 'prefill' or 'off', not {choice!r}")
