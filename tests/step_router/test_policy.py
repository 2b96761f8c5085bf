"""The small model: packed passes against plain ones, proposals, and folders that are incomplete."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_policy import NAMED, save_policy, save_verifier, situation, spread, tiny_policy
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from routewright.errors import BadInput
from routewright.step_router import policy as module
from routewright.step_router.names import SLOTS, slot
from routewright.step_router.policy import (
    Policy,
    SmallModel,
    Verifier,
    action_log_probs,
    load_policy,
    load_verifier,
    pack,
    packed_log_probs,
    packed_scores,
)
from routewright.step_router.prompts import completion, prompt

PAD, EOS, WORDS = 0, 1, 40
ROUNDED = 1.01e-4  # one unit of the last digit that is kept: sums in another order may fall on its other side
VIEWS = [situation(i, calm=i % 2 == 0, done=("wait",) * (3 * i)) for i in range(4)]


def tokens(*lengths: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, WORDS, (length,), generator=generator).tolist() for length in lengths]


PROMPTS = tokens(3, 11, 1, 7, seed=0)
ACTIONS = [
    [[*action, EOS] for action in tokens(*lengths, seed=i)] for i, lengths in enumerate([(2,), (1, 4, 2), (3, 3), (5, 1)])
]


def architecture(name: str, kind: Any = AutoModelForCausalLM, **more: Any) -> Any:
    """An untrained model of two layers with clear preferences."""
    config = AutoConfig.for_model(
        name, vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=64, pad_token_id=PAD, eos_token_id=EOS,
        bos_token_id=None, **more,
    )  # fmt: skip
    torch.manual_seed(0)
    return spread(kind.from_config(config), 0.3)


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama", "gemma2"])
@torch.inference_mode()
def test_packed_log_probs_are_those_of_plain_passes(name: str) -> None:
    """Every profile's architecture: the prompt with one action alone, no mask, no padding."""
    model = architecture(name)
    packed = pack(PROMPTS, ACTIONS, PAD)
    values = packed_log_probs(model, packed)
    sums = action_log_probs(values, packed)
    assert sums.values.shape == (4, 3)
    for row, (text, actions) in enumerate(zip(PROMPTS, ACTIONS, strict=True)):
        for number, action in enumerate(actions):
            logits = model(torch.tensor([[*text, *action]])).logits[0].float()
            plain = logits.log_softmax(-1)[len(text) - 1 : -1].gather(1, torch.tensor(action)[:, None])[:, 0]
            own = values[row][packed.owner[row] == number]
            torch.testing.assert_close(own, plain, atol=2e-4, rtol=1e-4)
            assert sums.values[row, number].item() == pytest.approx(plain.sum().item(), abs=1e-3)
            assert sums.tokens[row, number] == len(action)
        assert (sums.values[row, len(actions) :] == -1e9).all()
        assert (sums.tokens[row, len(actions) :] == 0).all()
    assert values[packed.owner >= 0].std() > 0.5, "the model tells tokens apart"


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama", "gemma2"])
@torch.inference_mode()
def test_packed_scores_are_the_classifiers_logits(name: str) -> None:
    model = architecture(name, AutoModelForSequenceClassification, num_labels=1)
    packed = pack(PROMPTS, ACTIONS, PAD)
    scores = packed_scores(model, packed)
    found = []
    for row, (text, actions) in enumerate(zip(PROMPTS, ACTIONS, strict=True)):
        for number, action in enumerate(actions):
            plain = model(torch.tensor([[*text, *action]])).logits[0, 0].item()
            last = int((packed.owner[row] == number).nonzero()[-1])
            assert scores[row, last].item() == pytest.approx(plain, abs=1e-3)
            found.append(plain)
    assert max(found) - min(found) > 0.5


