"""What the small model reads: everything that the decision depends on, whatever the wording."""

from __future__ import annotations

from dataclasses import replace

from tiny_policy import situation

from routewright.step_router.prompts import ACTIONS_SHOWN, completion, prompt
from routewright.step_router.situations import Situation


def test_the_prompt_holds_what_is_shown() -> None:
    view = situation(1, done=("press red", "wait"))
    text = prompt(view)
    for part in (view.observation.objective, view.observation.text, view.observation.inventory, "press red", "wait"):
        assert part in text


def test_every_part_changes_the_prompt() -> None:
    view = situation(1, done=("press red",))
    others = [replace(view.observation, **{name: "other"}) for name in ("objective", "text", "inventory")]
    others.append(replace(view.observation, inventory=""))
    views = [view, replace(view, actions=("press green",)), replace(view, actions=())]
    views += [replace(view, observation=other) for other in others]
    assert len({prompt(each) for each in views}) == 7


def test_only_the_latest_actions_are_read() -> None:
    actions = tuple(f"move{i:02d}" for i in range(ACTIONS_SHOWN + 3))
    text = prompt(Situation(situation(0).observation, actions))
    assert [action for action in actions if action in text] == list(actions[3:])
    places = [text.index(action) for action in actions[3:]]
    assert places == sorted(places), "oldest first"


def test_the_action_follows_after_one_blank() -> None:
    text = prompt(situation(0)) + completion("wait")
    assert not prompt(situation(0))[-1].isspace()
    assert text.endswith(" wait")
    assert not text.endswith("  wait")
