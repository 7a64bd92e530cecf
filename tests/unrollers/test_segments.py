"""Segments put together, with every row in its column, and statistics of the segments between two summaries."""

import types

import numpy as np
import pytest
import torch
from scripted import FIRST, LAST, MID, PAD

from alfish import nest
from alfish.data import Ends, Experience, TimeStep, in_line
from alfish.processes.messages import Seconds
from alfish.unrollers.unroller import StepRecords
from alfish.unrollers.workers.segments import (
    Stats,
    in_columns,
    masked,
    one_after_another,
    records_in_columns,
    side_by_side,
)


def part(columns, first_env_id=0, version=0):
    """Columns of (step type, number) rows; every other leaf repeats the number."""
    step_type, number = torch.tensor(columns).permute(2, 1, 0)
    number = number.float()
    env_id = torch.arange(first_env_id, first_env_id + len(columns), dtype=torch.int32).expand(number.shape)
    observation = {"flat": number, "deep": (torch.stack([number, -number], -1),)}
    step = TimeStep(step_type.int(), number, number / 100, observation, number.long(), env_id)
    versions = torch.full((len(columns),), version)
    return Experience(step, number.long(), None, number[0] + 0.5, versions, (number[0] + 0.25,))


def numbers(experience):
    """Columns of (step type, number), after a look at the other leaves: all tell the same number."""
    step, number = experience.time_step, experience.time_step.reward
    real = step.step_type != PAD
    for leaf in (step.observation["flat"], step.observation["deep"][0][..., 0], -step.observation["deep"][0][..., 1]):
        assert torch.equal(leaf, number)
    assert torch.equal(step.discount, number / 100) and torch.equal(step.prev_action, number.long())
    assert torch.equal(experience.action, number.long()) and experience.info is None
    assert (step.env_id == step.env_id[0])[real].all()
    return [list(zip(*column)) for column in zip(step.step_type.T.tolist(), number.long().T.tolist())]


TWO = [[(FIRST, 1), (MID, 2)], [(MID, 11), (LAST, 12)]]
NEXT = [[(MID, 3), (LAST, 4)], [(FIRST, 13), (MID, 14)]]


def test_parts_side_by_side_keep_their_columns_versions_and_states():
    joined = side_by_side([part(TWO, version=3), part(NEXT, first_env_id=2, version=5)])
    assert numbers(joined) == TWO + NEXT
    assert joined.time_step.env_id[0].tolist() == [0, 1, 2, 3]
    assert joined.policy_version.tolist() == [3, 3, 5, 5]
    assert joined.state.tolist() == [1.5, 11.5, 3.5, 13.5]
    assert joined.transform_state[0].tolist() == [1.25, 11.25, 3.25, 13.25]


def test_a_single_part_is_not_copied():
    alone = part(TWO)
    assert side_by_side([alone]) is alone


def test_pad_rows_of_consecutive_parts_are_at_the_end():
    short = [[(MID, 3), (PAD, 0)], [(PAD, 0), (PAD, 0)]]
    joined = one_after_another([part(TWO), part(short), part(NEXT)])
    kept = [[one for one in first + second + third if one[0] != PAD] for first, second, third in zip(TWO, short, NEXT)]
    found = numbers(joined)
    assert [column[: len(own)] for column, own in zip(found, kept)] == kept
    assert all(kind == PAD for column, own in zip(found, kept) for kind, _ in column[len(own) :])
    assert [len(column) for column in found] == [6, 6]


def test_consecutive_parts_begin_with_the_first_state():
    parts = [part(TWO, version=3), part(NEXT, version=5)]
    joined = one_after_another(parts)
    assert numbers(joined) == [TWO[0] + NEXT[0], TWO[1] + NEXT[1]]
    assert joined.policy_version.tolist() == [3, 3] and joined.state.tolist() == [1.5, 11.5]
    one_after_another(parts[:1]).state.zero_()
    one_after_another(parts[:1]).time_step.reward.zero_()
    assert parts[0].state.tolist() == [1.5, 11.5] and parts[0].time_step.reward[0].tolist() == [1, 11]  # a copy


def test_last_rows_beside_the_rows_stay_where_they_belong():
    def with_ends(rows, ended, reward):
        own = part(rows)
        last = part([[(LAST, reward)] * 2] * 2).time_step
        return own._replace(ends=Ends(torch.tensor(ended), last))

    def rows_in_line(experience):
        step = in_line(experience).experience.time_step
        return [list(zip(*column)) for column in zip(step.step_type.T.tolist(), step.reward.long().T.tolist())]

    one = with_ends([[(FIRST, 1), (FIRST, 3)], [(MID, 11), (MID, 12)]], [[True, False], [False, True]], 7)
    more = with_ends([[(MID, 4), (MID, 5)], [(FIRST, 13), (MID, 14)]], [[False, False], [False, True]], 8)
    expected = [
        [(FIRST, 1), (LAST, 7), (FIRST, 3), (MID, 4), (MID, 5), (PAD, 0)],
        [(MID, 11), (MID, 12), (LAST, 7), (FIRST, 13), (MID, 14), (LAST, 8)],
    ]
    assert rows_in_line(one_after_another([one, more])) == expected
    joined = rows_in_line(side_by_side([one, more]))
    assert joined[1] == expected[1][:3] and joined[3] == expected[1][3:]
    filled = in_columns([[one, more], [one], []])
    assert rows_in_line(filled)[:2] == expected
    assert rows_in_line(filled)[3:] == [[*expected[1][:3], *[(PAD, 0)] * 3], *[[(PAD, 0)] * 6] * 2]


