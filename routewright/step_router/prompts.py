"""What the small model reads: a situation as text."""

from __future__ import annotations

from routewright.step_router.situations import Situation

ACTIONS_SHOWN = 6  # the latest ones


def prompt(situation: Situation) -> str:
    """Latest actions, inventory, observation and, last, the objective; the action follows it after one blank.

    The objective comes last because a causal model reads forward only: so its words can be read in the light of what is
    done already. The admissible actions are not repeated here: they are what is scored.
    """
    seen, actions = situation.observation, situation.actions
    lines = ["Done: " + ("; ".join(actions[-ACTIONS_SHOWN:]) or "nothing")]
    if seen.inventory:
        lines.append(f"Have: {seen.inventory}")
    lines += [f"Now: {seen.text}", f"Step {seen.step} of {seen.max_steps}.", f"Objective: {seen.objective}", "Do:"]
    return "\n".join(lines)


def completion(action: str) -> str:
    """The action as it follows the prompt."""
    return f" {action}"
