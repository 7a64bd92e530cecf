"""The account of slots: each is in one state, whatever happens in whatever order."""

import random

import pytest

from alfish.processes.messages import Seconds, Segment
from alfish.unrollers.workers.slots import SlotLedger


def filled(worker_index, slot, sequence):
    return Segment(worker_index, slot, sequence, 0, [5], [[]], Seconds(0, 0, 0, 0))


def test_a_slot_goes_round():
    ledger = SlotLedger(2, 2)
    assert ledger.is_idle(1) and ledger.next_free(1) == 3
    ledger.grant(1)
    assert not ledger.is_idle(1) and ledger.is_idle(0) and ledger.next_free(1) == 2
    ledger.fill(filled(1, 3, 0))
    assert not ledger.is_idle(1) and [segment.slot for segment in ledger.ready] == [3]
    assert [segment.slot for segment in ledger.take()] == [3]
    assert ledger.is_idle(1) and ledger.ready == [] and [segment.slot for segment in ledger.in_use] == [3]
    ledger.grant(1)
    assert ledger.next_free(1) is None
    ledger.release()
    assert ledger.next_free(1) == 3 and ledger.in_use == []
    ledger.check_valid()


def test_a_segment_that_was_lost_or_doubled_is_refused():
    ledger = SlotLedger(1, 3)
    for _ in range(3):
        ledger.grant(0)
    ledger.fill(filled(0, 0, 0))
    for sequence in (0, 2):
        with pytest.raises(AssertionError, match="a segment was lost or duplicated"):
            ledger.fill(filled(0, 1, sequence))
    with pytest.raises(AssertionError, match="a slot that was not granted"):
        ledger.fill(filled(0, 0, 1))
    ledger.fill(filled(0, 1, 1))
    ledger.on_death(0)
    ledger.grant(0)
    ledger.fill(filled(0, 2, 0))  # the first segment of the worker's successor
    assert [segment.slot for segment in ledger.ready] == [0, 1, 2]
    ledger.check_valid()


def test_filled_slots_of_a_dead_worker_stay_taken():
    ledger = SlotLedger(2, 4)
    for _ in range(3):
        ledger.grant(0)
    ledger.fill(filled(0, 3, 0))
    ledger.take()
    ledger.fill(filled(0, 2, 1))
    ledger.on_death(0)
    assert ledger._free == [[0, 1], [4, 5, 6, 7]]
    ledger.check_valid()


def test_the_oldest_segments_are_taken_up_to_both_limits():
    ledger = SlotLedger(2, 4)
    for slot in (3, 2, 7, 1, 6):
        ledger.grant(slot // 4)
        ledger.fill(filled(slot // 4, slot, {3: 0, 2: 1, 7: 0, 1: 2, 6: 1}[slot]))
    assert [segment.slot for segment in ledger.take(most_of_each=1)] == [3, 7]
    assert [segment.slot for segment in ledger.take(most=2)] == [2, 1]
    assert [segment.slot for segment in ledger.take()] == [6]
    ledger.check_valid()


def test_each_slot_always_has_exactly_one_state():
    generator = random.Random(0)
    for _ in range(30):
        ledger, sequences = SlotLedger(3, 3), [0] * 3
        for _ in range(200):
            worker = generator.randrange(3)
            event = generator.choice(["grant", "fill", "fill", "take", "release", "death"])
            if event == "grant" and ledger.next_free(worker) is not None:
                ledger.grant(worker)
            elif event == "fill" and ledger._granted[worker]:
                slot = generator.choice(sorted(ledger._granted[worker]))
                ledger.fill(filled(worker, slot, sequences[worker]))
                sequences[worker] += 1
            elif event == "take":
                ledger.take(generator.choice([None, 1, 2]), generator.choice([None, 1, 2]))
            elif event == "release":
                ledger.release()
            elif event == "death":
                ledger.on_death(worker)
                sequences[worker] = 0
            ledger.check_valid()


def test_an_account_that_lost_a_slot_is_not_valid():
    ledger = SlotLedger(2, 2)
    ledger._free[0].pop()
    with pytest.raises(AssertionError, match="slots of worker 0 were lost or duplicated"):
        ledger.check_valid()
