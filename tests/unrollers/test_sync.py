"""The unroller: rows of experience that lose, double, shift and tear no transition, however episodes end."""

import contextlib
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from scripted import (
    DISABLED,
    FIRST,
    LAST,
    LENGTHS,
    MID,
    NEXT_STEP,
    PAD,
    SAME_STEP,
    Expert,
    Scripted,
    ScriptedOffPolicy,
    Still,
    assert_equal,
    real_rows,
    recorded,
    transitions,
    unroll,
    unroller_of,
)
from toys import NestedBandit, OneState, Stamped
from worker_parts import Curriculum, Levels

from alfish import nest
from alfish.algorithms.ppo import PPO
from alfish.data import AlgStep, in_line, trainable
from alfish.environments import TensorEnvironment, VectorEnvironment, make_environment
from alfish.environments.toy import TensorPointMass
from alfish.errors import RunError, UsageError
from alfish.metrics import AverageEpisodeLength, AverageReturn, EnvInfo, EnvironmentSteps, Metrics, NumberOfEpisodes
from alfish.transforms import ObservationNormalizer, Transforms
from alfish.unrollers import SyncUnroller


@pytest.mark.parametrize(("length", "truncates"), [(2, False), (3, True), (16, False)])
@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP, DISABLED])
def test_trainable_transitions_are_the_environments_own_record(mode, truncates, length):
    environment = recorded(mode, truncates)
    unroller = unroller_of(environment)
    trained = [[] for _ in LENGTHS]
    for _ in range(60 // length):
        experience = unroll(unroller, length)
        assert len(unroller.records.step_type) >= length
        for column, found in enumerate(trained):
            found += transitions(experience, column)
    for found, env in zip(trained, environment.env.envs):
        assert found == env.record  # each once, in order, and none is missing: the last row is an arrival
        assert len(found) >= 20


@pytest.mark.parametrize("truncates", [False, True])
@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP, DISABLED])
def test_rows_handed_to_replay_are_the_environments_own_record(mode, truncates):
    environment = recorded(mode, truncates)
    unroller = unroller_of(environment, ScriptedOffPolicy)
    columns = [[] for _ in LENGTHS]
    for _ in range(15):
        experience = unroll(unroller, 4)
        for column, rows in enumerate(columns):
            count = real_rows(experience, column)
            rows.append(nest.map(lambda leaf, i=column, n=count: leaf[:n, i : i + 1], experience[:2]))
    for rows, env in zip(columns, environment.env.envs):
        time_step, action = nest.map(lambda *parts: torch.cat(parts), *rows)
        experience = unroll(unroller, 1)._replace(time_step=time_step, action=action)
        found = transitions(experience, 0)
        assert found == env.record[: len(found)] and len(found) > 25


@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP, DISABLED])
def test_unrolls_overlap_by_exactly_the_last_real_row_of_each_column(mode):
    unroller = unroller_of(recorded(mode))
    before = unroll(unroller, 5)
    for _ in range(8):
        after = unroll(unroller, 5)
        for column in range(3):
            last = real_rows(before, column) - 1
            for a, b in zip(nest.leaves(before.time_step), nest.leaves(after.time_step)):
                assert torch.equal(a[last, column], b[0, column])
        before = after


@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP, DISABLED])
def test_every_columns_rows_are_whole_episodes_in_order(mode):
    unroller = unroller_of(recorded(mode, truncates=True))
    episode_and_step = [None] * 3
    for i in range(20):
        step = (experience := unroll(unroller, 4)).time_step
        for column, lengths in enumerate(LENGTHS):
            for t in range(0 if i == 0 else 1, real_rows(experience, column)):
                before = episode_and_step[column]
                if before is None:
                    now = 0, 0
                else:
                    ended = before[1] == lengths[before[0] % len(lengths)]
                    now = (before[0] + 1, 0) if ended else (before[0], before[1] + 1)
                episode_and_step[column] = now
                ends = now[1] == lengths[now[0] % len(lengths)]
                assert step.observation[t, column, 1:].tolist() == list(now)
                assert step.step_type[t, column] == (FIRST if now[1] == 0 else LAST if ends else MID)
                assert step.reward[t, column] == now[1] and step.discount[t, column] == 1


