"""Vector environments in every autoreset mode become one stream: FIRST MID ... LAST, reward k at step k."""

import copy
import os
import re
import time

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from toys import NestedBandit, Stamped

from alfish import nest, specs
from alfish.data import StepType
from alfish.environments import VectorEnvironment, make_environment
from alfish.environments.sequential import SequentialVectorEnv, gathered
from alfish.errors import RunError, UsageError
from alfish.errors.user_code import CodeError
from alfish.runs.stop_signals import Interrupted

FIRST, MID, LAST = StepType.FIRST, StepType.MID, StepType.LAST
LENGTHS = ((3, 5, 1, 8), (2, 2, 7), (1,))
# EnvPool's own spaces lose precision when they are built.
quiet_envpool = pytest.mark.filterwarnings("ignore:.*precision lowered by casting:UserWarning")
MODES = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED]


def stamped(mode, vector=SyncVectorEnv, truncates=False, lengths=LENGTHS, **options):
    makers = [lambda of=of: Stamped(of, truncates) for of in lengths]
    return VectorEnvironment(vector(makers, autoreset_mode=mode, **options), seeds=[11, 12, 13][: len(lengths)])


def columns(environment, num_steps, act):
    """Each environment's rows in the order of time: a list of time steps of one environment, `[B]` lists."""
    rows = [[] for _ in range(environment.num_envs)]

    def take(time_step, which):
        for column in np.flatnonzero(which):
            rows[column].append(nest.map(lambda leaf, i=column: leaf[i], time_step))

    everyone = np.ones(environment.num_envs, bool)
    time_step = environment.reset()
    take(time_step, everyone)
    for _ in range(num_steps):
        time_step = environment.step(act(time_step))
        take(time_step, everyone)
        resets = environment.take_resets()
        if resets is not None:
            ended, first = resets
            take(first, ended)
            time_step = nest.where(ended, first, time_step)
    environment.close()
    return rows


def right(time_step):
    return np.full(time_step.step_type.shape, 2)


def check_stamped(column, lengths, truncates):
    """Rows of one Stamped column: every episode whole and in order, up to the one still under way at the end."""
    stamp = int(column[0].observation[0])
    episode, step = 0, 0
    for row in column:
        length = lengths[episode % len(lengths)]
        assert row.observation.tolist() == [stamp, episode, step]
        assert row.reward.item() == step
        assert row.step_type.item() == (FIRST if step == 0 else LAST if step == length else MID)
        assert row.discount.item() == (0 if step == length and not truncates else 1)
        assert row.prev_action.item() == (0 if step == 0 else 2)
        episode, step = (episode + 1, 0) if step == length else (episode, step + 1)
    return episode


