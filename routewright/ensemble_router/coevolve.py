"""The loop: route → generate → verify → update agents → update router; a killed run resumes to the same numbers."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerBase

from routewright.ensemble_router.activation import activated, gains, rank_scores, router_loss
from routewright.ensemble_router.agents import (
    activate,
    adapter_parameters,
    completion_log_probs,
    generate,
    left_padded,
    save_adapters,
)
from routewright.ensemble_router.familiarity import FamiliarityHeads, familiarity, query_states, save_heads, warn_of_margin
from routewright.ensemble_router.policy_loss import group_advantages, overlong_penalty, policy_loss
from routewright.ensemble_router.profile import EnsembleProfile
from routewright.ensemble_router.tasks import Task
from routewright.ensemble_router.verify import verify
from routewright.ensemble_router.warm_up import completion_text, encode_prompt
from routewright.errors import BadInput

RULES = (
    "familiarity",
    "no-exploration",
    "no-margin",
    "frozen-router",
    "frozen-agents",
    "top-1",
    "top-2",
    "all",
    "random",
    "one-model",
)
CHECKPOINT, HISTORY, DONE = "checkpoint.safetensors", "history.jsonl", "run.json"


@dataclass(frozen=True)
class Kept:
    """One buffered query of an agent: its number, completions, mask, log-probabilities (G, T), rewards and gains (G,)."""

    query: int
    tensors: dict[str, torch.Tensor]


def choose(rule: str, f: np.ndarray, s: np.ndarray, tau: float, generator: np.random.Generator) -> list[int]:
    """The agents that answer a training query under a rule; `f` and `s` (N,)."""
    if rule in ("top-1", "top-2"):
        return [int(a) for a in np.argsort(-s, kind="stable")[: int(rule[-1])]]
    if rule == "all":
        return list(range(len(f)))
    if rule == "random":
        return [int(generator.integers(len(f)))]
    return [0] if rule == "one-model" else activated(f, s, tau)


def coevolve(
    profile: EnsembleProfile,
    tasks: Sequence[Task],
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    rule: str,
    seed: int,
) -> dict[str, Any]:
    """Train the warm agents of `model`, in place, and a router under one rule until the budget of answers is spent."""
    if rule not in RULES:
        raise BadInput(f"rule {rule!r}: expected one of {', '.join(RULES)}")
    a, r, c = profile.agents, profile.router, profile.coevolve
    names, device = a.names, next(model.parameters()).device
    margin = 2.0 if rule == "no-margin" else r.margin
    c_ucb, w_ent = (0.0, 0.0) if rule == "no-exploration" else (r.c_ucb, r.w_ent)
    warn_of_margin(len(names), r.lam, r.tau, margin)
    folder.mkdir(parents=True, exist_ok=True)
    identity = {"rule": rule, "seed": seed, "config_sha256": profile.digest}
    prompts = [encode_prompt(tokenizer, task.prompt) for task in tasks]
    heads = FamiliarityHeads(2 * model.config.hidden_size, names, seed).to(device)
    own = {name: adapter_parameters(model, name) for name in names}
    optimisers = {n: torch.optim.AdamW(own[n], lr=a.lr, betas=(0.9, 0.95), weight_decay=a.weight_decay) for n in names}
    routers = [
        torch.optim.AdamW(p.parameters(), lr=r.lr, betas=(0.9, 0.95), weight_decay=r.weight_decay) for p in heads.predictors
    ]
    buffers: dict[str, deque[Kept]] = {name: deque(maxlen=a.buffer) for name in names}
    generator = torch.Generator().manual_seed(seed)
    n, nats, tokens = np.zeros(len(names)), np.zeros(len(names)), np.zeros(len(names))
    count = {"step": 0, "routed": 0, "answers": 0, **{f"updates.{name}": 0 for name in names}}

    def named() -> dict[str, torch.Tensor]:
        out = {f"model/{k}": v for name in names for k, v in model.named_parameters() if f".{name}." in k}
        return {**out, **{f"heads/{k}": v for k, v in heads.state_dict().items()}}

    def save() -> None:
        out = {k: v.detach().clone() for k, v in named().items()}
        for key, one in [*optimisers.items(), *((f"router-{i}", o) for i, o in enumerate(routers))]:
            for place, values in one.state_dict()["state"].items():
                out.update({f"optimiser/{key}/{place}/{k}": v.clone() for k, v in values.items()})
        for name, buffer in buffers.items():
            for place, kept in enumerate(buffer):
                out.update({f"buffer/{name}/{place}/{k}": v.clone() for k, v in kept.tensors.items()})
        out.update(
            {"rng": generator.get_state(), "n": torch.tensor(n), "nats": torch.tensor(nats), "tokens": torch.tensor(tokens)}
        )
        facts = {**identity, "count": count, "queries": {k: [x.query for x in v] for k, v in buffers.items()}}
        partial = folder / f"{CHECKPOINT}.partial"
        save_file(out, partial, metadata={"state": json.dumps(facts)})
        os.replace(partial, folder / CHECKPOINT)

    def load() -> None:
        with safe_open(folder / CHECKPOINT, framework="pt") as file:
            facts = json.loads(file.metadata()["state"])
            stored = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        if {k: facts[k] for k in identity} != identity:
            raise BadInput(f"{folder / CHECKPOINT}: it is of another rule, seed or profile, expected {identity}")
        with torch.no_grad():
            for key, value in named().items():
                value.copy_(stored[key])
        for key, one in [*optimisers.items(), *((f"router-{i}", o) for i, o in enumerate(routers))]:
            state: dict[int, dict[str, torch.Tensor]] = {}
            for full, value in stored.items():
                if full.startswith(f"optimiser/{key}/"):
                    place, kind = full.split("/")[2:]
                    state.setdefault(int(place), {})[kind] = value
            one.load_state_dict({**one.state_dict(), "state": state})
        for name, queries in facts["queries"].items():
            for place, query in enumerate(queries):
                head = f"buffer/{name}/{place}/"
                buffers[name].append(Kept(query, {k.removeprefix(head): v for k, v in stored.items() if k.startswith(head)}))
        generator.set_state(stored["rng"])
        for mine, key in ((n, "n"), (nats, "nats"), (tokens, "tokens")):
            mine[:] = stored[key].numpy()
        count.update(facts["count"])

    if (folder / CHECKPOINT).is_file():
        load()
    history = folder / HISTORY
    lines = history.read_text(encoding="utf-8").splitlines()[: count["step"]] if history.is_file() else []
    history.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    model.eval()
    while count["answers"] < c.budget:
        step = count["step"]
        numbers = np.random.default_rng([seed, 1, step])
        epoch, start = divmod(step * c.queries, len(tasks) - len(tasks) % c.queries or len(tasks))
        queries = [
            int(q) for q in np.random.default_rng([seed, 0, epoch]).permutation(len(tasks))[start : start + c.queries]
        ]
        ids, mask = left_padded([prompts[q] for q in queries], int(tokenizer.pad_token_id))
        with model.disable_adapter():
            states = query_states(model.get_base_model(), ids.to(device), mask.to(device))
        d = heads(states)
        f = familiarity(d.detach(), r.lam).cpu().numpy()
        chosen = []
        for row in range(len(queries)):
            count["routed"] += 1
            mean = np.divide(nats, tokens, out=np.zeros_like(nats), where=tokens > 0)
            chosen.append(choose(rule, f[row], rank_scores(f[row], n, mean, count["routed"], c_ucb, w_ent), r.tau, numbers))
            n[chosen[-1]] += 1
        pairs = sorted(((agent, row) for row, some in enumerate(chosen) for agent in some))
        gain, active = torch.zeros(len(queries), len(names)), torch.zeros(len(queries), len(names), dtype=torch.bool)
        reward = np.zeros(gain.shape)
        for begin in range(0, len(pairs), max(1, a.rows // a.samples)):
            part = pairs[begin : begin + max(1, a.rows // a.samples)]
            made = generate(
                model,
                [prompts[queries[row]] for _, row in part],
                [names[agent] for agent, _ in part],
                samples=a.samples,
                max_new_tokens=a.max_new_tokens,
                pad=int(tokenizer.pad_token_id),
                eos=int(tokenizer.eos_token_id),
                generator=generator,
                temperature=a.temperature,
                top_k=a.top_k,
                top_p=a.top_p,
            )
            for place, (agent, row) in enumerate(part):
                rows = slice(place * a.samples, (place + 1) * a.samples)
                task, lengths = tasks[queries[row]], made.mask[rows].sum(dim=1)
                texts = [
                    completion_text(tokenizer, t, m)
                    for t, m in zip(made.tokens[rows].tolist(), made.mask[rows].tolist(), strict=True)
                ]
                earned = torch.tensor([verify(task, text) for text in texts])
                reward[row, agent], active[row, agent] = float(earned.mean()), True
                nats[agent] += float((made.entropy[rows] * lengths).sum())
                tokens[agent] += float(lengths.sum())
                total = earned + overlong_penalty(lengths, a.max_new_tokens, a.overlong) if a.overlong else earned
                if float(total.max() - total.min()) > 1e-6:
                    parts = {
                        "tokens": made.tokens[rows],
                        "mask": made.mask[rows],
                        "log_p": made.log_p[rows],
                        "rewards": total,
                    }
                    buffers[names[agent]].append(Kept(queries[row], {k: v.clone() for k, v in parts.items()}))
        count["answers"] += len(pairs)
        for row, some in enumerate(chosen):
            gain[row, some] = torch.tensor(gains(reward[row, some].tolist()), dtype=torch.float32)
        learning = count["answers"] > c.router_first
        if learning and rule != "frozen-agents":
            for name in names:
                while len(buffers[name]) >= a.prompts:
                    _update(
                        profile,
                        model,
                        prompts,
                        int(tokenizer.pad_token_id),
                        name,
                        own[name],
                        optimisers[name],
                        [buffers[name].pop() for _ in range(a.prompts)],
                        count,
                    )
                    buffers[name].clear()  # what is left is older than this update
        if not (learning and rule == "frozen-router"):
            router_loss(d, gain.to(device), active.to(device), margin).backward()
            for agent, one in enumerate(routers):
                if active[:, agent].any():
                    one.step()
                one.zero_grad()
        heads.check_finite()
        count["step"] += 1
        domains = sorted({tasks[q].domain for q in queries})
        line: dict[str, Any] = {
            "step": step,
            "answers": count["answers"],
            "agents_per_query": len(pairs) / len(queries),
            "agents": {},
        }
        for agent, name in enumerate(names):
            on = active[:, agent].numpy()
            by = {x: [reward[i, agent] for i, q in enumerate(queries) if on[i] and tasks[q].domain == x] for x in domains}
            line["agents"][name] = {
                "f": float(f[:, agent].mean()),
                "n": int(n[agent]),
                "share": float(on.mean()),
                "updates": count[f"updates.{name}"],
                "gain": float(gain[:, agent][on].mean()) if on.any() else None,
                "entropy": nats[agent] / tokens[agent] if tokens[agent] else None,
                "reward": {x: float(np.mean(v)) for x, v in by.items() if v},
            }
        with history.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if count["step"] % c.checkpoint_every == 0 or count["answers"] >= c.budget:
            save()
    save_adapters(model, folder / "adapters")
    save_heads(heads, folder / "router", {**identity, "lambda": r.lam, "tau": r.tau})
    done = {**identity, **count, "generated_tokens": int(tokens.sum())}
    (folder / DONE).write_text(json.dumps(done, indent=1), encoding="utf-8")
    return done


def _update(
    profile: EnsembleProfile,
    model: Any,
    prompts: list[list[int]],
    pad: int,
    name: str,
    parameters: list[torch.nn.Parameter],
    optimiser: torch.optim.Optimizer,
    taken: list[Kept],
    count: dict[str, int],
) -> None:
    a = profile.agents
    width = max(kept.tensors["tokens"].shape[1] for kept in taken)

    def padded(key: str, value: float) -> torch.Tensor:
        parts = [kept.tensors[key] for kept in taken]
        return torch.cat([torch.nn.functional.pad(x, (0, width - x.shape[1]), value=value) for x in parts])

    tokens, mask, old = padded("tokens", pad), padded("mask", False), padded("log_p", 0.0)
    advantages = group_advantages(torch.stack([kept.tensors["rewards"] for kept in taken])).flatten()
    asked = [prompts[kept.query] for kept in taken]
    activate(model, name)
    log_p = completion_log_probs(model, asked, tokens, mask, pad, a.temperature)
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
    torch.nn.utils.clip_grad_norm_(parameters, a.clip)
    done = min(1.0, count["answers"] / profile.coevolve.budget)
    rate = a.lr * min(1.0, (count[f"updates.{name}"] + 1) / max(1, a.warm_up_updates)) * (1 + np.cos(np.pi * done)) / 2
    for group in optimiser.param_groups:
        group["lr"] = float(rate)
    optimiser.step()
    optimiser.zero_grad()
    count[f"updates.{name}"] += 1
