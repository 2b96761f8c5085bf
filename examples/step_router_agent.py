"""A text game played by a small and a big language model, the step router deciding who takes each step.

    export ROUTEWRIGHT_SLM_BASE_URL=http://localhost:8000/v1 ROUTEWRIGHT_SLM_MODEL=Qwen/Qwen2.5-7B-Instruct
    export ROUTEWRIGHT_LLM_BASE_URL=https://api.example.com/v1 ROUTEWRIGHT_LLM_MODEL=big-model OPENAI_API_KEY=...
    python examples/step_router_agent.py runs/step-router/model --episodes 3 --calls 2

The router's folder is `model` in what `routewright run step-router` writes. Any OpenAI-compatible server will do. The
small model also grades its own candidates, since the router reads verifier scores; its key, if it needs one, is
ROUTEWRIGHT_SLM_API_KEY. Ends with the calls, tokens and money of both models. A wrong setting is one sentence and exit
code 2, a model that fails exit code 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from routewright.errors import BadInput, StageFailed
from routewright.language_models.chat import MODEL_VARIABLE, URL_VARIABLE, chat_client_from_environment
from routewright.step_router.client import StepRouter
from routewright.step_router.environments.protocol import Observation, Outcome
from routewright.step_router.llm import LlmProposer, LlmTeacher, LlmVerifier, small_model_from_environment
from routewright.step_router.situations import Situation

RULES = "An action is one of those listed, word for word."
OBJECTIVE = "Light the lamp in the cellar. The matches are somewhere in the house."
ROOMS = {
    "kitchen": {"go down": "cellar", "go east": "pantry"},
    "pantry": {"go west": "kitchen"},
    "cellar": {"go up": "kitchen"},
}


class LampGame:
    """Three rooms, matches in the pantry, a lamp in the cellar."""

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps
        self._room, self._matches, self._step = "kitchen", False, 0

    def observe(self, told: str = "") -> Observation:
        """The room and what can be done in it."""
        actions = ["look", *ROOMS[self._room]]
        text = f"{told} You are in the {self._room}.".strip()
        if self._room == "pantry" and not self._matches:
            text, actions = f"{text} There are matches here.", [*actions, "take matches"]
        if self._room == "cellar":
            text, actions = f"{text} There is a lamp here.", [*actions, "light lamp"]
        inventory = "matches" if self._matches else "nothing"
        return Observation(OBJECTIVE, text, inventory, tuple(actions), self._step, self._max_steps)

    def step(self, action: str) -> Outcome:
        """Take an action; one that is not possible here changes nothing."""
        self._step += 1
        told, success = "", False
        if action in ROOMS[self._room]:
            self._room = ROOMS[self._room][action]
        elif action == "take matches" and self._room == "pantry" and not self._matches:
            self._matches, told = True, "You take the matches."
        elif action == "light lamp" and self._room == "cellar":
            success, told = self._matches, "The lamp burns." if self._matches else "You have nothing to light it with."
        elif action != "look":
            told = "That is not possible here."
        return Outcome(self.observe(told), success, success or self._step >= self._max_steps)


def play(router: StepRouter, small: LlmProposer, big: LlmTeacher, max_steps: int, calls: int | None) -> bool:
    """One episode; whether it was solved."""
    game = LampGame(max_steps)
    situation, done, success = Situation(game.observe()), False, False
    episode = router.episode(OBJECTIVE, max_steps, calls)
    while not done:
        (candidates,) = small.propose([situation])
        decision = episode.decide(situation.observation.text, candidates)
        action = episode.acted(big.action(situation) if decision.take is None else decision.take)
        who = "small" if decision.take is not None else "big"
        why = f"risk {decision.risk:.2f}, benefit {decision.benefit:+.2f}, threshold {decision.threshold:.2f}"
        print(f"  {why}, {who}: {action!r}")
        outcome = game.step(action)
        done, success = outcome.done, outcome.success
        situation = Situation(outcome.observation, (*situation.actions, action))
    episode.finished(success)
    print(f"{'solved' if success else 'failed'}: {episode.calls.llm} calls of the big model, cost {episode.cost:g}")
    return success


def run(arguments: argparse.Namespace) -> None:
    """All episodes, then the bill."""
    with tempfile.TemporaryDirectory() as scratch:
        cache = arguments.cache or Path(scratch)
        small_client = small_model_from_environment(cache / "small")
        big_client = chat_client_from_environment(cache / "big")
        if big_client is None:
            raise BadInput(f"environment variables {URL_VARIABLE} and {MODEL_VARIABLE}: missing, expected the big model's")
        small = LlmProposer(small_client, LlmVerifier(small_client, RULES).scores, arguments.samples, rules=RULES)
        router = StepRouter.load(
            arguments.router,
            c_slm=arguments.small_price,
            c_llm=arguments.big_price,
            calls_per_day=arguments.calls_per_day,
            decisions_per_day=arguments.episodes * arguments.max_steps,
            epsilon=arguments.epsilon,
            log=arguments.log,
        )
        big = LlmTeacher(big_client, RULES)
        solved = sum(play(router, small, big, arguments.max_steps, arguments.calls) for _ in range(arguments.episodes))
        totals = router.totals
        print(f"{solved} of {totals.episodes} episodes solved")
        for name, calls, client, price in (
            ("small model", totals.calls.slm, small_client, router.c_slm),
            ("big model", totals.calls.llm, big_client, router.c_llm),
        ):
            print(f"{name}: {calls} steps at {price:g}, {client.calls} requests, {client.tokens} tokens")
        print(f"cost {totals.cost:g}, with the big model on every step {totals.calls.slm * router.c_llm:g}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("router", type=Path, help="the trained router: model in the folder that routewright run wrote")
    parser.add_argument("--episodes", type=int, default=1)
    parser.add_argument("--max-steps", type=int, default=10, help="steps an episode")
    parser.add_argument("--calls", type=int, help="most calls of the big model an episode; none given, no limit")
    parser.add_argument("--calls-per-day", type=int, help="most calls of the big model a day, over all episodes")
    parser.add_argument("--samples", type=int, default=8, help="candidates of the small model a step")
    parser.add_argument("--small-price", type=float, help="money a step of the small model, as in training if not given")
    parser.add_argument("--big-price", type=float, help="money a step of the big model, as in training if not given")
    parser.add_argument("--epsilon", type=float, default=0.0, help="share of decisions drawn at random")
    parser.add_argument("--log", type=Path, help="file that decisions and outcomes are appended to, JSON lines")
    parser.add_argument("--cache", type=Path, help="folder that keeps the answers of the big model and of the verifier")
    try:
        run(parser.parse_args())
    except BadInput as error:
        print(error, file=sys.stderr)
        return 2
    except StageFailed as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
