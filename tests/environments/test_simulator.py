"""The interface of simulators: one stream, whatever a simulator does to its tensors, without a wait in a step."""

import functools
import math

import numpy as np
import pytest
import torch
from fakes import (
    ACTION,
    OBSERVATION,
    VALUE,
    Acting,
    StampedSimulator,
    StampedVector,
    assert_same_streams,
    columns_of,
    unroller_of,
)
from far_device import FarDevice
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from alfish import nest
from alfish.data import StepType, in_line, trainable
from alfish.environments import Simulator, SimulatorEnvironment, SimulatorStep, TensorEnvironment, make_environment
from alfish.errors import UsageError

FIRST, MID, LAST = StepType.FIRST, StepType.MID, StepType.LAST
B = 5


@pytest.fixture(scope="module")
def in_next_step():
    """The columns of the reference."""
    return columns_of(TensorEnvironment(StampedVector(B, AutoresetMode.NEXT_STEP), 0), (99,))


@pytest.mark.parametrize(
    "make",
    [
        lambda: TensorEnvironment(StampedVector(B), 0),
        lambda: SimulatorEnvironment(StampedSimulator(B), 0),
        lambda: SimulatorEnvironment(StampedSimulator(B, final="always"), 0),
    ],
    ids=["vector", "simulator", "always"],
)
def test_all_reset_modes_give_the_same_episodes_and_advantages(in_next_step, make):
    assert_same_streams(columns_of(make()), in_next_step)


@pytest.mark.parametrize("final", ["ends", "always", "lost"])
def test_rows_stay_as_they_were_returned(final):
    environment = SimulatorEnvironment(StampedSimulator(B, final=final), 0)
    rows, copies = [environment.reset()], []
    for _ in range(12):
        copies += nest.map(torch.clone, rows[len(copies) :])
        rows += [environment.step(torch.zeros(B, 1)), environment.take_resets()]
    for row, copy in zip(rows, copies):
        assert all(torch.equal(a, b) for a, b in zip(nest.leaves(row), nest.leaves(copy)))


class OnPolicy(Acting):
    on_policy = True


def test_every_step_of_every_environment_trains():
    unroller = unroller_of(SimulatorEnvironment(StampedSimulator(B), 0), OnPolicy)
    for length in (1, 4, 9, 2):
        step_type = in_line(nest.tensors(unroller.unroll(length))).experience.time_step.step_type
        assert trainable(step_type).sum() == length * B


class Vectors(StampedVector):
    """Keeps its info dict, in which old final observations stay, as Isaac Lab does."""

    def step(self, action):
        *rest, infos = super().step(action)
        if (rest[2] | rest[3]).any():
            self.infos["final_obs"] = torch.where((rest[2] | rest[3])[:, None], infos["final_obs"], math.nan)
        return *rest, self.infos


def test_a_stale_final_observation_is_read_only_once(in_next_step):
    environment = TensorEnvironment(Vectors(B), 0)
    assert_same_streams(columns_of(environment), in_next_step)
    assert "final_obs" not in environment.env.infos


def lost(final_observation="given", **settings):
    return SimulatorEnvironment(StampedSimulator(B, final="lost", **settings), 0, final_observation=final_observation)


def test_a_truncation_without_a_final_observation_is_refused_after_the_unroll():
    environment = lost(lengths=(4,))  # the columns 1 and 4 are truncated first, the columns 0 and 3 terminated
    unroller = unroller_of(environment)
    unroller.unroll(3)
    with pytest.raises(UsageError, match="truncated 2 episodes without returning final observations.*= 'drop'"):
        unroller.unroll(3)


class Terminating(StampedSimulator):
    def step(self, action):
        step = super().step(action)
        return step._replace(terminated=step.terminated | step.truncated)


def test_terminations_need_no_final_observation():
    environment = SimulatorEnvironment(Terminating(B, final="lost"), 0)
    rows = columns_of(environment)
    assert all(row[2] == 0 for column in rows for row in column if row[0] == LAST)