def test_the_layout_by_hand() -> None:
    packed = pack([[7], [8, 9]], [[[3, 1], [4, 5, 1]], [[6, 1]]], PAD)
    assert packed.prompt_width == 2
    assert packed.tokens.tolist() == [[0, 7, 3, 1, 4, 5, 1], [8, 9, 6, 1, 0, 0, 0]]
    assert packed.positions.tolist() == [[0, 0, 1, 2, 1, 2, 3], [0, 1, 2, 3, 0, 0, 0]]
    assert packed.owner.tolist() == [[0, 0, 1, 1, 1], [0, 0, -1, -1, -1]]
    assert packed.target.tolist() == [[3, 1, 4, 5, 1], [6, 1, 0, 0, 0]]
    assert packed.predictor.tolist() == [[0, 1, 0, 3, 4], [0, 1, 0, 0, 0]]


@pytest.fixture(scope="module")
def small() -> Policy:
    return tiny_policy(scale=0.12)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    bc = save_policy(folder / "policy", scale=0.12)
    return {"policy": bc, "verifier": save_verifier(bc, folder / "verifier")}


def flat(values: Any) -> list[float]:
    return [number for value in values for number in flat(value)] if isinstance(values, list) else [values]


@pytest.mark.parametrize("batch_tokens", [8192, 150])
def test_what_else_is_in_the_batch_does_not_matter(
    small: Policy, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, batch_tokens: int
) -> None:
    monkeypatch.setattr(module, "BATCH_TOKENS", batch_tokens)
    actions = [["wait", "press red"], ["press green"], ["wait", "look around", "press green"], ["press red"]]
    judge = load_verifier(folders["verifier"])
    told: list[Callable[[Any, Any], Any]] = [small.log_probs, judge.scores]
    for ask in told:
        together = ask(VIEWS, actions)
        alone = [ask([view], [some])[0] for view, some in zip(VIEWS, actions, strict=True)]
        assert [len(some) for some in together] == [2, 1, 3, 1]
        assert flat(together) == pytest.approx(flat(alone), abs=ROUNDED)
        assert len(set(flat(together))) > 4
    assert all(0 < score < 1 for score in flat(judge.scores(VIEWS, actions)))


def test_log_probs_are_of_the_tokens_that_are_read(small: Policy) -> None:
    text, (action,) = small.reader.read(VIEWS[1], ["press red"])
    (((*values,),),) = small.log_probs([VIEWS[1]], [["press red"]])
    with torch.inference_mode():
        logits = small.model(torch.tensor([[*text, *action]])).logits[0].double()
    plain = logits.log_softmax(-1)[len(text) - 1 : -1].gather(1, torch.tensor(action)[:, None])[:, 0]
    assert values == pytest.approx(plain.tolist(), abs=2e-4)
    assert action[-1] == small.reader.tokenizer.eos_token_id


def test_the_most_probable_actions_are_proposed(small: Policy, folders: dict[str, Path]) -> None:
    judge = load_verifier(folders["verifier"])
    proposed = SmallModel(small, judge, 3).propose(VIEWS)
    for view, candidates in zip(VIEWS, proposed, strict=True):
        shown = list(view.observation.admissible or ())
        sums = {action: sum(values) for action, values in zip(shown, small.log_probs([view], [shown])[0], strict=True)}
        best = sorted(sums.values(), reverse=True)
        assert len(candidates) == 3
        for place, candidate in enumerate(candidates):
            assert candidate.token_logprobs is not None
            assert sum(candidate.token_logprobs) == pytest.approx(best[place], abs=1e-3)
            assert len(candidate.token_logprobs) == len(small.reader.read(view, [candidate.action])[1][0])
        scores = judge.scores([view], [[candidate.action for candidate in candidates]])[0]
        assert [candidate.verifier_score for candidate in candidates] == pytest.approx(scores, abs=ROUNDED)
    assert len({tuple(candidates[0].token_logprobs or ()) for candidates in proposed}) == 4, "the situation matters"


def test_equal_situations_get_equal_proposals(small: Policy) -> None:
    model = SmallModel(small, None, 8)
    first, other, again = model.propose([VIEWS[2], VIEWS[1], VIEWS[2]])
    assert first == again
    assert first != other
    assert sorted(c.action for c in first) == sorted(VIEWS[2].observation.admissible or ()), "all, where there are fewer"
    assert all(candidate.verifier_score is None for candidate in first)