@pytest.mark.parametrize("truncates", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_every_episode_is_whole_and_in_order(mode, truncates):
    environment = stamped(mode, truncates=truncates)
    for column, lengths in zip(columns(environment, 60, right), LENGTHS):
        assert check_stamped(column, lengths, truncates) >= 9


@pytest.mark.parametrize(("mode", "truncates"), [*zip(MODES, (False, True, True))])
def test_processes_make_the_same_stream(mode, truncates):
    environment = stamped(mode, AsyncVectorEnv, truncates)
    for column, lengths in zip(columns(environment, 25, right), LENGTHS):
        assert check_stamped(column, lengths, truncates) >= 3


@pytest.mark.parametrize("mode", MODES)
def test_dtypes_and_shapes_match_the_stream(mode):
    environment = stamped(mode)
    seen = [environment.reset()]
    for _ in range(4):
        seen.append(environment.step(right(seen[-1])))
        resets = environment.take_resets()
        seen += [] if resets is None else [resets[1]]
    for row in seen:
        assert row.step_type.dtype == np.int32 and row.env_id.tolist() == [0, 1, 2]
        assert row.reward.dtype == row.discount.dtype == row.observation.dtype == np.float32
        assert row.prev_action.dtype == np.int64
        assert row.observation.shape == (3, 3) and row.reward.shape == row.discount.shape == (3,)
    assert any((row.step_type == LAST).any() for row in seen)


def test_env_ids_are_global():
    env = SyncVectorEnv([Stamped] * 2, autoreset_mode=AutoresetMode.NEXT_STEP)
    environment = VectorEnvironment(env, seeds=[1, 2])
    environment.env_id += 40
    assert environment.reset().env_id.tolist() == [40, 41]
    assert environment.step(np.zeros(2, np.int64)).env_id.tolist() == [40, 41]


class Both(gymnasium.Env):
    """Terminated and truncated at once."""

    observation_space = spaces.Box(0, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.ones(1, np.float32), 1.0, True, True, {}


@pytest.mark.parametrize("mode", MODES)
def test_terminated_and_truncated_counts_as_terminated(mode):
    environment = VectorEnvironment(SyncVectorEnv([Both], autoreset_mode=mode), [0])
    environment.reset()
    row = environment.step(np.array([1]))
    assert row.step_type.item() == LAST and row.discount.item() == 0 and row.observation.item() == 1


def test_cartpoles_own_vector_class_makes_the_same_stream():
    environment = make_environment("CartPole-v1", num_envs=3, vectorization="vector_entry_point", seed=3)
    rows = columns(environment, 80, lambda step: (step.observation[:, 2] > -0.05).astype(np.int64))
    kinds = set()
    for column in rows:
        check_grammar(column)
        for before, row in zip(column, column[1:]):
            kinds.add((row.step_type.item(), row.discount.item()))
            assert row.reward.item() == (row.step_type.item() != FIRST)
            fallen = abs(row.observation[0]) > 2.4 or abs(row.observation[2]) > 12 * np.pi / 180
            assert fallen == (row.step_type.item() == LAST)  # the observation at LAST is the final one
            if row.step_type.item() != FIRST:
                assert row.prev_action.item() == (before.observation[2] > -0.05)
                # and it follows from the row before: x' = x + 0.02 v
                expected = before.observation[0] + 0.02 * before.observation[1]
                np.testing.assert_allclose(row.observation[0], expected, rtol=1e-5, atol=1e-6)
    assert kinds == {(FIRST, 1), (MID, 1), (LAST, 0)}


def check_grammar(column):
    """FIRST (MID ... LAST FIRST): and nothing else."""
    types = [row.step_type.item() for row in column]
    assert types[0] == FIRST
    for before, after in zip(types, types[1:]):
        assert (after == FIRST) == (before == LAST)
    for row in column:
        if row.step_type.item() == FIRST:
            assert row.reward.item() == 0 and row.discount.item() == 1
            assert not np.any(row.prev_action)


@quiet_envpool
def test_envpool_makes_the_same_stream():
    pytest.importorskip("envpool")
    environment = make_environment(
        "CartPole-v1", num_envs=2, vectorization="envpool", env_kwargs={"max_episode_steps": 12}, seed=1
    )
    rows = columns(environment, 120, lambda step: (step.observation[:, 2] > 0).astype(np.int64))
    ends = set()
    for column in rows:
        check_grammar(column)
        length = 0
        for row in column:
            length = 0 if row.step_type.item() == FIRST else length + 1
            assert row.reward.item() == (length > 0)
            if row.step_type.item() == LAST:
                fallen = abs(row.observation[0]) > 2.4 or abs(row.observation[2]) > 12 * np.pi / 180
                ends.add((length == 12, bool(fallen), row.discount.item()))
    assert ends <= {(True, False, 1.0), (False, True, 0.0), (True, True, 0.0)}
    assert (True, False, 1.0) in ends  # cut off, and to be bootstrapped


@quiet_envpool
def test_envpool_environments_have_different_reproducible_seeds():
    pytest.importorskip("envpool")

    def starts(seed):
        environment = make_environment("CartPole-v1", num_envs=3, vectorization="envpool", seed=seed)
        return environment.reset().observation.tolist()

    assert starts(1) == starts(1)
    every = [tuple(row) for seed in (1, 2, 3) for row in starts(seed)]
    assert len(set(every)) == 9


class Pushed(gymnasium.Env):
    """Keeps a record of what it was told to do; the observation lies in a buffer that is reused."""

    observation_space = spaces.Box(-100, 100, (2,), np.float32)
    action_space = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([6.0, 10.0], np.float32))

    def __init__(self):
        self.told, self._buffer, self._count = [], np.zeros(2, np.float32), 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._count = 0
        self._buffer[:] = 0
        return self._buffer, {}

    def step(self, action):
        self.told.append(np.array(action))
        self._count += 1
        self._buffer[:] = self._count
        return self._buffer, float(self._count), False, self._count == 3, {}


@pytest.mark.parametrize("mode", MODES)
def test_prev_action_is_the_executed_action(mode):
    env = SyncVectorEnv([Pushed], autoreset_mode=mode)
    environment = VectorEnvironment(env, [0])
    actions = [[[0.5, -3.0]], [[9.0, 0.25]], [[-1.0, 1.0]], [[0.0, 0.0]], [[-7.0, -0.5]]]
    actions = iter(np.array(actions, np.float32))
    [column] = columns(environment, 5, lambda _: next(actions))
    executed = [row.prev_action.tolist() for row in column if row.step_type != FIRST]
    expected = [[0.5, -1.0], [1.0, 0.25], [-1.0, 1.0], [0.0, 0.0], [-1.0, -0.5]]
    if mode == AutoresetMode.NEXT_STEP:  # its fourth action falls on the reset row, and is ignored
        del expected[3]
    assert executed == expected
    assert [row.prev_action.tolist() for row in column if row.step_type == FIRST] == [[0, 0]] * 2
    in_units = [[2 + 4 * a, 5 + 5 * b] for a, b in expected]  # [-1, 1] onto [-2, 6] and [0, 10]
    np.testing.assert_allclose(env.envs[0].told, in_units, atol=1e-6)


@pytest.mark.parametrize("copy", [True, False])
def test_rows_do_not_change_after_they_were_returned(copy):
    env = SyncVectorEnv([Pushed, Pushed], copy=copy, autoreset_mode=AutoresetMode.NEXT_STEP)
    [column, _] = columns(VectorEnvironment(env, [0, 0]), 6, lambda _: np.zeros((2, 2), np.float32))
    assert [row.observation[0].item() for row in column] == [0, 1, 2, 3, 0, 1, 2]
    assert [row.reward.item() for row in column] == [0, 1, 2, 3, 0, 1, 2]


class OwnVector(VectorEnv):
    """A vector environment of its own class, which reuses all its arrays; rewards are vectors if asked.

    With `noise`, a reset row comes with a reward that means nothing.
    """

    def __init__(
        self, num_envs=2, num_rewards=None, mode=AutoresetMode.NEXT_STEP, length=3, dtype=np.float64, noise=False
    ):
        self.metadata = {} if mode is None else {"autoreset_mode": mode}
        self.num_envs, self._length = num_envs, length
        self.single_observation_space = spaces.Box(0, 100, (1,), dtype)
        self.single_action_space = spaces.Discrete(2)
        if num_rewards:
            self.reward_space = spaces.Box(-np.inf, np.inf, (num_rewards,), np.float32)
        self._observation, self._noise = np.zeros((num_envs, 1), dtype), noise
        self._reward = np.zeros((num_envs, num_rewards) if num_rewards else num_envs)
        self._done, self._never = np.zeros(num_envs, bool), np.zeros(num_envs, bool)
        self.seed = None

    def reset(self, *, seed=None, options=None):
        self.seed = seed
        self._observation[:] = 0
        self._done[:] = False
        return self._observation, {}

    def step(self, action):
        again = self._done.copy()
        self._observation[:] = np.where(again[:, None], 0, self._observation + 1)
        self._reward.T[:] = np.where(again, 0, self._observation[:, 0])
        if self._reward.ndim == 2:
            self._reward *= np.arange(1, self._reward.shape[1] + 1)
        self._done[:] = self._observation[:, 0] == self._length
        if self._noise:
            self._reward[again] = 55
        return self._observation, self._reward, self._never, self._done, {}

    def close(self, **kwargs):
        pass


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_vector_environment_that_reuses_its_arrays_is_copied(dtype):
    environment = VectorEnvironment(OwnVector(dtype=dtype), [5, 6])
    column, _ = columns(environment, 6, lambda _: np.zeros(2, np.int64))
    assert [row.observation.item() for row in column] == [0, 1, 2, 3, 0, 1, 2]
    assert [row.reward.item() for row in column] == [0, 1, 2, 3, 0, 1, 2]
    assert [row.step_type.item() for row in column] == [FIRST, MID, MID, LAST, FIRST, MID, MID]
    assert all(row.discount.item() == 1 for row in column)


def test_rewards_of_reset_rows_are_ignored():
    environment = VectorEnvironment(OwnVector(noise=True), [5, 6])
    column, _ = columns(environment, 6, lambda _: np.ones(2, np.int64))
    check_grammar(column)
    assert [row.reward.item() for row in column] == [0, 1, 2, 3, 0, 1, 2]
    assert [row.step_type.item() for row in column] == [FIRST, MID, MID, LAST, FIRST, MID, MID]


def test_vector_rewards_keep_their_entries():
    environment = VectorEnvironment(OwnVector(2, num_rewards=3), [5, 6])
    assert environment.reward_spec.shape == (3,)
    column, _ = columns(environment, 4, lambda _: np.zeros(2, np.int64))
    assert [row.reward.tolist() for row in column] == [[0, 0, 0], [1, 2, 3], [2, 4, 6], [3, 6, 9], [0, 0, 0]]
    assert column[1].discount.shape == ()


def test_wrong_shapes_of_a_vector_environment_are_named():
    class Misshapen(OwnVector):
        observed, ended = 2, 2

        def reset(self, **arguments):
            observation, info = super().reset(**arguments)
            return observation[: self.observed], info

        def step(self, action):
            observation, reward, terminated, truncated, info = super().step(action)
            return observation, reward, terminated[: self.ended], truncated, info

    environment = VectorEnvironment(Misshapen(), [0, 1])
    environment.reset()
    environment.env.ended = 1
    with pytest.raises(UsageError, match=r"step returned reward, terminated and truncated of shapes \(2,\), \(1,\)"):
        environment.step(np.zeros(2, np.int64))
    environment.env.observed = 1
    with pytest.raises(UsageError, match=r"reset returned an observation of shape \(1, .*; with 2 environments"):
        environment.reset()


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, list])
@pytest.mark.parametrize("mode", MODES)
def test_flags_may_be_numbers(mode, dtype):
    def makes(dtype):
        class Numbers(SyncVectorEnv):
            def step(self, action):
                observation, reward, *ends, info = super().step(action)
                ends = [end.tolist() if dtype is list else end.astype(dtype) for end in ends]
                return observation, reward, *ends, info

        environment = stamped(mode, Numbers, lengths=((2, 3), (3,), (4,)))
        return columns(environment, 12, right)

    for column, expected in zip(makes(dtype), makes(bool), strict=True):
        assert len(column) == len(expected)
        for row, other in zip(column, expected):
            assert_identical(row, other)