def shown(row):
    """A row without the observation in which an episode terminated, which nothing reads."""
    return row[:3] + row[6:7] + (row[3:6] if row[0] != LAST else ())


def test_drop_trains_all_but_the_time_step_before_a_truncation(in_next_step):
    found = columns_of(lost("drop"))
    for own, other in zip(found, in_next_step):
        expected, is_lost = [], set()
        for row in other:
            if row[0] == LAST and row[2] == 1:
                is_lost.add(len(expected) - 1)
            else:
                expected.append(row)
        assert [shown(row) for row in own] == [shown(row) for row in expected[: len(own)]]
        for t, row in enumerate(own[:-1]):
            assert row[8] == (row[0] != LAST and t not in is_lost and own[t + 1][0] != FIRST)
            if row[8] and t + 1 in is_lost:  # its return bootstraps from the time step that is not trained
                value, after = (torch.tensor(one[3:6]) @ VALUE for one in (row, own[t + 1]))
                assert row[7] == pytest.approx(own[t + 1][1] + 0.9 * math.cos(after) - math.cos(value), abs=1e-5)
        assert is_lost


def test_drop_keeps_final_observations_that_are_given(in_next_step):
    environment = SimulatorEnvironment(StampedSimulator(B), 0, final_observation="drop")
    assert_same_streams(columns_of(environment), in_next_step)


def test_metrics_count_episodes_whose_final_observation_is_dropped():
    counts = []
    for environment in (lost("drop"), SimulatorEnvironment(StampedSimulator(B), 0)):
        unroller = unroller_of(environment)
        unroller.unroll(40)
        counts.append((unroller.records.step_type.tolist(), unroller.records.reward.tolist()))
    assert counts[0] == counts[1]


def test_before_ends_a_truncated_episode_in_the_observation_acted_from():
    for column in columns_of(lost("before")):
        for before, row in zip(column, column[1:]):
            if row[0] == LAST and row[2] == 1:
                assert row[3:6] == before[3:6]


def result(change=lambda step: step, space=OBSERVATION, **fields):
    """A simulator whose first step returns something else."""

    class Changed(StampedSimulator):
        observation_space = space

        def step(self, action):
            return change(super().step(action)._replace(**fields))

    return SimulatorEnvironment(Changed(B), 0)


@pytest.mark.parametrize(
    "change",
    [
        lambda step: step._replace(reward=step.reward[:, None]),
        lambda step: step._replace(terminated=step.terminated[:, None].long(), truncated=step.truncated.float()),
        lambda step: step._replace(reward=step.reward.double(), observation=step.observation.double()),
        lambda step: step._replace(observation=step.observation.t().contiguous().t()),
        lambda step: step._replace(reward=torch.stack([step.reward, step.reward], 1)[:, 0]),
    ],
    ids=["column", "numbers", "float64", "transposed", "strided"],
)
def test_equivalent_shapes_and_dtypes_of_a_step_are_converted(in_next_step, change):
    environment = result(change)
    row = environment.reset()
    row = environment.step(torch.zeros(B, 1))
    assert row.reward.shape == row.discount.shape == (B,)
    assert {row.reward.dtype, row.discount.dtype, row.observation.dtype} == {torch.float32}
    assert all(leaf.is_contiguous() for leaf in nest.leaves(row))
    assert_same_streams(columns_of(result(change)), in_next_step)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"reward": torch.zeros(B, 2)},
            r"step returned reward of shape \(5, 2\); with 5 environments it must be \(5,\)",
        ),
        ({"truncated": torch.zeros(1, B)}, r"step returned truncated of shape \(1, 5\)"),
        ({"terminated": np.zeros(B)}, "step returned terminated as ndarray; its attribute `device` promises"),
        ({"truncated": None}, "step returned truncated as NoneType"),
        ({"observation": torch.zeros(B, 4)}, r"step returned observation of shape \(5, 4\)"),
        ({"final_observation": torch.zeros(3)}, r"step returned final_observation of shape \(3,\)"),
        ({"reward": torch.zeros(B, device="meta")}, "step returned reward on meta, but its attribute `device` is cpu"),
    ],
)
def test_anything_else_is_refused_by_name_at_the_first_step(fields, words):
    environment = result(**fields)
    environment.reset()
    with pytest.raises(UsageError, match=words):
        environment.step(torch.zeros(B, 1))