@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP, DISABLED])
def test_info_and_action_belong_to_their_row(mode):
    unroller = unroller_of(recorded(mode))
    for _ in range(10):
        experience = unroll(unroller, 5)
        for column in range(3):
            count = real_rows(experience, column)
            step, info = experience.time_step, experience.info
            acts = step.step_type[:count, column] != LAST  # at LAST nobody acts
            seen, observed = info["seen"][:count, column], step.observation[:count, column]
            assert torch.equal(seen[acts], observed[acts])
            assert torch.equal(info["step_type"][:count, column][acts], step.step_type[:count, column][acts])
            assert torch.equal(experience.action[:count, column][acts], (observed.sum(-1).long() % 3)[acts])


@pytest.mark.parametrize("mode", [SAME_STEP, DISABLED])
def test_each_column_makes_as_many_steps_whatever_ends(mode):
    step = unroll(unroller_of(recorded(mode)), 4).time_step
    assert step.step_type[:, 2].tolist() == [FIRST, LAST] * 4 + [FIRST]  # episodes of one action: two rows a step
    assert step.step_type[:, 0].tolist() == [FIRST, MID, MID, LAST, FIRST, MID, PAD, PAD, PAD]
    assert step.observation[6:, 0].eq(0).all()


@pytest.mark.parametrize("mode", [SAME_STEP, DISABLED])
def test_last_rows_stand_beside_the_rows(mode):
    unrolled = nest.tensors(unroller_of(recorded(mode)).unroll(4))
    assert unrolled.time_step.step_type[:, 2].tolist() == [FIRST] * 5
    assert unrolled.ends.ended.int().tolist() == [[0, 0, 1], [0, 1, 1], [1, 0, 1], [0, 1, 1]]
    assert unrolled.ends.time_step.step_type[unrolled.ends.ended].tolist() == [LAST] * 7
    assert unrolled.ends.time_step.observation[2, 0, 1:].tolist() == [0, 3]  # the third step of its first episode
    found, acted = in_line(unrolled)
    assert acted.tolist() == [[0, 0, 0], [1, 1, 2], [2, 3, 4], [4, 4, 6], [5, 6, 8]]
    assert found.ends is None and found.info["seen"][3, 0, 1:].tolist() == [0, 2]  # that of the row acted from


@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize(
    ("lengths", "truncates"),
    [(LENGTHS, False), (LENGTHS, True), (((1,), (1,)), True), (((4,), (4,)), False), (((100,), (100,)), True)],
)
def test_all_modes_have_the_same_columns_in_unrolls_of_any_length(lengths, truncates, on_policy):
    algorithm = Scripted if on_policy else ScriptedOffPolicy
    rng, columns = np.random.default_rng(0), {}
    for mode in (NEXT_STEP, SAME_STEP, DISABLED):
        unroller = unroller_of(recorded(mode, truncates, lengths), algorithm)
        columns[mode] = [[] for _ in lengths]
        for i in range(20):
            experience = unroll(unroller, int(rng.integers(1, 10)))
            rows = *experience.time_step[:-2], experience.action
            for column, found in enumerate(columns[mode]):
                for t in range(on_policy and i > 0, real_rows(experience, column)):
                    is_last = experience.time_step.step_type[t, column] == LAST
                    found.append([leaf[t, column].tolist() for leaf in rows[: 4 if is_last else None]])
    for mode in (SAME_STEP, DISABLED):
        for found, expected in zip(columns[mode], columns[NEXT_STEP]):
            shortest = min(len(found), len(expected))
            # The newest row's action belongs to the policy's next call.
            assert found[: shortest - 1] == expected[: shortest - 1] and shortest > 50


@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP, DISABLED])
def test_one_step_unrolls_lose_no_row(mode):
    environment = recorded(mode)
    unroller = unroller_of(environment)
    trained = [[] for _ in LENGTHS]
    for _ in range(40):
        experience = unroll(unroller, 1)
        for column, found in enumerate(trained):
            found += transitions(experience, column)
    assert trained == [env.record for env in environment.env.envs]