def test_columns_that_are_masked_have_no_rows():
    own = part(TWO)
    ends = Ends(torch.ones(2, 2, dtype=torch.bool), part([[(LAST, 7)] * 2] * 2).time_step)
    given = nest.arrays(own._replace(ends=ends))
    found = in_line(masked(given, np.array([True, False]))).experience.time_step
    assert found.step_type.T.tolist() == [[PAD] * 4, [MID, LAST, LAST, LAST]]
    assert given.time_step.step_type[0].tolist() == [FIRST, MID]  # not changed


def test_each_environment_has_its_column_however_much_its_worker_gave():
    given = [part(TWO, first_env_id=2, version=7), part(NEXT, first_env_id=2, version=8)]
    joined = in_columns([[], given, [part(TWO, first_env_id=4)]])
    pad = [(PAD, 0)] * 2
    assert numbers(joined) == [pad + pad, pad + pad, TWO[0] + NEXT[0], TWO[1] + NEXT[1], TWO[0] + pad, TWO[1] + pad]
    assert joined.policy_version.tolist() == [-1, -1, 7, 7, 0, 0]
    assert joined.state.tolist() == [0, 0, 1.5, 11.5, 1.5, 11.5]
    assert joined.time_step.env_id[0, 2:].tolist() == [2, 3, 4, 5]


def arrived(step_type, infos=(), num_rewards=None):
    step_type = np.array(step_type, np.int32)
    shape = step_type.shape if num_rewards is None else (*step_type.shape, num_rewards)
    return StepRecords(step_type, np.full(shape, len(step_type), np.float32), list(infos))


@pytest.mark.parametrize("num_rewards", [None, 2])
def test_arrivals_stand_in_their_environments_columns(num_rewards):
    parts = [
        [arrived([[FIRST, FIRST]], num_rewards=num_rewards), arrived([[MID, LAST]] * 2, num_rewards=num_rewards)],
        [],
        [arrived([[LAST, MID]] * 2, num_rewards=num_rewards)],
    ]
    step_type, reward, infos, *_ = records_in_columns(parts)
    assert step_type.tolist() == [
        [FIRST, FIRST, PAD, PAD, LAST, MID],
        [MID, LAST, PAD, PAD, LAST, MID],
        [MID, LAST, PAD, PAD, PAD, PAD],
    ]
    assert reward.shape == (3, 6, *([] if num_rewards is None else [num_rewards])) and infos == []
    entry = reward if num_rewards is None else reward[..., 1]
    assert entry.tolist() == [[1, 1, 0, 0, 2, 2], [2, 2, 0, 0, 2, 2], [2, 2, 0, 0, 0, 0]]
    assert step_type.dtype == np.int32 and reward.dtype == np.float32


def test_infos_are_of_all_environments_with_a_mask_for_each_key():
    told = {"count": np.array([3, 4]), "_count": np.array([True, False]), "deep": {"twice": np.array([5.0, 6.0])}}
    told |= {7: torch.tensor([1.5, 2.5]), "_7": np.array([False, True]), "_alone": np.array([8, 9])}
    telling = arrived([[MID, MID]], [(0, told | {"text": "no array", "one": np.array(3)})])
    ((t, info),) = records_in_columns([[arrived([[MID, MID]])], [arrived([[MID, MID]] * 2), telling]]).infos
    assert t == 2
    assert info["count"].tolist() == [0, 0, 3, 4] and info["_count"].tolist() == [False, False, True, False]
    assert info["deep"]["twice"].tolist() == [0, 0, 5, 6]
    assert info["deep"]["_twice"].tolist() == [False, False, True, True]
    assert info[7].tolist() == [0, 0, 1.5, 2.5] and info["_7"].tolist() == [False, False, False, True]
    assert info["_alone"].tolist() == [0, 0, 8, 9]
    assert "text" not in info and "one" not in info


def test_shares_cover_all_workers_since_the_previous_call():
    stats = Stats()
    stats.filled(Seconds(wait=1, env=2, policy=3, copy=0))
    stats.filled(Seconds(wait=1, env=0, policy=0, copy=1))
    stats.delivered([0, 3])
    stats.delivered([3])
    stats.masked(8)
    stats.masked(4)
    taken = stats.take()
    shares = [taken[f"worker_{name}_fraction"] for name in ("wait", "env", "policy", "copy")]
    assert shares == pytest.approx([2 / 8, 2 / 8, 3 / 8, 1 / 8])
    assert (taken["lag_min"], taken["lag_mean"], taken["lag_max"], taken["masked_rows"]) == (0, 2, 3, 12)
    assert all(type(value) is float for value in taken.values())
    nothing = {"worker_wait_fraction", "worker_env_fraction", "worker_policy_fraction", "worker_copy_fraction"}
    assert stats.take() == dict.fromkeys(nothing | {"trainer_wait_fraction", "masked_rows"}, 0.0)


def test_trainer_waiting_is_a_share_of_the_time_between_calls(monkeypatch):
    now = 100.0
    monkeypatch.setattr("alfish.unrollers.workers.segments.time", types.SimpleNamespace(perf_counter=lambda: now))
    stats = Stats()
    stats.waited(1.0)
    stats.waited(0.5)
    now = 106.0
    assert stats.take()["trainer_wait_fraction"] == pytest.approx(0.25)
    stats.waited(1.0)
    now = 108.0
    assert stats.take()["trainer_wait_fraction"] == pytest.approx(0.5)
