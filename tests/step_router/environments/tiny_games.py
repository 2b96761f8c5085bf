"""The names of a handful of games."""

from __future__ import annotations

from routewright.step_router.environments.textworld_env import GameSpec

QUEST = GameSpec("quest", 1, 4, 4).task
BRIEF = GameSpec("quest", 2, 3, 6, detailed=False).task
COOKING = GameSpec("cooking", 3, 6, 2).task