def test_the_first_final_observation_is_checked_in_a_later_step_too():
    class Wrong(StampedSimulator):
        def step(self, action):
            return super().step(action)._replace(final_observation=finals.pop())

    finals = [torch.zeros(B, 4), None, None]
    environment = SimulatorEnvironment(Wrong(B), 0)
    environment.reset()
    for _ in range(2):
        environment.step(torch.zeros(B, 1))
    with pytest.raises(UsageError, match=r"step returned final_observation of shape \(5, 4\)"):
        environment.step(torch.zeros(B, 1))


def test_a_step_that_is_a_plain_tuple_is_refused():
    environment = result(tuple)
    environment.reset()
    with pytest.raises(UsageError, match="Changed.step returned tuple; it must be alfish's SimulatorStep"):
        environment.step(torch.zeros(B, 1))


def test_a_group_that_is_not_observed_is_named():
    space = spaces.Dict(policy=OBSERVATION, critic=spaces.Dict(height=OBSERVATION))

    class Groups(StampedSimulator):
        observation_space = space

        def reset(self, seed):
            return {"policy": super().reset(seed), "critic": {}}

    words = "reset returned no 'height' in observation.critic, which is empty, although the space declares it"
    with pytest.raises(UsageError, match=words):
        SimulatorEnvironment(Groups(B), 0).reset()


def test_the_simulator_keeps_its_actions(in_next_step):
    simulator = StampedSimulator(B)
    unroller = unroller_of(SimulatorEnvironment(simulator, 0))
    actions = []
    step = simulator.step
    simulator.step = lambda action: (actions.append(action.clone()), step(action))[1]
    found = unroller.unroll(20).action
    for kept, was, stored in zip(simulator.actions, actions, found, strict=True):
        assert torch.equal(kept, was) and torch.equal(kept, stored)
        kept.add_(1)  # the stored action is another tensor
        assert torch.equal(was, stored) and kept.is_contiguous()


def test_actions_are_contiguous():
    simulator = StampedSimulator(B)
    simulator.action_space = spaces.Box(-2, 2, (2,), np.float32)
    simulator.clocks.advance = lambda action: (action.sum(1), *2 * [torch.zeros(B, dtype=torch.bool)])
    environment = SimulatorEnvironment(simulator, 0)
    environment.reset()
    environment.step(torch.ones(2, B).t())
    assert simulator.actions[0].is_contiguous() and simulator.actions[0].tolist() == [[2, 2]] * B


def test_no_step_waits_for_the_device():
    with FarDevice() as far:
        for settings in ({"final": "always"}, {"final": "lost"}):
            for final_observation in ("given", "drop", "before"):
                simulator = StampedSimulator(B, far.device, **settings)
                environment = SimulatorEnvironment(simulator, 0, final_observation=final_observation)
                environment.reset()
                far.clear()
                for _ in range(9):
                    environment.step(torch.zeros(B, 1, device=far.device))
                    environment.take_resets()
                assert far.waits == far.unpinned == []


class Whole(StampedSimulator):
    """Saves its whole state."""

    def state_dict(self):
        return {"episode": self.clocks.episode.clone(), "step": self.clocks.step.clone()}

    def load_state_dict(self, state):
        self.clocks.episode, self.clocks.step = state["episode"].clone(), state["step"].clone()
        return True


class Counting(StampedSimulator):
    """Saves a counter."""

    count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]
        return False


