"""Announcements of collectives: packed into integers and back."""

from __future__ import annotations

import torch
from hypothesis import given, strategies as st

from infinity.comm.agreement.announcements import (
    CALLS,
    WORDS,
    Announcement,
    Operation,
    flag_words,
    pack_flags,
    unpack_flags,
)
from infinity.plan.layout import Slot, UnitLayout

OF_STATE = (Operation.READ_STATE, Operation.WRITE_STATE)


@given(st.sampled_from(Operation), st.none() | st.integers(0, 2**40), st.integers(0, 2**60))
def test_an_announcement_survives_the_exchange(operation: Operation, unit: int | None, length: int) -> None:
    announced = Announcement(operation, unit, length)
    words = announced.words()
    assert len(words) == WORDS and all(isinstance(word, int) for word in words)
    assert Announcement.of(words) == announced


@given(st.sets(st.integers(0, 400)))
def test_flags_survive_the_exchange(members: set[int]) -> None:
    words = pack_flags(members, flag_words(401))
    assert len(words) == flag_words(401) and all(0 <= word < 2**62 for word in words)
    assert unpack_flags(words) == members


SLOTS = tuple(Slot(name, (64,), 64 * place, 0) for place, name in enumerate(("up.weight", "up.bias", "down.weight")))
UNITS = [UnitLayout(index, f"blocks.{index}", SLOTS, torch.float32, True, 192, 1) for index in range(2)]


def test_every_operation_has_a_text() -> None:
    texts = {Announcement(operation, 1, 1 << 32).text(UNITS) for operation in Operation if operation not in OF_STATE}
    texts |= {Announcement.of_state(operation, 1, 0, "master").text(UNITS) for operation in OF_STATE}
    assert len(texts) == len(Operation) and all(text.endswith(" unit blocks.1") for text in texts)


def test_a_call_names_the_state() -> None:
    """All states of all slots have announcements of their own, also after the exchange."""
    states = [(slot, name) for slot in range(3) for name in ("master", "gradient", "exp_avg", "sum")]
    calls = [Announcement.of_state(Operation.READ_STATE, 1, slot, name) for slot, name in states]
    assert len(set(calls)) == len(calls) and [Announcement.of(call.words()) for call in calls] == calls
    assert [call.text(UNITS) for call in calls[4:7]] == [
        "calls get_full_fp32_param() for up.bias in unit blocks.1",
        "calls get_full_grad() for up.bias in unit blocks.1",
        "calls get_full_optimizer_state() for exp_avg of up.bias in unit blocks.1",
    ]


def test_a_call_for_several_units_names_the_first() -> None:
    """Any other units are another call, also after the exchange."""
    calls = [Announcement.of_units(Operation.GATHER_PARAMETERS, units) for units in ([0], [1], [0, 1], [1, 0])]
    assert len(set(calls)) == len(calls) and [Announcement.of(call.words()) for call in calls] == calls
    assert calls[1].text(UNITS) == "calls GatheredParameters() for unit blocks.1"
    assert calls[2].text(UNITS) == "calls GatheredParameters() for unit blocks.0 and 1 more"


def test_collectives_that_a_rank_may_leave_before_another_enters() -> None:
    """A broadcast ends at its source at once; no rank waits for an empty part."""
    loose = {operation for operation in Operation if not Announcement(operation, length=4).is_synchronous(4)}
    assert loose == {Operation.BROADCAST, Operation.GIVE_UP, *CALLS}
    assert not Announcement(Operation.ALL_GATHER_STATE, length=3).is_synchronous(4)
