"""Test modelled replicas against closed forms: in step, at random phases, and bound by copies."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean
from typing import Any

import pytest
from flashmoa_bench.prefill.replica_drift import Setting, Simulation

from flashmoa.router.cache_tables import token_blocks
from flashmoa.router.flops import TOKENS

LAYERS, FORWARD = 31, 64


def play(forwards: int, seed: int = 0, **changes: Any) -> Simulation:
    """Compute forwards that take a second, each with one prompt, on each replica."""
    setting = replace(Setting(LAYERS, forward=FORWARD, spread=0.0), **changes)
    prompts = [(0.0, token_blocks([n] * FORWARD)) for n in range(forwards * setting.replicas)]
    simulation = Simulation(setting, prompts, lambda _: 1.0, TOKENS, seed)
    simulation.run()
    return simulation


def hit_rate(simulation: Simulation) -> float:
    return mean(simulation.hits)


def test_replicas_in_step_find_every_layer() -> None:
    simulation = play(5, in_step=True)
    assert hit_rate(simulation) == 1
    assert simulation.now == pytest.approx(5)
    # Eight replicas pull from seven others. At the end of a forward, they prepare the next one.
    assert len(simulation.hits) == 8 * 7 * 5 * (LAYERS - 1)


@pytest.mark.parametrize("sections", [3, 12])
def test_at_random_phases_a_pull_finds_as_many_layers_as_are_staged(sections: int) -> None:
    rates = [hit_rate(play(6, seed, sections=sections, replicas=2)) for seed in range(200)]
    assert mean(rates) == pytest.approx(sections / (LAYERS - 1), abs=0.05)


def test_without_hits_a_forward_takes_as_long_as_its_copies() -> None:
    """The first two layers' experts are there at the start."""
    computing, host = 1 / LAYERS, 0.1
    changes: dict[str, Any] = {"sections": 0, "in_step": True, "replicas": 2, "host": host}
    first = 3 * computing + (LAYERS - 3) * 2 * host
    assert play(1, **changes).now == pytest.approx(first)
    assert play(2, **changes).now == pytest.approx(first + (LAYERS - 1) * 2 * host)


def test_slow_copies_bring_replicas_into_step() -> None:
    """A replica that finds few staged layers is slow until the others reach it and share theirs."""
    free = play(10, sections=6)
    bound = play(10, sections=6, host=0.4 / LAYERS, peer=0.05 / LAYERS)
    assert hit_rate(bound) > 2 * hit_rate(free)


def test_an_idle_replica_takes_what_comes_later() -> None:
    setting = Setting(LAYERS, forward=FORWARD, spread=0.0, in_step=True, replicas=2)
    prompts = [(at, token_blocks([n] * FORWARD * 3)) for n, at in enumerate((0.0, 10.0))]
    simulation = Simulation(setting, prompts, lambda _: 1.0, TOKENS)
    simulation.run()
    assert simulation.now == pytest.approx(13)  # The prompt is cut into three forwards.