@pytest.mark.parametrize("num_steps", [3, 4, 5])
@pytest.mark.parametrize("final, final_observation", [("ends", "given"), ("lost", "before")])
def test_a_whole_state_continues_with_the_same_rows(num_steps, final, final_observation):
    one, other = (SimulatorEnvironment(Whole(B, final=final), 0, final_observation=final_observation) for _ in range(2))
    one.reset()
    for _ in range(num_steps):
        one.step(torch.zeros(B, 1))
    assert other.load_state_dict(one.state_dict())
    for _ in range(9):
        for a, b in zip(*map(nest.leaves, (one.step(torch.ones(B, 1)), other.step(torch.ones(B, 1))))):
            assert torch.equal(a, b)


@pytest.mark.parametrize("kind", [Counting, StampedSimulator])
def test_without_a_whole_state_new_episodes_begin_with_other_seeds(kind):
    one, other = (SimulatorEnvironment(kind(B), 7, spread=True) for _ in range(2))
    one.reset()
    one.simulator.count = 12
    assert not other.load_state_dict(one.state_dict())
    assert other.step(torch.zeros(B, 1)).step_type.tolist() == [FIRST] * B
    assert other.step(torch.zeros(B, 1)).step_type.unique().tolist() != [FIRST]
    assert one.simulator.seeds == [7] and other.simulator.seeds[-1] != 7
    assert other.simulator.num_spread == 1, "the reset with which training begins again"
    assert kind is StampedSimulator or other.simulator.count == 12


def test_after_abandon_the_simulator_is_not_called():
    environment = SimulatorEnvironment(Whole(B), 0)
    environment.reset()
    environment.abandon()
    environment.simulator.state_dict = None
    assert environment.state_dict() == {}


def test_make_environment_gives_seed_and_device():
    environment = make_environment(StampedSimulator, num_envs=B, seed=3, device="cpu")
    simulator = environment.simulator
    environment.reset()
    environment.reset()
    assert isinstance(environment, SimulatorEnvironment) and environment.num_envs == B and environment.uneven
    assert simulator.device == torch.device("cpu") and simulator.seed is not None
    assert simulator.seeds == [simulator.seed, None] and simulator.num_spread == 1
    environment.close()
    assert simulator.is_closed


def test_evaluation_begins_episodes_at_their_start():
    for settings in ({"evaluation": True}, {"spread_first_episodes": False}):
        environment = make_environment(StampedSimulator, num_envs=B, **settings)
        environment.reset()
        assert environment.simulator.num_spread == 0


def test_make_environment_sets_what_a_lost_final_observation_means():
    lose = functools.partial(StampedSimulator, final="lost")
    environment = make_environment(lose, num_envs=B, final_observation="drop")
    environment.reset()
    environment.step(torch.zeros(B, 1))
    assert environment.lost is not None


def test_a_second_simulator_of_a_process_is_refused():
    class Only(StampedSimulator):
        only_one = True

    first = make_environment(Only, num_envs=2)
    with pytest.raises(
        UsageError, match="Only is used a second time, but a process can hold only one such simulator; close"
    ):
        make_environment(functools.partial(Only, final="lost"), num_envs=2)
    first.close()
    make_environment(Only, num_envs=2).close()


def test_an_error_of_the_simulator_is_a_sentence():
    environment = result(lambda step: 1 / 0)
    environment.reset()
    with pytest.raises(Exception, match="step raised ZeroDivisionError: division by zero"):
        environment.step(torch.zeros(B, 1))


def test_rewards_may_be_vectors():
    class Two(StampedSimulator):
        reward_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)

        def step(self, action):
            step = super().step(action)
            return step._replace(reward=torch.stack([step.reward, -step.reward], 1))

    environment = SimulatorEnvironment(Two(B), 0, rewards=["speed", "cost"])
    assert environment.reset().reward.shape == (B, 2)
    row = environment.step(torch.zeros(B, 1))
    assert torch.equal(row.reward[:, 0], -row.reward[:, 1]) and row.reward.any()


def test_a_subclass_error_names_the_missing_method():
    class Bare(Simulator):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Bare()
    assert SimulatorStep(1, 2, 3, 4).final_observation is None and ACTION.shape == (1,)
