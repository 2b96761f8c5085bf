"""The loop: route → generate → verify → update agents → update router; a killed run resumes to the same numbers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from routewright.ensemble_router.activation import gains, rank_scores, router_loss
from routewright.ensemble_router.agents import Base, activate, completion_log_probs, generate, left_padded, save_adapters
from routewright.ensemble_router.coevolution_state import CoevolutionState, Kept
from routewright.ensemble_router.familiarity import (
    FamiliarityHeads,
    familiarity,
    query_states,
    save_heads,
    state_layers,
    warn_of_margin,
)
from routewright.ensemble_router.learned_rules import EVERYBODY_EVERY, LEARNED, LearnedRouter, save_learned
from routewright.ensemble_router.policy_loss import group_advantages, overlong_penalty, policy_loss
from routewright.ensemble_router.profile import RULES, AgentsSection, EnsembleProfile
from routewright.ensemble_router.prompts import completion_text, encode_prompt
from routewright.ensemble_router.tasks import Task
from routewright.ensemble_router.training_rules import choose, lambda_of, layers_of, margin_of, state_width
from routewright.ensemble_router.verify import check_sandbox, verify
from routewright.ensemble_router.vllm_generation import generate_on_vllm
from routewright.errors import BadInput

SAMPLE, STATES_TOGETHER = 1024, 64
CHECKPOINT, HISTORY, DONE = "checkpoint.safetensors", "history.jsonl", "run.json"


@dataclass(frozen=True)
class Step:
    """What one step did: its queries, their familiarities f (B, N), who answered, mean rewards and gains, all (B, N)."""

    queries: list[int]
    f: np.ndarray
    active: np.ndarray
    reward: np.ndarray
    gain: np.ndarray


def queries_of_step(step: int, size: int, tasks: int, seed: int) -> list[int]:
    """Numbers of the step's queries: every epoch runs through all tasks in an order of its own, in whole steps."""
    epoch, start = divmod(step * size, tasks - tasks % size or tasks)
    order = np.random.default_rng([seed, 0, epoch]).permutation(tasks)
    return [int(query) for query in order[start : start + size]]


