"""Decide on which engine each agent runs (``place``), and how much it writes (``answer_lengths``).

``flashmoa plan`` cannot know either: a user's file names engines that do not run, and modelled
engines write words that no agent would end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from flashmoa.plan.errors import PlanError

# What a client is configured for: its address, or class, and its model's name.
Address = tuple[str, str]


def place(
    addresses: Mapping[str, Address], engines: int | None, pinned: Mapping[str, int]
) -> dict[str, int]:
    """Return the number of each agent's engine, from 0.

    Args:
        addresses: what each agent's client is configured for, in the team's order.
        engines: number of engines; ``None`` for one for each different address. If it is that
            number, each address is an engine, in the order of its first agent. Otherwise agents
            are spread in turn.
        pinned: engines of agents that the user has placed.

    Raises: PlanError if ``pinned`` names an agent or an engine that there is not.
    """
    different = list(dict.fromkeys(addresses.values()))
    count = len(different) if engines is None else engines
    check_names(pinned, addresses, "--place")
    for agent, engine in pinned.items():
        if not 0 <= engine < count:
            raise PlanError(
                f"--place {agent}={engine + 1}: the engines are 1 to {count}; give one of them, or "
                f"--engines {engine + 1}"
            )
    if count == len(different):
        placed = {agent: different.index(address) for agent, address in addresses.items()}
    else:
        placed = {agent: number % count for number, agent in enumerate(addresses)}
    return {**placed, **pinned}


def answer_lengths(
    configured: Mapping[str, int | None], given: int | None, by_agent: Mapping[str, int]
) -> dict[str, int]:
    """Return how many tokens each agent writes.

    Args:
        configured: ``max_tokens`` of each agent's client.
        given: the number for all agents, if the user gave one.
        by_agent: the numbers of agents that the user gave by name; they come first.

    Raises: PlanError if an agent has no number, or ``by_agent`` names an unknown one.
    """
    check_names(by_agent, configured, "--output-tokens")
    lengths: dict[str, int] = {}
    for agent, limit in configured.items():
        tokens = by_agent.get(agent) or given or limit
        if not tokens:
            raise PlanError(
                f"the client of {agent} has no max_tokens, and a modelled engine never ends an "
                "answer by itself; give --output-tokens N, for all agents, or "
                f"--output-tokens {agent}=N"
            )
        lengths[agent] = tokens
    return lengths


def check_names(names: Iterable[str], agents: Iterable[str], option: str) -> None:
    """Check that an option names agents that there are. Raises: PlanError if it does not."""
    known = list(agents)
    for name in names:
        if name not in known:
            raise PlanError(f"{option} names {name!r}; agents that call a model: {known}")