class Walk(gymnasium.Env):
    """Random starts, random moves, random lengths; everything from its own generator, and from what is done."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._x = self.np_random.normal(size=2)
        return self._x.copy(), {}

    def step(self, action):
        self._x = self._x + self.np_random.normal(size=2) + float(action[0])
        fate = self.np_random.random()
        return self._x.copy(), float(self._x[0]), fate < 0.15, fate > 0.85, {}


def walked(environment, num_unrolls=25, length=6):
    """The trainable transitions of each column, as flat lists of numbers."""
    unroller, found = unroller_of(environment), [[] for _ in range(environment.num_envs)]
    for _ in range(num_unrolls):
        experience = unroll(unroller, length)
        step, rows = experience.time_step, trainable(experience.time_step.step_type)
        for t, column in rows.nonzero().tolist():
            arrival = nest.map(lambda leaf, t=t, i=column: leaf[t + 1, i], step)
            numbers = [step.observation[t, column], experience.action[t, column], arrival.prev_action]
            numbers += [arrival.observation, arrival.reward, arrival.discount, arrival.step_type]
            found[column].append([x for number in numbers for x in number.reshape(-1).tolist()])
    environment.close()
    return found


def test_the_three_modes_train_on_the_same_transitions():
    streams = [
        walked(VectorEnvironment(vector([Walk] * 3, autoreset_mode=mode), [4, 5, 6]))
        for vector, mode in (
            (SyncVectorEnv, NEXT_STEP),
            (SyncVectorEnv, SAME_STEP),
            (SyncVectorEnv, DISABLED),
            (AsyncVectorEnv, NEXT_STEP),
            (AsyncVectorEnv, SAME_STEP),
        )
    ]
    for columns in zip(*streams):
        shortest = min(map(len, columns))
        assert shortest > 50
        for column in columns:
            assert column[:shortest] == columns[0][:shortest]
        ends = {tuple(row[-2:]) for row in columns[0][:shortest]}
        assert ends == {(1, MID), (0, LAST), (1, LAST)}
        # Sampled beyond the bounds, and clipped on the way.
        assert any(abs(row[2]) > 1 and abs(row[3]) == 1 for row in columns[0])


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_a_tensor_environment_loses_no_transition(mode):
    length = 5
    unroller = unroller_of(TensorEnvironment(TensorPointMass(3, length, autoreset=mode), seed=1))
    counts, before = [0] * 3, None
    for _ in range(12):
        experience = unroll(unroller, 7)
        step, rows = experience.time_step, trainable(experience.time_step.step_type)
        for column in range(3):
            count = real_rows(experience, column)
            if before is not None:
                assert torch.equal(step.observation[0, column], before[column])
            for t in range(count - 1):
                k, arrived = (round(step.observation[t + i, column, 1].item() * length) for i in (0, 1))
                assert arrived == (0 if k == length else k + 1) and rows[t, column] == (k < length)
                if k < length:
                    executed = experience.action[t, column].clamp(-1, 1)
                    assert torch.equal(step.prev_action[t + 1, column], executed)
                    x = step.observation[t, column, 0] + 0.5 * executed[0]
                    torch.testing.assert_close(step.observation[t + 1, column, 0], x.clamp(-2, 2))
                    assert step.reward[t + 1, column] == -step.observation[t + 1, column, 0].abs()
            counts[column] += int(rows[:, column].sum())
        before = [step.observation[real_rows(experience, column) - 1, column] for column in range(3)]
    assert min(counts) > 50


@pytest.mark.parametrize("algorithm", [Scripted, ScriptedOffPolicy])
@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP, DISABLED])
def test_metrics_see_each_row_once(mode, algorithm):
    environment = recorded(mode)
    unroller = unroller_of(environment, algorithm)
    metrics = [AverageReturn(1000), AverageEpisodeLength(1000), EnvironmentSteps(), NumberOfEpisodes()]
    metrics = Metrics([*metrics, EnvInfo(include=["episode"], window=1000), EnvInfo(when="step", name="steps")], 3)
    for _ in range(20):
        unroll(unroller, 4)
        metrics.update(*unroller.records)
    results = metrics.results()
    records = [env.record for env in environment.env.envs]
    ended = [row for record in records for row in record if row[5] or row[6]]
    lengths = [row[3] for row in ended]
    assert results["environment_steps"] == sum(map(len, records))
    assert results["episodes"] == len(ended)
    assert results["average_episode_length"] == pytest.approx(np.mean(lengths))
    assert results["average_return"] == pytest.approx(np.mean([n * (n + 1) / 2 for n in lengths]))
    assert results["env_info/episode"] == pytest.approx(np.mean([row[0] for row in ended]))
    assert results["steps/episode/n"] == sum(map(len, records))
    assert results["steps/episode"] == pytest.approx(np.mean([row[0] for record in records for row in record]))


def test_off_policy_gives_T_rows_and_on_policy_one_more():
    for algorithm, rows in ((Scripted, 6), (ScriptedOffPolicy, 5)):
        experience = unroll(unroller_of(recorded(NEXT_STEP), algorithm), 5)
        assert {len(leaf) for leaf in nest.leaves(experience[:3])} == {rows}


def test_the_policy_version_is_noted():
    unroller = unroller_of(recorded(NEXT_STEP))
    assert unroll(unroller, 2).policy_version.tolist() == [0, 0, 0]
    unroller.policy_version += 1
    assert unroll(unroller, 2).policy_version.tolist() == [1, 1, 1]


def test_rows_stay_raw_while_the_policy_sees_them_transformed():
    unroller = unroller_of(recorded(NEXT_STEP), factories=[ObservationNormalizer])
    plain = unroll(unroller_of(recorded(NEXT_STEP)), 4)
    unroller._transforms.observe(plain.time_step, unroller._transforms.initial_state(3), 1)
    experience = unroll(unroller, 4)
    assert torch.equal(experience.time_step.observation, plain.time_step.observation)
    expected = unroller._transforms.transform(plain.time_step, experience.transform_state).observation
    acts = plain.time_step.step_type != LAST
    assert torch.equal(experience.info["seen"][acts], expected[acts])
    assert not torch.equal(expected, plain.time_step.observation)


# Policies that remember.


class Counting(Scripted):
    """Its state counts the steps since FIRST, from 100; `info` is the state that it acted from."""

    def initial_state(self, batch_size):
        return torch.full((batch_size,), 100)

    def rollout_step(self, time_step, state):
        return AlgStep(super().rollout_step(time_step, state).output, state + 1, state)


@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP, DISABLED])
def test_the_state_is_reset_at_first_and_carried_elsewhere(mode):
    unroller = unroller_of(recorded(mode), Counting)
    for _ in range(12):
        experience = unroll(unroller, 5)
        step = experience.time_step
        for column in range(3):
            count = real_rows(experience, column)
            acts = step.step_type[:count, column] != LAST
            expected = 100 + step.observation[:count, column, 2]
            assert torch.equal(experience.info[:count, column][acts], expected[acts].long())
            if step.step_type[0, column] != LAST:
                assert experience.state[column] == expected[0]  # after the reset, before the step


# Values that are not finite.


class Breaking(Stamped):
    """Says something that is not finite in the third step."""

    def __init__(self, where, value):
        super().__init__((100,))
        self.observation_space = spaces.Dict(
            inner=spaces.Dict(speed=spaces.Box(-np.inf, np.inf, (2,), np.float32)), digit=spaces.Discrete(3)
        )
        self._where, self._value = where, value

    def _observation(self):
        bad = self._where == "observation" and self._step == 3
        return {"inner": {"speed": np.array([0, self._value if bad else 1], np.float32)}, "digit": 1}

    def step(self, action):
        observation, reward, *rest = super().step(action)
        return observation, self._value if self._where == "reward" and self._step == 3 else reward, *rest


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where, leaf", [("reward", "a reward"), ("observation", "an observation inner.speed")])
def test_a_value_that_is_not_finite_is_named(where, leaf, value):
    makers = [lambda: Breaking("", 0), lambda: Breaking(where, value)]
    env = SyncVectorEnv(makers, autoreset_mode=NEXT_STEP)
    unroller = unroller_of(VectorEnvironment(env, [0, 1]), Still)
    unroller.environment.env_id += 10
    with pytest.raises(RunError, match=f"environment 11 returned {leaf} that is not finite in row 3 of the unroll"):
        unroll(unroller, 8)


class Careful(Breaking):
    """Refuses the action that follows its observation that is not finite."""

    def step(self, action):
        assert self._step != 3, "the action is not finite"
        return super().step(action)


@pytest.mark.parametrize("value", [np.nan, 1.0])
def test_an_error_that_follows_an_observation_that_is_not_finite_names_the_observation(value):
    env = SyncVectorEnv([lambda: Careful("observation", value)], autoreset_mode=NEXT_STEP)
    cause = "environment 0 returned an observation inner.speed that is not finite in row 0 of the unroll"
    with pytest.raises(
        RunError, match=cause if np.isnan(value) else "step raised AssertionError: the action is not finite"
    ):
        unroll(unroller_of(VectorEnvironment(env, [0]), Still), 8)


class Misplaced(Breaking):
    """Shows a digit that its space lacks."""

    def _observation(self):
        digit = self.observation_space["digit"]
        return {**super()._observation(), "digit": digit.start + digit.n}


def test_a_choice_outside_its_space_is_named():
    env = SyncVectorEnv([lambda: Misplaced("", 0)], autoreset_mode=NEXT_STEP)
    with pytest.raises(RunError, match="environment 0 returned .* as observation.digit in row 0 .* is Discrete"):
        unroll(unroller_of(VectorEnvironment(env, [0]), Still), 8)


class Raising(Stamped):
    """Raises in step 2 of its first episode."""

    def step(self, action):
        if self._episode == 0 and self._step == 1:
            raise RuntimeError("broken on purpose")
        return super().step(action)


def test_an_environment_error_ends_the_episode_in_the_previous_row():
    environment = make_environment(lambda: Raising((4,)), num_envs=2, seed=1)
    environment.env.envs[1]._episode = 0  # so that it never raises
    reported = []
    environment.tolerate_errors(lambda index, error: reported.append(index))
    unroller = unroller_of(environment, ScriptedOffPolicy)
    step = nest.map(lambda *parts: torch.cat(parts), *(unroll(unroller, 3).time_step for _ in range(2)))
    assert reported[0] == 0 and 1 not in reported
    assert step.step_type[:3, 0].tolist() == [FIRST, LAST, FIRST]
    assert step.step_type[:, 1].tolist() == [FIRST, MID, MID, MID, LAST, FIRST]
    unroller.close()


def test_large_finite_values_pass():
    env = SyncVectorEnv([lambda: Breaking("observation", 3e38)] * 2, autoreset_mode=NEXT_STEP)
    observation = unroll(unroller_of(VectorEnvironment(env, [0, 1]), Still), 8).time_step.observation
    assert (observation["inner"]["speed"][3, :, 1] == np.float32(3e38)).all()  # their sum overflows; they do not


# Saving.


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_it_continues_bit_for_bit_if_the_environments_state_is_saved(mode):
    def make():
        return unroller_of(TensorEnvironment(TensorPointMass(3, 5, autoreset=mode), seed=1))

    one, other = make(), make()
    for _ in range(3):
        unroll(one, 4)
    state = nest.map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, one.state_dict())
    other.load_state_dict(state)
    for _ in range(3):
        assert_equal(unroll(one, 4), unroll(other, 4))
        assert np.array_equal(one.records.step_type, other.records.step_type)


def test_elsewhere_an_unfinished_episode_ends_truncated_and_the_next_begins():
    one = unroller_of(recorded(NEXT_STEP, lengths=((9,), (9,))))
    before = unroll(one, 4)
    other = unroller_of(recorded(NEXT_STEP, lengths=((9,), (9,))))
    other.load_state_dict(one.state_dict())
    after = unroll(other, 4).time_step
    assert after.step_type[:, 0].tolist() == [LAST, FIRST, MID, MID, MID]
    assert torch.equal(after.observation[0], before.time_step.observation[-1])
    assert after.discount[0].tolist() == [1, 1]
    assert after.prev_action[1].tolist() == [0, 0] and after.reward[1].tolist() == [0, 0]
    assert after.observation[1:, 0, 2].tolist() == [0, 1, 2, 3]
    assert not trainable(after.step_type)[0].any()
    # The metrics see the new rows alone: a reset, and three environment steps in each column.
    assert other.records.step_type.tolist() == [[FIRST, FIRST], [MID, MID], [MID, MID], [MID, MID]]


@pytest.mark.parametrize("mode", [SAME_STEP, DISABLED])
def test_elsewhere_uneven_columns_begin_again_too(mode):
    one = unroller_of(recorded(mode, lengths=((9,), (9,))))
    unroll(one, 4)
    other = unroller_of(recorded(mode, lengths=((9,), (9,))))
    other.load_state_dict(one.state_dict())
    assert unroll(other, 5).time_step.step_type[:5, 0].tolist() == [LAST, FIRST, MID, MID, MID]


def test_the_environments_generators_are_saved():
    """At an episode's end nothing else is left to save: the next start is the one that would have come."""

    def make():
        return unroller_of(make_environment(NestedBandit, 2, env_kwargs={"image_size": 8, "length": 4}, seed=3), Stay)

    class Stay(Still):
        def rollout_step(self, time_step, state):
            return AlgStep(torch.zeros(len(time_step.step_type), 3, dtype=torch.int64), state)

    one, other = make(), make()
    unroll(one, 4)  # rows 0..4: the last row is LAST
    other.load_state_dict(one.state_dict())
    for _ in range(3):
        assert_equal(unroll(one, 5), unroll(other, 5))