@pytest.mark.parametrize("change", ["flags", "reward"])
def test_results_of_a_vector_class_of_another_kind_are_named(change):
    class Other(OwnVector):
        def step(self, action):
            observation, reward, terminated, truncated, info = super().step(action)
            if change == "reward":
                return observation, reward[:, None], terminated, truncated, info
            return observation, reward, terminated.astype(np.float32), truncated, info

    environment = VectorEnvironment(Other(), [0, 1])
    environment.reset()
    words = {
        "flags": "terminated of dtype float32; it must be bool",
        "reward": r"shapes \(2, 1\), \(2,\) and \(2,\); with 2",
    }
    with pytest.raises(UsageError, match=words[change]):
        environment.step(np.zeros(2, np.int64))


def test_vector_classes_are_seeded_once():
    class Masked(OwnVector):
        seeds = []

        def reset(self, *, seed=None, options=None):
            self.seeds.append(seed)
            return super().reset(seed=seed)

    environment = VectorEnvironment(Masked(mode=AutoresetMode.DISABLED), [0, 1], autoreset=False)
    environment.reset([7, 8])
    environment.reset([7, 9], np.array([False, True]))
    assert Masked.seeds == [7, None]


def test_a_state_from_before_the_first_reset_keeps_the_seeds():
    def make():
        return make_environment("Pendulum-v1", seed=3)

    other = make()
    assert not other.load_state_dict(make().state_dict())
    assert np.array_equal(other.reset().observation, make().reset().observation)


