"""Written proposals are asked for once, whoever asks again and whatever was killed in between."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tiny_policy import situation

from routewright.step_router.features import Candidate
from routewright.step_router.remembered import Remembered
from routewright.step_router.situations import Situation


class Counting:
    """Two candidates that name the situation, and what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[Situation]] = []

    def propose(self, situations: Sequence[Situation]) -> list[list[Candidate]]:
        self.asked.append(list(situations))
        return [[Candidate(s.observation.objective, [-0.1, -1 / 3], 0.25), Candidate("b", None, 0.75)] for s in situations]


WRITTEN = [situation(i, listed=False) for i in range(3)]
LISTED = [situation(i) for i in range(2)]


def test_a_written_proposal_is_asked_for_once(tmp_path: Path) -> None:
    model = Counting()
    remembered = Remembered(model, tmp_path / "memory")
    expected = Counting().propose(WRITTEN)
    assert remembered.propose(WRITTEN) == expected
    assert remembered.propose(WRITTEN[::-1]) == expected[::-1]
    assert model.asked == [[view] for view in WRITTEN]
    later = Counting()
    assert Remembered(later, tmp_path / "memory").propose(WRITTEN) == expected, "from the files, to the last digit"
    assert later.asked == []


def test_listed_actions_pass_by_together(tmp_path: Path) -> None:
    model = Counting()
    remembered = Remembered(model, tmp_path / "memory")
    mixed = [LISTED[0], WRITTEN[0], LISTED[1]]
    for _ in range(2):
        assert [options[0].action for options in remembered.propose(mixed)] == [v.observation.objective for v in mixed]
    assert model.asked == [LISTED, [WRITTEN[0]], LISTED]
    Remembered(model, tmp_path / "other").propose(LISTED)
    assert not (tmp_path / "other").exists()


def test_a_line_that_a_kill_cut_off_is_asked_for_again(tmp_path: Path) -> None:
    Remembered(Counting(), tmp_path).propose(WRITTEN)
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text()[:-40])
    model = Counting()
    remembered = Remembered(model, tmp_path)
    assert remembered.propose(WRITTEN) == Counting().propose(WRITTEN)
    assert model.asked == [[WRITTEN[2]]]
    assert Remembered(Counting(), tmp_path).propose(WRITTEN[2:]) == Counting().propose(WRITTEN[2:])