def test_the_policys_state_is_saved():
    one = unroller_of(TensorEnvironment(TensorPointMass(3, 50), seed=1), Counting)
    unroll(one, 4)
    other = unroller_of(TensorEnvironment(TensorPointMass(3, 50), seed=1), Counting)
    other.load_state_dict(one.state_dict())
    assert unroll(other, 2).info[:, 0].tolist() == [104, 105, 106]


def test_an_unroller_that_never_ran_is_restored_as_such():
    one, other = (unroller_of(recorded(NEXT_STEP)) for _ in range(2))
    other.load_state_dict(one.state_dict())
    assert unroll(other, 3).time_step.step_type[0].tolist() == [FIRST] * 3


@pytest.mark.parametrize("gather", [True, False])
def test_the_reported_executed_action_is_stored(gather):
    environment = make_environment(Expert, num_envs=2)
    made = ScriptedOffPolicy(environment.observation_spec, environment.action_spec, environment.reward_spec)
    unroller = SyncUnroller(
        environment, made, Transforms([], environment.observation_spec, environment.reward_spec), 0, True
    )
    if not gather:
        unroller.ignore_infos()
    rows = unroll(unroller, 7)
    own = (3 * rows.time_step.observation[:, 0, 0].sin()).clip(-1, 1)
    # 2, its own, 0 and -1 of [-2, 6] are 0, ..., -0.5 and -0.75 of [-1, 1]; the action of a LAST row is nobody's.
    expected = [0.0, float(own[1]), -0.5, -0.75]
    assert rows.action[:4, :, 0].tolist() == [[pytest.approx(value)] * 2 for value in expected]
    assert rows.time_step.prev_action[1:5, 0, 0].tolist() == pytest.approx(expected)
    assert rows.action[4, 0, 0] == pytest.approx(float(3 * rows.time_step.observation[4, 0, 0].sin()))
    assert rows.action[5, 0, 0] == 0