def coevolve(
    profile: EnsembleProfile,
    tasks: Sequence[Task],
    bases: Sequence[Base],
    folder: Path,
    rule: str,
    seed: int,
    heads: FamiliarityHeads | None = None,
) -> dict[str, Any]:
    """Train the warm agents of `bases`, in place, and a router under one rule until the budget of answers is spent.

    The router reads the queries' states from the first base, whose adapters are off. ``heads``: a trained router to begin
    with, which `frozen-router` keeps as it is.
    """
    if rule not in RULES:
        raise BadInput(f"rule {rule!r}: expected one of {', '.join(RULES)}")
    check_sandbox(tasks)
    a, r, c = profile.agents, profile.router, profile.coevolve
    lam = lambda_of(rule, profile)
    warn_of_margin(a.count, lam, r.tau, margin_of(rule, profile))
    folder.mkdir(parents=True, exist_ok=True)
    identity = {"rule": rule, "seed": seed, "config_sha256": profile.training_digest}
    prompts = [[encode_prompt(base.tokenizer, task.prompt) for task in tasks] for base in bases]
    learned = None
    if rule in LEARNED:
        learned = LearnedRouter(rule, a.count, states_of(bases[0], prompts[0][:: max(1, len(tasks) // SAMPLE)]))
    state = CoevolutionState(profile, bases, seed, state_width(rule, bases[0]), learned)
    if heads is not None:
        state.heads.load_state_dict(heads.state_dict())
    checkpoint, history = folder / CHECKPOINT, folder / HISTORY
    if checkpoint.is_file():
        state.load(checkpoint, identity)
    lines = history.read_text(encoding="utf-8").splitlines()[: state.count["step"]] if history.is_file() else []
    history.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    for base in bases:
        base.model.eval()
    with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as progress:
        bar = progress.add_task(f"co-evolving {rule}, answers", total=c.budget, completed=state.count["answers"])
        while state.count["answers"] < c.budget:
            step = _step(profile, tasks, prompts, state, rule, seed)
            with history.open("a", encoding="utf-8") as file:
                file.write(json.dumps(_history_line(step, tasks, state)) + "\n")
            state.count["step"] += 1
            progress.update(bar, completed=state.count["answers"])
            if state.count["step"] % c.checkpoint_every == 0 or state.count["answers"] >= c.budget:
                state.save(checkpoint, identity)
    for base in bases:
        save_adapters(base.model, folder / "adapters")
    if learned is None:
        save_heads(state.heads, folder / "router", {**identity, "lambda": lam, "tau": r.tau})
    else:
        save_learned(learned, folder / "router", identity)
    done = {**identity, **state.count, "generated_tokens": int(state.tokens.sum())}
    partial = folder / f"{DONE}.partial"
    partial.write_text(json.dumps(done, indent=1), encoding="utf-8")
    os.replace(partial, folder / DONE)
    return done


def states_of(
    base: Base, prompts: Sequence[list[int]], layers: Callable[[int], tuple[int, ...]] = state_layers
) -> np.ndarray:
    """h(q) of each prompt from the base without adapters, float32, (n, 2H) of the paper's two layers."""
    device = next(base.model.parameters()).device
    parts = []
    with base.model.disable_adapter():
        for begin in range(0, len(prompts), STATES_TOGETHER):
            ids, mask = left_padded(prompts[begin : begin + STATES_TOGETHER], base.pad)
            found = query_states(base.model.get_base_model(), ids.to(device), mask.to(device), layers)
            parts.append(found.cpu().numpy())
    return np.concatenate(parts)


def _step(
    profile: EnsembleProfile,
    tasks: Sequence[Task],
    prompts: list[list[list[int]]],
    state: CoevolutionState,
    rule: str,
    seed: int,
) -> Step:
    a, r, c, count = profile.agents, profile.router, profile.coevolve, state.count
    numbers = np.random.default_rng([seed, 1, count["step"]])
    torch.manual_seed(seed * 1_000_003 + count["step"])  # of the adapters' dropout: a resumed run draws the same
    queries = queries_of_step(count["step"], c.queries, len(tasks), seed)
    device = next(state.heads.parameters()).device
    h = states_of(state.bases[0], [prompts[0][query] for query in queries], layers_of(rule))
    d = state.heads(torch.from_numpy(h).to(device))
    f = familiarity(d.detach(), lambda_of(rule, profile)).cpu().numpy()
    c_ucb, w_ent = (0.0, 0.0) if rule == "no-exploration" else (r.c_ucb, r.w_ent)
    active = np.zeros(f.shape, dtype=bool)
    mean = state.mean_entropy()
    for row in range(len(queries)):
        count["routed"] += 1
        if state.learned is None:
            scores = rank_scores(f[row], state.n, mean, count["routed"], c_ucb, w_ent)
            chosen = choose(rule, f[row], scores, r.tau, numbers)
        elif rule != "linucb" and (count["answers"] <= c.router_first or row % EVERYBODY_EVERY == 0):
            chosen = list(range(a.count))
        else:
            chosen = state.learned.route(h[row])
        active[row, chosen] = True
        state.n[chosen] += 1
    reward, gain = np.zeros(f.shape), np.zeros(f.shape, dtype=np.float32)
    for agent, row, earned in _answers(a, tasks, prompts, state, queries, active):
        reward[row, agent] = earned
    count["answers"] += int(active.sum())
    for row in range(len(queries)):
        gain[row, active[row]] = gains(reward[row, active[row]].tolist())
    learning = count["answers"] > c.router_first
    if learning and rule != "frozen-agents":
        for name in state.names:
            while len(state.buffers[name]) >= a.prompts:
                _update(profile, state, prompts, name, [state.buffers[name].pop() for _ in range(a.prompts)])
                state.buffers[name].clear()  # what is left is older than this update
    if state.learned is not None:
        state.learned.learn(h, np.where(active, reward, np.nan))
    elif rule != "frozen-router":
        on = torch.from_numpy(active).to(device)
        router_loss(d, torch.from_numpy(gain).to(device), on, margin_of(rule, profile)).backward()
        for agent, optimiser in enumerate(state.routers):
            if active[:, agent].any():
                optimiser.step()
            optimiser.zero_grad()
    state.heads.check_finite()
    return Step(queries, f, active, reward, gain)


def _answers(
    a: AgentsSection,
    tasks: Sequence[Task],
    prompts: list[list[list[int]]],
    state: CoevolutionState,
    queries: list[int],
    active: np.ndarray,
) -> Iterator[tuple[int, int, float]]:
    """Agent, row and mean reward of every answer; those whose samples differ in reward go into the agent's buffer."""
    together = max(1, a.rows // a.samples)
    pairs = [(int(agent), int(row)) for agent, row in np.argwhere(active.T)]
    own = [[pair for pair in pairs if state.home[state.names[pair[0]]] == number] for number in range(len(state.bases))]
    for number, begin in [(number, begin) for number, some in enumerate(own) for begin in range(0, len(some), together)]:
        base, part = state.bases[number], own[number][begin : begin + together]
        asked, agents = [prompts[number][queries[row]] for _, row in part], [state.names[agent] for agent, _ in part]
        settings: dict[str, Any] = {
            "samples": a.samples, "max_new_tokens": a.max_new_tokens, "generator": state.generator,
            "temperature": a.temperature, "top_k": a.top_k, "top_p": a.top_p,
        }  # fmt: skip
        if base.engine is None:
            made = generate(base.model, asked, agents, pad=base.pad, ends=base.ends, **settings)
        else:
            made = generate_on_vllm(base, asked, agents, **settings)
        for place, (agent, row) in enumerate(part):
            rows = slice(place * a.samples, (place + 1) * a.samples)
            tokens, mask = made.tokens[rows], made.mask[rows]
            lengths = mask.sum(dim=1)
            texts = [completion_text(base.tokenizer, t, m) for t, m in zip(tokens.tolist(), mask.tolist(), strict=True)]
            earned = torch.tensor([verify(tasks[queries[row]], text) for text in texts])
            state.nats[agent] += float((made.entropy[rows] * lengths).sum())
            state.tokens[agent] += float(lengths.sum())
            total = earned + overlong_penalty(lengths, a.max_new_tokens, a.overlong) if a.overlong else earned
            if float(total.max() - total.min()) > 1e-6:
                kept = {"tokens": tokens, "mask": mask, "log_p": made.log_p[rows], "rewards": total}
                kept = {key: value.clone() for key, value in kept.items()}
                state.buffers[state.names[agent]].append(Kept(queries[row], kept))
            yield agent, row, float(earned.mean())


def _history_line(step: Step, tasks: Sequence[Task], state: CoevolutionState) -> dict[str, Any]:
    """One line of history.jsonl, before the step is counted."""
    domains = np.array([tasks[query].domain for query in step.queries])
    mean = state.mean_entropy()
    agents = {}
    for agent, name in enumerate(state.names):
        on = step.active[:, agent]
        agents[name] = {
            "f": float(step.f[:, agent].mean()),
            "n": int(state.n[agent]),
            "share": float(on.mean()),
            "updates": state.count[f"updates.{name}"],
            "gain": float(step.gain[on, agent].mean()) if on.any() else None,
            "entropy": float(mean[agent]) if state.tokens[agent] else None,
            "reward": {d: float(step.reward[on & (domains == d), agent].mean()) for d in sorted(set(domains[on].tolist()))},
        }
    return {
        "step": state.count["step"],
        "answers": state.count["answers"],
        "agents_per_query": int(step.active.sum()) / len(step.queries),
        "reward": float(step.reward[step.active].mean()),
        "agents": agents,
    }


def _update(
    profile: EnsembleProfile, state: CoevolutionState, prompts: list[list[list[int]]], name: str, taken: list[Kept]
) -> None:
    """One policy-gradient step of an agent on queries taken from its buffer."""
    a, number = profile.agents, state.home[name]
    base = state.bases[number]
    model, pad = base.model, base.pad
    width = max(kept.tensors["tokens"].shape[1] for kept in taken)

    def padded(key: str, value: float) -> torch.Tensor:
        parts = [kept.tensors[key] for kept in taken]
        return torch.cat([torch.nn.functional.pad(x, (0, width - x.shape[1]), value=value) for x in parts])

    tokens, mask, old = padded("tokens", pad), padded("mask", False), padded("log_p", 0.0)
    advantages = group_advantages(torch.stack([kept.tensors["rewards"] for kept in taken])).flatten()
    asked = [prompts[number][kept.query] for kept in taken]
    activate(model, name)
    model.train()  # the adapters' dropout
    log_p = completion_log_probs(model, asked, tokens, mask, pad, a.temperature)
    model.eval()
    reference = log_p.detach()
    if a.beta > 0:
        with torch.no_grad(), model.disable_adapter():
            reference = completion_log_probs(model, asked, tokens, mask, pad, a.temperature)
    device = log_p.device
    loss = policy_loss(
        log_p,
        old.to(device),
        reference,
        advantages.to(device),
        mask.to(device),
        tokens=int(mask.sum()),
        sequences=len(mask),
        ratio=a.ratio,
        normaliser=a.normaliser,
        clip_low=a.clip_low,
        clip_high=a.clip_high,
        beta=a.beta,
    )
    loss.backward()
    torch.nn.utils.clip_grad_norm_(state.parameters[name], a.clip)
    done = min(1.0, state.count["answers"] / profile.coevolve.budget)
    rate = a.lr * min(1.0, (state.count[f"updates.{name}"] + 1) / max(1, a.warm_up_updates)) * (1 + np.cos(np.pi * done)) / 2
    for group in state.optimisers[name].param_groups:
        group["lr"] = float(rate)
    state.optimisers[name].step()
    state.optimisers[name].zero_grad()
    state.count[f"updates.{name}"] += 1
