"""Language models by URL in the step router: the LLM as teacher and as verifier, a small one as proposer.

What an environment shows was written by strangers, so it reaches the model between tags, as data; the objective and the
rules of the environment are the operator's words.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from openai import (
    APIConnectionError,
    APIStatusError,
    AuthenticationError,
    BadRequestError,
    NotFoundError,
    PermissionDeniedError,
    UnprocessableEntityError,
)
from pydantic import BaseModel, Field, StringConstraints, create_model

from routewright.errors import BadInput
from routewright.language_models.chat import (
    CONCURRENCY,
    DATA_RULE,
    RETRIES,
    URL_VARIABLE,
    ChatClient,
    Message,
    ServerFailed,
    delimited,
)
from routewright.step_router.features import Candidate
from routewright.step_router.situations import Situation

SLM_URL_VARIABLE = "ROUTEWRIGHT_SLM_BASE_URL"
SLM_MODEL_VARIABLE = "ROUTEWRIGHT_SLM_MODEL"
SLM_KEY_VARIABLE = "ROUTEWRIGHT_SLM_API_KEY"
ACTIONS_SHOWN = 20  # the latest actions of an episode
NO_LIMIT = 1_000_000  # characters of a list whose numbers must stay valid

AGENT = f"You act in an environment, one action at a time, to reach the objective. {DATA_RULE}"


class _Action(BaseModel):
    action: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]


def situation_text(situation: Situation) -> str:
    """Objective, past actions, observation and inventory, the environment's words between tags."""
    seen, actions = situation.observation, situation.actions
    parts = [f"Objective: {seen.objective}", f"Step {seen.step + 1} of {seen.max_steps}."]
    if actions:
        parts.append(delimited("past-actions", "\n".join(actions[-ACTIONS_SHOWN:])))
    parts.append(delimited("observation", seen.text))
    if seen.inventory:
        parts.append(delimited("inventory", seen.inventory))
    # lone surrogates fit in no request
    return "\n".join(parts).encode("utf-8", "replace").decode()


class LlmTeacher:
    """A language model that acts. ``rules`` say what an action looks like in this environment, e.g. a shell command."""

    def __init__(self, client: ChatClient, rules: str = "") -> None:
        self._client = client
        self._rules = rules

    def action(self, situation: Situation) -> str:
        """Its action: one of the admissible ones, by number, where there are any listed, otherwise free text.

        Raises as `ChatClient.ask`: AnswerInvalid after two answers of another shape, ServerFailed when it keeps silent.
        There is no default. BadInput where the list is empty.
        """
        admissible = situation.observation.admissible
        system = f"{AGENT} {self._rules}".strip()
        if admissible is None:
            content = f"{situation_text(situation)}\nGive action, the next action."
            return self._client.ask(_messages(system, content), _Action).action
        if not admissible:
            raise BadInput("situation.observation.admissible: expected at least one action to choose from, found none")
        listed = "\n".join(f"{number}. {' '.join(action.split())}" for number, action in enumerate(admissible, 1))
        content = (
            f"{situation_text(situation)}\nThe actions to choose from, one a line:\n"
            f"{delimited('actions', listed, NO_LIMIT)}\nGive number, that of the next action."
        )
        literal: Any = Literal  # how many there are is known at run time only
        schema: Any = create_model("Choice", number=(literal[tuple(range(1, len(admissible) + 1))], ...))
        return admissible[self._client.ask(_messages(system, content), schema).number - 1]


class LlmVerifier:
    """A language model that grades proposed actions. ``rules`` as for `LlmTeacher`."""

    def __init__(self, client: ChatClient, rules: str = "") -> None:
        self._client = client
        self._rules = rules

    def scores(self, situation: Situation, actions: Sequence[str]) -> list[float]:
        """How likely each action leads to the objective, a grade of 0 to 10 over 10, in the order of ``actions``.

        All in one question, so the grades are comparable; the same action twice gets the same grade. Raises as
        `ChatClient.ask`.
        """
        distinct = list(dict.fromkeys(actions))
        if not distinct:
            return []
        system = (
            f"You grade the actions that an agent in an environment proposes. {DATA_RULE} {self._rules}\nGrade each from "
            "0 (harmful or useless) to 10 (surely the best next action) by how much it helps to reach the objective."
        )
        shown = [f"Action {i}:\n{delimited('action', action)}" for i, action in enumerate(distinct, 1)]
        content = "\n".join([situation_text(situation), *shown])
        grade = (Annotated[int, Field(ge=0, le=10)], ...)
        fields: Any = {f"action_{i}": grade for i in range(1, len(distinct) + 1)}
        grades = self._client.ask(_messages(system, content), create_model("Grades", **fields)).model_dump()
        score = {action: grades[f"action_{i}"] / 10 for i, action in enumerate(distinct, 1)}
        return [score[action] for action in actions]