class Reports(OneState):
    """Reports what was executed, by a value that is a class attribute."""

    value: Any = None

    def step(self, action):
        observation, reward, terminated, truncated, _ = super().step(action)
        return observation, reward, terminated, truncated, {"executed_action": self.value}


@pytest.mark.parametrize("value", [None, 1, np.int64(1), 5, -1])
def test_an_executed_action_must_be_in_the_space(value, monkeypatch):
    monkeypatch.setattr(Reports, "value", value)
    environment = make_environment(Reports, num_envs=2)
    environment.read_executed_actions()
    environment.reset()
    if value in (5, -1):
        with pytest.raises(UsageError, match="the info executed_action is not an element of the action space Discrete"):
            environment.step(np.zeros(2, np.int64))
    else:
        row = environment.step(np.zeros(2, np.int64))
        assert row.prev_action.tolist() == [int(value or 0)] * 2 and row.prev_action.dtype == np.int64


def test_an_executed_action_may_be_a_list():
    environment = make_environment("Pendulum-v1", num_envs=2)
    environment.read_executed_actions()
    infos = {"executed_action": np.array([[0.5], None], object), "_executed_action": np.array([True, True])}
    infos["executed_action"][0] = [0.5]
    environment.infos = infos
    found = environment._reported(np.array([[0.75], [0.75]], np.float32))
    assert found.tolist() == [[0.25], [0.75]]


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_a_curriculum_receives_the_progress_of_training(vectorization):
    environment = make_environment(Curriculum, num_envs=2, vectorization=vectorization)
    with contextlib.closing(unroller_of(environment)) as unroller:
        assert environment.follows_progress
        unroller._algorithm.progress.fill_(0.25)
        assert unroll(unroller, 2).time_step.observation[0, :, 0].tolist() == [0.25, 0.25]