def test_infos_of_several_types_are_merged_without_a_loss():
    merged = gathered([{"a": 0, "b": None, "c": np.zeros(2)}, {"a": 0.75, "b": 5, "c": np.ones(3)}, {"c": 1.0}])
    assert merged["a"].tolist() == [0, 0.75, 0] and merged["_a"].tolist() == [True, True, False]
    assert merged["b"].tolist() == [None, 5, None]
    assert [np.size(value) for value in merged["c"]] == [2, 3, 1] and merged["_c"].all()
    merged = gathered([{}, {"x": 1, "y": 2}, {"x": None, "y": np.float32(0.5)}])
    assert merged["x"].tolist() == [None, 1, None] and merged["y"].tolist() == [0, 2, 0.5]
    merged = gathered([{"s": {"n": 1}}, {"s": None}, {"s": {"n": 3}}])
    assert merged["s"]["n"].tolist() == [1, 0, 3] and merged["s"]["_n"].tolist() == [True, False, True]
    assert gathered([{"s": None}, {"s": {"n": 1}}])["s"].tolist() == [None, {"n": 1}]


def test_a_vector_environment_of_its_own_class_gets_one_seed():
    env = OwnVector()
    VectorEnvironment(env, [5, 6]).reset()
    assert env.seed == 5


def test_a_missing_autoreset_mode_is_refused():
    with pytest.raises(UsageError, match="OwnVector.metadata has no 'autoreset_mode'"):
        VectorEnvironment(OwnVector(mode=None), [0, 1])


def test_an_autoreset_mode_that_gymnasium_does_not_have_is_named():
    env = OwnVector()
    env.metadata = {"autoreset_mode": "next_step"}
    with pytest.raises(UsageError, match=r"'autoreset_mode'\] is 'next_step'; it must be one of"):
        VectorEnvironment(env, [0, 1])


def test_the_mode_named_by_the_message_is_accepted():
    env = OwnVector(mode=None)
    env.metadata = {**env.metadata, "autoreset_mode": AutoresetMode.NEXT_STEP}
    assert VectorEnvironment(env, [0, 1]).num_envs == 2


def test_a_vector_environment_of_an_older_gymnasium_is_refused():
    env = OwnVector(mode=None)
    del env.single_observation_space, env.single_action_space
    with pytest.raises(UsageError, match="OwnVector has no single_observation_space and no single_action_space, which"):
        VectorEnvironment(env, [0, 1])


def test_same_step_without_final_observations_is_refused():
    environment = VectorEnvironment(OwnVector(mode=AutoresetMode.SAME_STEP, length=2), [0, 1])
    environment.reset()
    environment.step(np.zeros(2, np.int64))
    with pytest.raises(UsageError, match="final_obs.*NEXT_STEP"):
        environment.step(np.zeros(2, np.int64))


@pytest.mark.parametrize("mode", MODES)
def test_nested_observations_keep_their_structure_and_their_final_rows(mode):
    lengths = (2, 3)
    env = SyncVectorEnv([lambda n=n: NestedBandit(True, 8, n) for n in lengths], autoreset_mode=mode)
    environment = VectorEnvironment(env, [1, 2])
    assert set(environment.observation_spec) == {"image", "vector", "digit"}
    noop = {
        "choice": np.zeros(2, np.int64),
        "parts": (np.zeros((2, 2), np.float32), np.zeros((2, 2), np.int8)),
    }
    rows = columns(environment, 12, lambda _: noop)
    # The same generators outside the vector environment: each row's observation, the last one's included.
    for column, length, seed in zip(rows, lengths, (1, 2)):
        twin = NestedBandit(True, 8, length)
        action = {"choice": 1, "parts": (np.array([-1.0, -1.0]), np.zeros(2, np.int8))}
        for i, row in enumerate(column):
            if row.step_type.item() == FIRST:
                expected, reward = twin.reset(seed=seed if i == 0 else None)[0], 0.0
            else:
                expected, reward, *_ = twin.step(action)
            observation = row.observation
            assert observation["image"].dtype == np.uint8 and observation["vector"].dtype == np.float32
            assert np.array_equal(observation["image"], expected["image"])
            assert observation["vector"].tolist() == expected["vector"].tolist()
            assert observation["digit"].item() == expected["digit"] - 2  # Discrete(3, start=2)
            assert row.reward.item() == pytest.approx(reward)
        assert sum(row.step_type.item() == LAST for row in column) >= 2


class Offset(gymnasium.Env):
    """Discrete and MultiDiscrete spaces that do not start at 0; the observation repeats the action."""

    def __init__(self):
        self.observation_space = spaces.Dict(
            one=spaces.Discrete(4, start=-7), many=spaces.MultiDiscrete([3, 3], start=[5, 10])
        )
        self.action_space = spaces.Dict(
            one=spaces.Discrete(4, start=-7), many=spaces.MultiDiscrete([3, 3], start=[5, 10])
        )

    def reset(self, *, seed=None, options=None):
        return {"one": -7, "many": np.array([5, 10])}, {}

    def step(self, action):
        assert action in self.action_space, action
        return {"one": int(action["one"]), "many": np.array(action["many"])}, 0.0, False, False, {}