class Sample(NamedTuple):
    """A sampled text and log p of its tokens (nats), None where the server gave none."""

    text: str
    token_logprobs: list[float] | None


class SamplingClient(ChatClient):
    """A `ChatClient` that also draws free texts with their log-probabilities. Samples are not cached.

    ``api_key`` is what this server gets: the LLM's key never goes there. Calls and tokens are counted, not capped.
    """

    def __init__(
        self, base_url: str, model: str, cache_dir: Path, api_key: str = "none", timeout_s: float = 60.0
    ) -> None:
        super().__init__(base_url, model, cache_dir, sys.maxsize, sys.maxsize, timeout_s)
        self._client = self._client.with_options(api_key=api_key)
        self._refused: set[str] = set()

    def sample(self, messages: Sequence[Message], count: int, temperature: float) -> list[Sample]:
        """``count`` samples, in several requests where the server gives one a request; fewer where it gives none.

        The seeds sent come from the messages, so a server that heeds them repeats itself. Raises BadInput (nobody at the
        URL, key refused, unknown model) and ServerFailed, also where there is no sample at all.
        """
        digest = hashlib.sha256(json.dumps(list(messages), sort_keys=True).encode()).digest()
        seed = int.from_bytes(digest[:4], "big") >> 1
        samples: list[Sample] = []
        for request in range(count):
            if len(samples) >= count:
                break
            wanted = {"n": count - len(samples), "temperature": temperature, "seed": seed + request, "logprobs": True}
            samples += self._draw(messages, wanted)
        if not samples:
            raise ServerFailed(f"the server {self.host} answers for {self.model} without any text")
        return samples[:count]

    def _draw(self, messages: Sequence[Message], wanted: dict[str, Any]) -> list[Sample]:
        """The samples of one request, leaving out of it what the server turns down."""
        while True:
            options = {name: value for name, value in wanted.items() if name not in self._refused}
            self._spend_call()
            # an error's body may echo the key, so messages name the status only and drop the cause
            try:
                completion: Any = self._client.chat.completions.create(
                    model=self.model,
                    messages=list(messages),  # type: ignore[arg-type]
                    **options,
                )
            except (BadRequestError, UnprocessableEntityError) as error:
                named = [name for name in options if re.search(rf"\b{name}\b", str(error))]
                if not named:
                    message = f"the server {self.host} refused a question to {self.model} with HTTP {error.status_code}"
                    raise ServerFailed(message) from None
                self._refused.update(named)
                continue
            except APIConnectionError as error:
                if type(error.__cause__).__name__ in ("ConnectError", "ConnectTimeout"):
                    message = f"nobody answers at {self.host}: expected a running server in {SLM_URL_VARIABLE}"
                    raise BadInput(message) from None
                raise ServerFailed(f"the server {self.host} gives no answer, {RETRIES + 1} times") from None
            except (AuthenticationError, PermissionDeniedError) as error:
                status = f"the server {self.host} answers HTTP {error.status_code}"
                raise BadInput(f"{status}: expected a valid key in {SLM_KEY_VARIABLE}") from None
            except NotFoundError:
                message = f"the server {self.host} knows no model {self.model} (HTTP 404)"
                expected = f"expected its API's address in {SLM_URL_VARIABLE} and a model of it in {SLM_MODEL_VARIABLE}"
                raise BadInput(f"{message}: {expected}") from None
            except APIStatusError as error:
                raise ServerFailed(f"the server {self.host} keeps answering HTTP {error.status_code}") from None
            except json.JSONDecodeError:
                return []
            samples = _samples(completion)
            used = getattr(getattr(completion, "usage", None), "total_tokens", None)
            characters = sum(len(m["content"]) for m in messages) + sum(len(s.text) for s in samples)
            self._spend_tokens(used if isinstance(used, int) else math.ceil(characters / 4))
            return samples