def test_free_text_is_written_greedily_and_sampled(small: Policy) -> None:
    small = replace(small, reader=replace(small.reader, new_tokens=6))
    view = situation(1, listed=False)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    model = SmallModel(small, None, 4)
    (candidates,) = model.propose([view])
    assert torch.equal(torch.rand(2), expected), "a caller's random numbers stay"
    assert model.propose([view]) == [candidates]
    assert len(candidates) == 4
    assert candidates[0].action == small.write(view, 1, seed=99)[0], "the greedy one comes first, without a seed"
    assert len({candidate.action for candidate in candidates}) > 1
    assert small.write(view, 4, seed=1)[1:] != small.write(view, 4, seed=2)[1:]


@torch.inference_mode()
def test_the_first_text_is_the_most_probable_token_after_token(small: Policy) -> None:
    """By plain passes over the text so far; at most ``new_tokens`` of them."""
    small = replace(small, reader=replace(small.reader, new_tokens=5))
    view = situation(2, listed=False)
    text = small.reader.read(view, [])[0]
    prompt_length = len(text)
    for _ in range(5):
        text = [*text, int(small.model(torch.tensor([text])).logits[0, -1].argmax())]
    expected = small.reader.tokenizer.decode(text[prompt_length:], skip_special_tokens=True).removeprefix(" ")
    assert small.write(view, 3, seed=0)[0] == expected


def test_writing_reads_each_token_once(small: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training leaves use_cache off in the config; without the cache every token costs the whole text again."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3", vocab_size=len(small.reader.tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, bos_token_id=None, eos_token_id=None, use_cache=False,
    )  # fmt: skip
    plain = AutoModelForCausalLM.from_config(config).eval()
    lengths: list[int] = []
    forward = type(plain).forward

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        lengths.append(kwargs["input_ids"].shape[1])
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(plain), "forward", watched)
    view, reader = situation(1, listed=False), replace(small.reader, new_tokens=4)
    Policy(plain, reader).write(view, 2, seed=0)
    assert lengths == [len(reader.read(view, [])[0]), 1, 1, 1]


@pytest.mark.parametrize("limit", [10, 11])
def test_a_long_prompt_keeps_both_ends(small: Policy, limit: int) -> None:
    whole, actions = small.reader.read(VIEWS[1], ["press red"])
    cut, same = replace(small.reader, limit=limit).read(VIEWS[1], ["press red"])
    assert len(whole) > limit
    assert cut == whole[:5] + whole[-(limit - 5) :]
    assert same == actions
    assert replace(small.reader, limit=len(whole)).read(VIEWS[1], [])[0] == whole


def test_a_name_is_one_token_and_the_same_in_prompt_and_action(small: Policy) -> None:
    tokenizer = small.reader.tokenizer
    slots = set(tokenizer.convert_tokens_to_ids([slot(i) for i in range(SLOTS)]))
    assert len(slots) == SLOTS
    text, (action, known) = small.reader.read(VIEWS[1], ["press zorb1", "press red"])
    assert [token for token in action if token in slots] == [token for token in text if token in slots]
    assert len([token for token in action if token in slots]) == 1
    assert not slots.intersection(known)
    draws = {tuple(small.reader.read(VIEWS[1], [], draw)[0]) for draw in range(8)}
    assert len(draws) > 4


def test_a_pretrained_reader_reads_the_words(small: Policy) -> None:
    reader = replace(small.reader, known=None)
    text, (action,) = reader.read(VIEWS[1], ["press zorb1"])
    assert reader.tokenizer.decode(text).strip() == prompt(VIEWS[1]).strip()
    assert reader.tokenizer.decode(action[:-1]).strip() == completion("press zorb1").strip()