@pytest.mark.parametrize("mode", MODES)
def test_discrete_spaces_that_start_elsewhere_start_at_0_both_ways(mode):
    environment = VectorEnvironment(SyncVectorEnv([Offset], autoreset_mode=mode), [0])
    assert environment.action_spec["one"] == spaces.Discrete(4)
    first = environment.reset()
    assert first.observation["one"].item() == 0 and first.observation["many"].tolist() == [[0, 0]]
    action = {"one": np.array([3]), "many": np.array([[2, 1]])}
    row = environment.step(action)
    assert row.observation["one"].item() == 3 and row.observation["many"].tolist() == [[2, 1]]
    assert row.prev_action["one"].item() == 3 and row.prev_action["many"].tolist() == [[2, 1]]


@pytest.mark.parametrize("mode", MODES)
def test_only_the_first_reset_uses_the_seeds(mode):
    def starts():
        env = SyncVectorEnv([Stamped] * 3, autoreset_mode=mode)
        return VectorEnvironment(env, [7, 7, 8])

    environment = starts()
    stamps = environment.reset().observation[:, 0].tolist()
    assert stamps[0] == stamps[1] != stamps[2]
    assert starts().reset().observation[:, 0].tolist() == stamps


def test_under_disabled_the_evaluator_owns_the_resets():
    env = SyncVectorEnv([lambda: Stamped((2,)), lambda: Stamped((3,))], autoreset_mode=AutoresetMode.DISABLED)
    environment = VectorEnvironment(env, [1, 2], autoreset=False)
    assert environment.seeds_rows and not environment.uneven
    action = np.zeros(2, np.int64)
    environment.reset([1, 2])
    environment.step(action)
    row = environment.step(action)
    assert row.step_type.tolist() == [LAST, MID] and environment.take_resets() is None
    rows = np.array([True, False])
    row = environment.reset([9, None], rows)
    assert rows.tolist() == [True, False]  # gymnasium takes the mask out of its dict, and ours stays whole
    assert row.observation[0].tolist()[1:] == [1, 0] and row.observation[1].tolist()[1:] == [0, 2]
    assert environment.step(action).step_type.tolist() == [MID, LAST]


def test_unsupported_spaces_are_refused_with_their_path():
    class Text(Both):
        observation_space = spaces.Dict(inner=spaces.Dict(note=spaces.Text(5)))

    with pytest.raises(UsageError, match=r"observation\.inner\.note is a Text space"):
        specs.observation_spec(Text().observation_space)
    with pytest.raises(UsageError, match=r"action\.0 is a Sequence space"):
        specs.action_spec(spaces.Tuple([spaces.Sequence(spaces.Discrete(2))]))


@pytest.mark.parametrize(("mode", "autoreset"), [*((mode, True) for mode in MODES), (AutoresetMode.DISABLED, False)])
def test_rows_are_arrays_that_are_not_written_later(mode, autoreset):
    """Whatever is acted, beyond the bounds too."""
    makers = [lambda n=n: NestedBandit(True, 8, n) for n in (2, 3)]
    environment = VectorEnvironment(SyncVectorEnv(makers, autoreset_mode=mode), [1, 2], autoreset=autoreset)
    torch.manual_seed(0)
    kept = [environment.reset()]
    then = copy.deepcopy(kept)
    for _ in range(12):
        action = specs.sample(environment.action_spec, 2)
        action["parts"] = (3 * action["parts"][0], action["parts"][1])
        row = environment.step(environment.convert(action))
        assert row.prev_action["parts"][0].min() >= -1 and row.prev_action["parts"][0].max() <= 1
        rows, ended = [row, environment.take_resets()], row.step_type == LAST
        if not autoreset and ended.any():
            rows.append(environment.reset(rows=ended))
        kept += rows
        then += copy.deepcopy(rows)
    assert all(type(leaf) is np.ndarray for leaf in nest.leaves(tuple(kept)))
    assert_identical(tuple(kept), tuple(then))


