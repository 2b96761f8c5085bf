"""Names as variables: which words are names, and which slots they get."""

from __future__ import annotations

import re

from routewright.step_router.names import SLOTS, known_words, name_slots, slot

KNOWN = frozenset({"take", "the", "from", "put", "on"})


def test_known_words_by_hand() -> None:
    """60 tasks: 18 of them are 30 %, 2 are 3.3 % and 1 is 1.7 %."""
    texts = [(f"t{i}", "You see a Room." + (" moss" if i < 2 else "") + (" fern" if i < 1 else "")) for i in range(60)]
    texts += [(f"t{i}", "a lamp hangs here") for i in range(20, 40)]
    actions = [(f"t{i}", "TAKE key") for i in range(18)]
    actions += [(f"t{i}", "take coin") for i in range(17)] + [("t59", "take lamp")]
    known = known_words(texts, actions)
    assert known == sorted(known)
    assert {"you", "see", "a", "room", "moss", "hangs", "here", "take", "key", "lamp"} == set(known)
    # key occurs in 18 of 60 tasks and coin in 17, lamp in 1 action but 21 texts, fern in a single text


def test_a_task_counts_once_however_often_it_says_a_word() -> None:
    texts = [(f"t{i}", "room") for i in range(100)]
    actions = [("t0", "coin coin coin")] * 50
    assert known_words(texts, actions) == ["room"]


def test_the_same_word_gets_the_same_slot_everywhere() -> None:
    prompt, take, put = name_slots(["The apple, from the shelf.", "take Apple from shelf", "put APPLE on shelf"], KNOWN)
    found = re.fullmatch(r"the (<n\d+>), from the (<n\d+>)\.", prompt)
    assert found is not None
    apple, shelf = found.groups()
    assert apple != shelf
    assert take == f"take {apple} from {shelf}"
    assert put == f"put {apple} on {shelf}"


def test_known_words_and_everything_between_words_stay() -> None:
    assert name_slots(["Take the, put: on!\nfrom"], KNOWN) == ["take the, put: on!\nfrom"]


def test_slots_are_drawn_by_the_first_text_and_the_draw() -> None:
    texts = ["the apple on the shelf", "take apple"]
    assert name_slots(texts, KNOWN) == name_slots(texts, KNOWN)
    assert name_slots(texts, KNOWN, draw=0) == name_slots(texts, KNOWN)
    assert len({name_slots(texts, KNOWN, draw)[1] for draw in range(20)}) > 10
    alone, together = name_slots(texts[:1], KNOWN), name_slots([*texts, "put lamp on shelf"], KNOWN)
    assert alone[0] == together[0], "what else is scored does not matter"
    assert len({name_slots([f"the apple{'!' * i}"], KNOWN)[0][4:9] for i in range(20)}) > 5, "another text, another slot"


def test_more_names_than_slots_share_them() -> None:
    names = [f"name{i}" for i in range(SLOTS + 6)]
    (text,) = name_slots([" ".join(names)], KNOWN)
    slots = text.split()
    assert len(slots) == SLOTS + 6
    assert set(slots) == {slot(i) for i in range(SLOTS)}
    assert slots[SLOTS:] == slots[:6]
    assert name_slots([" ".join(names), "name3 name3"], KNOWN)[1] == f"{slots[3]} {slots[3]}"
