"""Whether agents and domains go together: mutual information, and whether that is more than an untrained router shows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

PERMUTATIONS = 1000


def mutual_information(first: np.ndarray, second: np.ndarray) -> float:
    """I = Σ p(a, d)·log₂(p(a, d)/(p(a)·p(d))) of two label vectors (n,), in bits; 0 where either is constant."""
    _, a = np.unique(first, return_inverse=True)
    _, d = np.unique(second, return_inverse=True)
    joint = np.zeros((a.max() + 1, d.max() + 1))
    np.add.at(joint, (a, d), 1.0)
    joint /= len(a)
    apart = joint.sum(axis=1, keepdims=True) * joint.sum(axis=0, keepdims=True)
    held = joint > 0
    return max(0.0, float((joint[held] * np.log2(joint[held] / apart[held])).sum()))


def information_gain(
    trained: np.ndarray, initial: np.ndarray, domains: np.ndarray, seed: int, permutations: int = PERMUTATIONS
) -> tuple[float, float, float]:
    """Information of the trained router's first choice and the domain, the initial router's, and p of both alike.

    ``trained``, ``initial`` and ``domains`` (n,). The test swaps the two routers' choices question by question: untrained
    heads over identical agents already pass a test against no information at all. A collapse onto one agent has none.
    """
    found, before = mutual_information(trained, domains), mutual_information(initial, domains)
    generator = np.random.default_rng(seed)
    above = 0
    for _ in range(permutations):
        swap = generator.random(len(trained)) < 0.5
        one, other = np.where(swap, initial, trained), np.where(swap, trained, initial)
        above += mutual_information(one, domains) - mutual_information(other, domains) >= found - before - 1e-12
    return found, before, (1 + above) / (1 + permutations)


def interaction(rewards: np.ndarray, domains: np.ndarray) -> float:
    """Σ_d n_d·Σ_a (r̄_ad − r̄_a − r̄_d + r̄)²/n: how much accuracy differs by agent and domain beyond both alone."""
    total = 0.0
    by_agent = rewards.mean(axis=0)
    for domain in np.unique(domains):
        own = rewards[domains == domain]
        difference = own.mean(axis=0) - own.mean() - (by_agent - by_agent.mean())
        total += len(own) / len(rewards) * float((difference**2).sum())
    return total


def interaction_p(rewards: np.ndarray, domains: np.ndarray, seed: int, permutations: int = PERMUTATIONS) -> float:
    """p that agents (columns of `rewards` (n, N)) are alike: each question's rewards are permuted over the agents."""
    found = interaction(rewards, domains)
    generator = np.random.default_rng(seed)
    above = 0
    for _ in range(permutations):
        order = generator.random(rewards.shape).argsort(axis=1)
        above += interaction(np.take_along_axis(rewards, order, axis=1), domains) >= found - 1e-12
    return (1 + above) / (1 + permutations)


def shares(chosen: Sequence[Sequence[int]], domains: Sequence[str], agents: int) -> dict[str, list[float]]:
    """By domain, the share of its questions that each agent is asked."""
    found: dict[str, list[float]] = {}
    for domain in sorted(set(domains)):
        own = [asked for asked, label in zip(chosen, domains, strict=True) if label == domain]
        found[domain] = [sum(agent in asked for asked in own) / len(own) for agent in range(agents)]
    return found