def test_a_saved_policy_says_the_same(small: Policy, folders: dict[str, Path]) -> None:
    loaded = load_policy(folders["policy"])
    actions = [["wait", "press zorb1"]] * 4
    assert flat(loaded.log_probs(VIEWS, actions)) == pytest.approx(flat(small.log_probs(VIEWS, actions)), abs=ROUNDED)
    reader, own = loaded.reader, small.reader
    assert (reader.limit, reader.known, reader.new_tokens) == (own.limit, own.known, own.new_tokens)
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert isinstance(load_verifier(folders["verifier"]), Verifier)


@pytest.mark.parametrize(
    ("told", "expected"), [("bfloat16", torch.bfloat16), ("float32", torch.float32), (None, torch.float32)]
)
@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_gpu_reads_weights_as_the_profile_says_and_a_cpu_as_they_are(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str | None, expected: torch.dtype,
    on_gpu: bool,
) -> None:  # fmt: skip
    folder = copied(folders["policy"], tmp_path / "policy")
    description = json.loads((folder / "policy.json").read_text())
    (folder / "policy.json").write_text(json.dumps(description | ({} if told is None else {"dtype": told})))
    places: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, place: places.append(place) or self)
    model = load_policy(folder).model
    assert {parameter.dtype for parameter in model.parameters()} == {expected if on_gpu else torch.float32}
    assert places == ["cuda" if on_gpu else "cpu"]


@pytest.mark.parametrize("kind", ["policy", "verifier"])
def test_only_safetensors_and_text_are_written(folders: dict[str, Path], kind: str) -> None:
    files = [file for file in folders[kind].rglob("*") if file.is_file()]
    assert {file.suffix for file in files} <= {".safetensors", ".json", ".jinja", ".txt"}
    assert "model.safetensors" in {file.name for file in files}


LOADERS: dict[str, Callable[[Path], object]] = {"policy": load_policy, "verifier": load_verifier}


def copied(source: Path, target: Path, leave_out: str = "") -> Path:
    target.mkdir()
    for file in source.iterdir():
        if not (leave_out and file.name.startswith(leave_out)):
            (target / file.name).write_bytes(file.read_bytes())
    return target


@pytest.mark.parametrize("kind", ["policy", "verifier"])
@pytest.mark.parametrize(
    ("missing", "told"),
    [
        ("policy.json", "policy.json is missing, expected a folder written by its training stage"),
        ("model.safetensors", "cannot be loaded"),
        ("tokenizer", "the tokenizer is missing, expected a folder written by its training stage"),
        ("tokenizer.json", "the tokenizer is missing"),
        ("config.json", "cannot be loaded"),
    ],
)
def test_an_incomplete_folder_is_refused(
    folders: dict[str, Path], tmp_path: Path, kind: str, missing: str, told: str
) -> None:
    folder = copied(folders[kind], tmp_path / kind, missing)
    with pytest.raises(BadInput, match=f"^{kind} .*{told}") as error:
        LOADERS[kind](folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"limit": "many", "known_words": null}', '{"limit": 9, "known_words": 7}']
)
def test_a_damaged_description_is_refused(folders: dict[str, Path], tmp_path: Path, content: str) -> None:
    folder = copied(folders["policy"], tmp_path / "policy")
    (folder / "policy.json").write_text(content)
    with pytest.raises(BadInput, match="cannot be loaded"):
        load_policy(folder)


def test_damaged_weights_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = copied(folders["policy"], tmp_path / "policy")
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(BadInput, match="cannot be loaded"):
        load_policy(folder)


def test_made_states_have_names_that_are_not_known(small: Policy) -> None:
    """What these tests rely on: captains are names, lights and buttons are words."""
    assert small.reader.known is not None
    assert {"press", "red", "green", "calm", "light"} <= small.reader.known
    assert not {f"zorb{i}" for i in range(NAMED)} & small.reader.known


def test_policy_and_verifier_are_not_taken_for_each_other(tmp_path: Path) -> None:
    policy = save_policy(tmp_path / "policy")
    with pytest.raises(BadInput, match="it was written by the stage bc"):
        load_verifier(policy)
    verifier = save_verifier(policy, tmp_path / "verifier")
    with pytest.raises(BadInput, match="it was written by the stage verifier"):
        load_policy(verifier)