def assert_identical(found, expected):
    """In structure, dtypes and values."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_identical(found[key], value)
    elif isinstance(expected, tuple):
        assert len(found) == len(expected)
        for a, b in zip(found, expected):
            assert_identical(a, b)
    elif expected is None:
        assert found is None
    else:
        assert type(found) is type(expected) and found.dtype == expected.dtype and found.shape == expected.shape
        assert np.array_equal(found, expected)


def test_the_first_step_after_a_resume_is_a_reset():
    environment = stamped(AutoresetMode.NEXT_STEP, SequentialVectorEnv)
    environment.reset()
    environment.load_state_dict(environment.state_dict())
    row = environment.step(np.zeros(3, np.int64))
    assert type(row.observation) is np.ndarray and row.step_type.tolist() == [FIRST] * 3
    assert FIRST not in environment.step(np.zeros(3, np.int64)).step_type


# gymnasium's SyncVectorEnv, in half the time.


class Wandering(gymnasium.Env):
    """Observations, rewards, infos and ends are drawn from its own generator; rewards tell the action too."""

    def __init__(self, observation_space, action_space):
        self.observation_space = copy.deepcopy(observation_space)
        self.action_space = action_space

    def _observe(self):
        self.observation_space.seed(int(self.np_random.integers(1 << 30)))
        return self.observation_space.sample()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._observe(), {"began": True}

    def step(self, action):
        assert self.action_space.contains(action), action
        fate = self.np_random.random()
        info = {"fate": fate, "nested": {"deep": np.full(2, fate)}, "note": "text"}
        if fate < 0.5:
            info["rare"] = int(100 * fate)
        reward = fate + sum(float(np.sum(leaf)) for leaf in nest.leaves(action))
        return self._observe(), reward, fate < 0.15, fate > 0.8, info


PUSH = spaces.Box(-1, 1, (2,), np.float32)
STREAMS = {  # observations, actions
    "box": (spaces.Box(-1, 1, (3,), np.float32), PUSH),
    "float64": (spaces.Box(-1, 1, (2, 2), np.float64), spaces.Discrete(4, start=-7)),
    "image": (spaces.Box(0, 255, (4, 4, 1), np.uint8), spaces.MultiDiscrete([2, 3])),
    "0-d": (spaces.Box(-1, 1, (), np.float32), PUSH),
    "discrete": (spaces.Discrete(5, start=2), spaces.MultiBinary(3)),
    "dict": (
        spaces.Dict(image=spaces.Box(0, 255, (4, 4), np.uint8), rest=spaces.Tuple([PUSH, spaces.Discrete(3)])),
        spaces.Dict(push=PUSH, choice=spaces.Discrete(3)),
    ),
    "tuple": (spaces.Tuple([spaces.MultiBinary(2), spaces.MultiDiscrete([3, 4])]), spaces.Tuple([PUSH, PUSH])),
}
BY_ITSELF = [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED]


def stream(env, num_steps):
    """All that a vector environment returns, from one seed and with the same actions."""
    env.action_space.seed(0)
    yield env.reset(seed=[3, 4, 5])
    for _ in range(num_steps):
        yield (row := env.step(env.action_space.sample()))
        done = row[2] | row[3]
        if env.metadata["autoreset_mode"] == AutoresetMode.DISABLED and done.any():
            yield env.reset(options={"reset_mask": done})


@pytest.mark.parametrize("mode", BY_ITSELF)
@pytest.mark.parametrize("name", STREAMS)
def test_the_sequential_environments_stream_is_gymnasiums(name, mode):
    makers = [lambda: Wandering(*STREAMS[name])] * 3
    found = stream(SequentialVectorEnv(makers, mode), 24)
    expected = stream(SyncVectorEnv(makers, autoreset_mode=mode), 24)
    num_ends = 0
    for one, other in zip(found, expected, strict=True):
        assert_identical(one, other)
        num_ends += int((other[2] | other[3]).sum()) if len(other) == 5 else 0
    assert num_ends > 10


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
@pytest.mark.parametrize("name", STREAMS)
def test_a_batch_is_new_at_each_step(name, mode):
    env = SequentialVectorEnv([lambda: Wandering(*STREAMS[name])] * 3, mode)
    kept = [(row, copy.deepcopy(row)) for row in stream(env, 8)][1:]
    for row, then in kept:
        assert_identical(row, then)


@pytest.mark.parametrize(
    ("mode", "truncates"),
    [
        (AutoresetMode.NEXT_STEP, False),
        (AutoresetMode.NEXT_STEP, True),
        (AutoresetMode.DISABLED, True),
        (AutoresetMode.DISABLED, False),
    ],
)
def test_the_sequential_environment_makes_the_same_rows(mode, truncates):
    makers = [lambda of=of: Stamped(of, truncates) for of in LENGTHS]
    environment = VectorEnvironment(SequentialVectorEnv(makers, mode), seeds=[11, 12, 13])
    for column, lengths in zip(columns(environment, 60, right), LENGTHS):
        assert check_stamped(column, lengths, truncates) >= 9


@pytest.mark.parametrize("count", [1, 3])
def test_actions_of_other_environments_are_refused(count):
    env = SequentialVectorEnv([lambda: Stamped((4,))] * 2, AutoresetMode.NEXT_STEP)
    env.reset()
    with pytest.raises(ValueError, match=f"got {count} actions for 2 environments"):
        env.step(np.zeros(count, np.int64))


def test_an_end_is_reported_once():
    env = SequentialVectorEnv([lambda: Stamped((2,)), lambda: Stamped((3,))], AutoresetMode.NEXT_STEP)
    env.reset()
    ends = [env.step(np.zeros(2, np.int64))[2:4] for _ in range(8)]
    terminated = np.array([terminated for terminated, _ in ends])
    assert np.flatnonzero(terminated[:, 0]).tolist() == [1, 4, 7]
    assert np.flatnonzero(terminated[:, 1]).tolist() == [2, 6]
    env.replace(np.array([True, True]))  # one of which ended in the last step
    assert not env.step(np.zeros(2, np.int64))[2].any()


def test_an_environment_that_ended_rests_until_it_is_reset():
    env = SequentialVectorEnv([Both, Both], AutoresetMode.DISABLED)
    env.reset()
    observation, *_ = env.step(np.array([0, 0]))
    env.envs[0].step = env.envs[0].reset = None  # is not called
    env.reset(options={"reset_mask": np.array([False, True])})
    for _ in range(3):
        again, reward, terminated, truncated, _ = env.step(np.array([0, 0]))
        assert (again[0] == observation[0]).all()
        assert reward[0] == 0 and not terminated[0] and not truncated[0]
        env.reset(options={"reset_mask": np.array([False, True])})


class Says(gymnasium.Env):
    """Returns just that."""

    action_space = spaces.Discrete(2)

    def __init__(self, space, observation, reward=1.0):
        self.observation_space, self._observation, self._reward = space, observation, reward

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}

    def step(self, action):
        return self._observation, self._reward, False, False, {}


def says(space, *observations, reward=1.0):
    makers = [lambda observation=observation: Says(space, observation, reward) for observation in observations]
    env = SequentialVectorEnv(makers, AutoresetMode.NEXT_STEP)
    env.reset()
    return env.step(np.zeros(len(observations), np.int64))


VECTOR, PIXELS = spaces.Box(-1, 1, (2,), np.float32), spaces.Box(0, 255, (2,), np.uint8)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("shape", [(3,), (1,), (), (2, 1), (1, 2)])
def test_an_observation_of_another_shape_is_refused(shape, nested):
    space, observation = VECTOR, np.zeros(shape, np.float32)
    message = re.escape(f"of shape {shape}, but their observation_space has shape (2,)")
    if nested:  # by numpy
        space, observation, message = spaces.Dict(inner=VECTOR), {"inner": observation}, "dimension|shape"
    with pytest.raises(ValueError, match=message):
        says(space, observation, observation)


def test_observations_that_differ_in_shape_are_refused():
    with pytest.raises(ValueError, match="inhomogeneous"):
        says(VECTOR, np.zeros(2, np.float32), np.zeros(3, np.float32))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
def test_an_observation_that_the_dtype_does_not_hold_is_refused(dtype, nested):
    space, observation = PIXELS, np.full(2, 7, dtype)
    if nested:
        space, observation = spaces.Dict(inner=PIXELS), {"inner": observation}
    with pytest.raises(TypeError, match="Cannot cast .*uint8"):
        says(space, observation, observation)


@pytest.mark.parametrize("observation", [np.array([0.5, 1]), [0.5, 1.0], np.array([1, 0]), np.array([True, False])])
def test_an_observation_of_the_same_kind_becomes_the_spaces_dtype(observation):
    batch = says(VECTOR, observation, observation)[0]
    assert batch.dtype == np.float32 and batch.tolist() == [list(map(float, observation))] * 2


REWARDS = [2, 2.0, np.float32(2), np.array(2.0), np.array([2.0]), np.array([[2]], np.int8), np.float64(2)]


@pytest.mark.parametrize("reward", [*REWARDS, True])
def test_a_reward_is_a_number_or_an_array_of_one(reward):
    rewards = says(VECTOR, *np.zeros((2, 2), np.float32), reward=reward)[1]
    assert rewards.dtype == np.float64 and rewards.tolist() == [float(np.sum(reward))] * 2


def test_a_reward_of_two_numbers_is_refused():
    with pytest.raises(ValueError):
        says(VECTOR, np.zeros(2, np.float32), reward=np.zeros(2))


@pytest.mark.parametrize("mode", BY_ITSELF)
def test_infos_are_gathered_only_while_they_are_read(mode):
    def rows(ignores):
        makers = [lambda: Wandering(STREAMS["box"][0], spaces.Discrete(3))] * 3
        environment = VectorEnvironment(SequentialVectorEnv(makers, mode), [1, 2, 3], autoreset=False)
        environment.reset()
        if ignores:
            environment.ignore_infos()
        for _ in range(20):
            yield (row := environment.step(np.ones(3, np.int64))), environment.infos
            if mode == AutoresetMode.DISABLED and (ended := row.step_type == LAST).any():
                environment.reset(rows=ended)

    for (row, infos), (other, others) in zip(rows(False), rows(True), strict=True):
        assert_identical(other, row)
        assert infos.keys() >= ({"began"} if (row.step_type == FIRST).all() else {"fate", "_fate", "nested"})
        assert others == {}


def test_vector_environments_of_other_classes_may_gather_infos():
    environment = stamped(AutoresetMode.NEXT_STEP)
    environment.ignore_infos()
    environment.reset()
    assert environment.step(np.zeros(3, np.int64)).step_type.tolist() == [MID, MID, LAST]


class Scaling(gymnasium.Env):
    """Writes the action that it is given."""

    observation_space = spaces.Box(-9, 9, (2,), np.float32)

    def __init__(self, action_space):
        self.action_space = action_space

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        action *= 0
        return np.zeros(2, np.float32), 0.0, False, False, {}


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-1, 1, (2,), np.float32),
        spaces.Box(-np.inf, np.inf, (2,), np.float32),
        spaces.Box(-1, 1, (1, 2), np.float32),
        spaces.MultiDiscrete([5, 5]),
        spaces.MultiBinary(2),
    ],
    ids=str,
)
def test_an_environment_may_write_its_action(space):
    environment = VectorEnvironment(SequentialVectorEnv([lambda: Scaling(space)] * 2, AutoresetMode.NEXT_STEP), [0, 1])
    environment.reset()
    action = np.ones((2, 2), environment.action_spec.dtype)
    row = environment.step(action)
    assert (row.prev_action == 1).all() and (action == 1).all()


def test_no_reward_is_an_error_where_it_happens():
    class Silent(Scaling):
        def step(self, action):
            return np.zeros(2, np.float32), None, False, False, {}

    env = SequentialVectorEnv([lambda: Silent(spaces.Discrete(2))], AutoresetMode.NEXT_STEP)
    env.reset()
    with pytest.raises(TypeError, match="NoneType"):
        env.step(np.zeros(1, np.int64))


class Wrong(Stamped):
    """Its first episode ends at step 2 with an observation that is `kind`."""

    made = 0

    def __init__(self, kind):
        super().__init__((4,))
        type(self).made += 1
        self._is_wrong, self._kind = type(self).made == 1, kind

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        if self._is_wrong and self._step == 2:
            observation = np.full(3, np.nan, np.float32) if self._kind == "nan" else observation[:1]
            terminated = True
        return observation, reward, terminated, truncated, info


@pytest.mark.parametrize("kind", ["nan", "shape"])
def test_what_is_built_again_has_no_end_left_to_reset(kind):
    Wrong.made = 0
    environment = make_environment(lambda: Wrong(kind))
    environment.tolerate_errors(lambda index, error: None)
    steps = [environment.reset()]
    for t in range(6):
        steps.append(environment.step(np.zeros(1, np.int64)))
        if t == 1 and kind == "nan":
            steps[-1] = environment.replace(steps[-1], np.ones(1, bool))
    assert [step.step_type.item() for step in steps] == [FIRST, MID, FIRST, MID, MID, MID, LAST]
    assert [step.reward.item() for step in steps] == [0, 1, 0, 1, 2, 3, 4]


def test_only_an_unfinished_episode_can_be_interrupted():
    environment = make_environment(lambda: Stamped((2,)))
    step = environment.reset()
    types = []
    for _ in range(3):  # FIRST stays what it is, MID ends, and LAST stays
        step = environment.break_off(step, np.ones(1, bool))
        types.append(int(step.step_type[0]))
        step = environment.step(np.zeros(1, np.int64))
    assert types == [FIRST, LAST, FIRST]
    assert step.step_type == MID and step.observation[0, 1:].tolist() == [1, 1]


def test_environments_that_are_built_again_have_seeds_of_their_own():
    environment = make_environment(lambda: Stamped((4,)), num_envs=2)
    step = environment.reset()
    stamps = set(step.observation[:, 0].tolist())
    for _ in range(2):
        step = environment.replace(step, np.ones(2, bool))
        stamps |= set(step.observation[:, 0].tolist())
    assert len(stamps) == 6


class Levels(gymnasium.Env):
    """Says at each reset which level begins."""

    observation_space, action_space = spaces.Box(-1, 1, (1,)), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._left = 2
        return np.zeros(1, np.float32), {"level": 1}

    def step(self, action):
        self._left -= 1
        return np.zeros(1, np.float32), 1.0, self._left == 0, False, {}


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_infos_of_the_next_reset_do_not_belong_to_the_last_row(mode):
    environment = VectorEnvironment(SyncVectorEnv([Levels] * 2, autoreset_mode=mode), seeds=[0, 1])
    environment.reset()
    for _ in range(5):
        time_step = environment.step(np.zeros(2, np.int64))
        if mode == AutoresetMode.DISABLED or (time_step.step_type == MID).all():
            assert "level" not in environment.infos


class Ending(gymnasium.Env):
    """Its steps do what the action says: 0 ends at once, 1 raises, 2 never ends. `close` leaves a file."""

    observation_space, action_space = spaces.Box(0, 1, (1,)), spaces.Discrete(3)

    def __init__(self, directory):
        self._file = directory / f"{os.getpid()}"

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        if action == 1:
            raise ValueError("no step")
        if action == 2:
            time.sleep(10**6)
        return np.zeros(1, np.float32), 0.0, False, False, {}

    def close(self):
        self._file.touch()


def ending(directory):
    env = AsyncVectorEnv([lambda: Ending(directory)] * 2, autoreset_mode=AutoresetMode.NEXT_STEP)
    environment = VectorEnvironment(env, [0, 1])
    environment.reset()
    return environment, env.processes


def test_a_pending_step_of_processes_is_not_waited_for(tmp_path, monkeypatch):
    """After a signal, and after a process has died; gymnasium would wait for ever, or raise again."""

    def interrupted(*arguments, **keywords):
        raise Interrupted

    environment, processes = ending(tmp_path)
    monkeypatch.setattr(environment.env, "step_wait", interrupted)
    with pytest.raises(Interrupted):
        environment.step(np.array([0, 2]))
    environment.abandon()
    environment.close()
    assert not any(process.is_alive() for process in processes)
    environment, processes = ending(tmp_path)
    processes[0].kill()
    processes[0].join()
    words = r"step: the processes of environments \[0\] died, the first one with exit status -9 "
    with pytest.raises(RunError, match=words):
        environment.step(np.array([0, 0]))
    environment.close()
    assert not any(process.is_alive() for process in processes)


@pytest.mark.filterwarnings("ignore::UserWarning")  # gymnasium's log
def test_the_others_are_closed_in_peace_after_one_has_raised(tmp_path):
    environment, processes = ending(tmp_path)
    with pytest.raises(CodeError, match="step raised ValueError: no step"):
        environment.step(np.array([0, 1]))
    environment.abandon()
    environment.close()
    assert (tmp_path / str(processes[0].pid)).exists() and not any(process.is_alive() for process in processes)


class Informing(gymnasium.Env):
    """Reports infos that have no place in gymnasium's format for vector environments."""

    observation_space, action_space = spaces.Box(0, 1, (1,)), spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {"step": 3, "_step": 4, "hash": 2**70, "_alone": 5, "late": 1}

    def step(self, action):
        return np.zeros(1, np.float32), 1.0, False, False, {"_step": 4, "step": 3, "hash": 2**70, "late": -(2**80)}


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_infos_without_a_place_do_not_end_the_run(vectorization):
    environment = make_environment(Informing, num_envs=2, vectorization=vectorization)
    environment.reset()
    first = environment.infos
    environment.step(np.zeros(2, np.int64))
    for infos in (first, environment.infos):
        assert infos["step"].tolist() == [3, 3] and infos["_step"].tolist() == [True, True]
        assert "__step" not in infos
        assert vectorization == "async" or infos["hash"].tolist() == [2**70] * 2
    environment.close()


def test_info_masks_are_not_read_as_values():
    for infos in ([{"_a": 7}, {"a": 2}], [{"a": 2}, {"_a": 7}]):
        found = gathered(infos)
        assert found["_a"].dtype == bool and found["_a"].tolist() == ["a" in info for info in infos]
    found = gathered([{"n": 1}, {"n": 2**70}, {"n": 2.5}])
    assert found["n"].tolist() == [1, 2**70, 2.5]