def test_overwritten_infos_keep_the_values_of_their_step():
    class Counting(SyncVectorEnv):
        count = np.zeros(2)

        def step(self, action):
            self.count += 1
            return *super().step(action)[:4], {"count": self.count}

    makers = [lambda: Stamped((9,))] * 2
    unroller = unroller_of(VectorEnvironment(Counting(makers, autoreset_mode=NEXT_STEP), [0, 1]))
    unroll(unroller, 3)
    assert [info["count"].tolist() for _, info in unroller.records.infos] == [[1, 1], [2, 2], [3, 3]]
    unroller.ignore_infos()
    unroll(unroller, 3)
    assert unroller.records.infos == []


def test_on_policy_an_overwritten_action_is_refused():
    environment = make_environment(Expert)
    made = Scripted(environment.observation_spec, environment.action_spec, environment.reward_spec)
    with pytest.raises(UsageError, match="overwrite_policy_output .* off-policy"):
        SyncUnroller(environment, made, Transforms([], environment.observation_spec, environment.reward_spec), 0, True)


@pytest.mark.parametrize("numpy_policy", [0, None])
@pytest.mark.parametrize("mode", [SAME_STEP, DISABLED])
def test_one_uneven_environment_is_a_column_too(mode, numpy_policy):
    environment = recorded(mode, lengths=LENGTHS[:1])
    made = PPO(environment.observation_spec, environment.action_spec, environment.reward_spec)
    transforms = Transforms([], environment.observation_spec, environment.reward_spec)
    unroller = SyncUnroller(environment, made, transforms, numpy_policy)
    found = [transition for _ in range(8) for transition in transitions(unroll(unroller, 6), 0)]
    assert found == environment.env.envs[0].record and len(found) > 30
    assert (unroller._actor._program is None) == (numpy_policy is None)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_calls_reach_existing_and_resumed_environments(vectorization):
    def made():
        return unroller_of(make_environment(Levels, num_envs=2, vectorization=vectorization))

    with contextlib.closing(made()) as unroller:
        unroll(unroller, 2)
        unroller.environment.call("set_level", 1.0)
        unroller.environment.call("set_level", 3.0)
        levels = unroll(unroller, 6).time_step.observation[:, :, 0]
        assert levels[0].tolist() == [0.0, 0.0] and levels[-1].tolist() == [3.0, 3.0]  # from the next episode on
        state = unroller.state_dict()
        assert state["calls"] == [["set_level", [3.0]]]
    with contextlib.closing(made()) as resumed:
        resumed.load_state_dict(state)
        assert (unroll(resumed, 2).time_step.observation[1, :, 0] == 3.0).all(), "the first episode has the level, too"
        assert resumed.state_dict()["calls"] == state["calls"]