def small_model_from_environment(cache_dir: Path) -> SamplingClient:
    """The small model that ROUTEWRIGHT_SLM_BASE_URL, _MODEL and _API_KEY (if it needs one) describe, or BadInput."""
    names = (SLM_URL_VARIABLE, SLM_MODEL_VARIABLE, SLM_KEY_VARIABLE)
    url, model, key = (os.environ.get(name, "").strip() for name in names)
    for name, value, expected in (
        (SLM_URL_VARIABLE, url, "the small model's URL, such as http://localhost:8000/v1"),
        (SLM_MODEL_VARIABLE, model, "the small model's name"),
    ):
        if not value:
            raise BadInput(f"environment variable {name}: missing, expected {expected}")
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise BadInput(f"environment variable {SLM_KEY_VARIABLE}: expected printable ASCII without spaces")
    try:
        return SamplingClient(url, model, cache_dir, key or "none")
    except BadInput as error:
        raise BadInput(str(error).replace(URL_VARIABLE, SLM_URL_VARIABLE)) from None


class LlmProposer:
    """A small model by URL as `Proposer`: its greedy answer first, then samples.

    Candidates carry log-probabilities where the server gives them for every sample, and the scores of ``verify`` (such
    as `LlmVerifier.scores`) where it is given; the features need one of the two. Proposals are a function of the
    situation as far as the server heeds seeds. An answer that is not admissible stays a candidate: it is what this
    model would do.
    """

    def __init__(
        self,
        client: SamplingClient,
        verify: Callable[[Situation, Sequence[str]], Sequence[float]] | None = None,
        samples: int = 8,
        temperature: float = 0.8,
        rules: str = "",
    ) -> None:
        if samples < 1:
            raise BadInput(f"samples: expected a whole number of at least 1, found {samples}")
        self._client, self._verify = client, verify
        self._count, self._temperature, self._rules = samples, temperature, rules

    def propose(self, situations: Sequence[Situation]) -> list[list[Candidate]]:
        """At most ``samples`` candidates of each situation, a few situations at a time. Raises as `SamplingClient`."""
        with ThreadPoolExecutor(CONCURRENCY) as threads:
            return list(threads.map(self._candidates, situations))

    def _candidates(self, situation: Situation) -> list[Candidate]:
        system = f"{AGENT} {self._rules}".strip() + "\nAnswer with the next action alone, nothing before or after it."
        content, admissible = situation_text(situation), situation.observation.admissible
        if admissible:
            listed = "\n".join(" ".join(action.split()) for action in admissible)
            content += f"\nThe actions to choose from, one a line:\n{delimited('actions', listed, NO_LIMIT)}"
        messages = _messages(system, content)
        samples = self._client.sample(messages, 1, 0.0)
        if self._count > 1:
            samples += self._client.sample(messages, self._count - 1, self._temperature)
        texts = [sample.text for sample in samples]
        scores: Sequence[float | None] = [None] * len(texts)
        if self._verify is not None:
            scores = self._verify(situation, texts)
        return [
            Candidate(sample.text, sample.token_logprobs, score) for sample, score in zip(samples, scores, strict=True)
        ]


def _messages(system: str, content: str) -> list[Message]:
    return [{"role": "system", "content": system}, {"role": "user", "content": content}]


def _samples(completion: Any) -> list[Sample]:
    """The texts of a chat completion; none for a body of another shape (the client checks no shape)."""
    samples = []
    for choice in getattr(completion, "choices", None) or []:
        text = getattr(getattr(choice, "message", None), "content", None)
        if not isinstance(text, str):
            continue
        answer = re.sub(r"<think>.*?</think>", "", text, flags=re.DOTALL)
        tokens = getattr(getattr(choice, "logprobs", None), "content", None)
        values = [getattr(token, "logprob", None) for token in tokens or []]
        known = [min(float(v), 0.0) for v in values if isinstance(v, int | float) and math.isfinite(v)]
        # of a text that was thought about first, it is not known which tokens are the action's
        whole = bool(known) and len(known) == len(values) and answer == text
        samples.append(Sample(answer.strip(), known if whole else None))
    return samples