def test_a_run_without_calls_saves_none():
    assert "calls" not in unroller_of(make_environment(Levels, num_envs=2)).state_dict()


class Opened(gymnasium.Wrapper):
    doors = 0

    def open_doors(self, number):
        self.doors = number


def test_a_call_finds_the_method_of_a_wrapper():
    environment = make_environment(lambda: Opened(Levels()), num_envs=2)
    environment.call("open_doors", 2)
    assert [one.doors for one in environment.env.envs] == [2, 2]


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (("set_lewel", 1), "Levels has no method 'set_lewel' to call; define it in the environment or in a wrapper"),
        (("set_level", np.float64(1)), r"leaf 'the arguments of set_level.0' is a numpy.float64"),
    ],
)
def test_a_wrong_call_is_refused(arguments, sentence):
    environment = make_environment(Levels, num_envs=2)
    with pytest.raises(UsageError, match=sentence):
        environment.call(*arguments)
    assert environment.calls == {}


def test_a_call_during_an_endless_step_is_only_stored():
    environment = make_environment(Levels, num_envs=1)
    environment.reset()
    environment.abandon()
    environment.call("set_level", 5.0)
    assert environment.env.envs[0]._next == 0 and environment.calls["set_level"].arguments == (5.0,)


def test_an_environment_in_tensors_takes_a_call():
    environment = make_environment(TensorPointMass, num_envs=2)
    environment.env.set_target = lambda x: setattr(environment.env, "told", x)
    environment.call("set_target", 0.5)
    assert environment.env.told == 0.5
    environment.abandon()
    environment.call("set_target", 1.0)
    assert environment.env.told == 0.5, "only stored, because a step may never end"
