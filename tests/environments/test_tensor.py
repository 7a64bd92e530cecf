"""Environments that return tensors: the same stream, and nothing copied."""

import functools

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from alfish import nest
from alfish.algorithms.ppo import PPO
from alfish.data import StepType
from alfish.environments import TensorEnvironment, make_environment
from alfish.environments.toy import TensorPointMass
from alfish.errors import UsageError
from alfish.learner.batches import EpochBatches
from alfish.training.trainer import Trainer

FIRST, MID, LAST = StepType.FIRST, StepType.MID, StepType.LAST


def columns(environment, num_steps, act):
    """Each environment's rows in the order of time."""
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
    return rows


def push(time_step):
    return torch.where(time_step.observation[:, :1] > 0, -0.3, 2.0)  # the second one is clipped to 1


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_every_episode_is_whole_and_in_order(mode):
    length = 4
    environment = TensorEnvironment(TensorPointMass(3, length, autoreset=mode), seed=5)
    assert environment.uneven == (mode == "same_step")
    for column in columns(environment, 30, push):
        for i, row in enumerate(column):
            step = i % (length + 1)
            position, elapsed = row.observation.tolist()
            assert row.step_type.item() == (FIRST if step == 0 else LAST if step == length else MID)
            assert elapsed == pytest.approx(step / length)
            assert row.discount.item() == 1  # truncated, never terminated
            if step == 0:
                assert row.reward.item() == 0 and row.prev_action.item() == 0
                continue
            before = column[i - 1].observation[0].item()
            executed = -0.3 if before > 0 else 1.0
            assert row.prev_action.item() == pytest.approx(executed)
            assert position == pytest.approx(before + 0.5 * executed, abs=1e-6)  # at LAST too
            assert row.reward.item() == pytest.approx(-abs(position))
        assert len(column) >= 5 * (length + 1)


def test_both_modes_make_the_same_first_episodes():
    rows = [
        columns(TensorEnvironment(TensorPointMass(3, 4, autoreset=mode), seed=5), 4, push)
        for mode in ("next_step", "same_step")
    ]
    for one, other in zip(*rows):
        for a, b in zip(one[:5], other[:5]):
            assert all(torch.equal(x, y) for x, y in zip(nest.leaves(a), nest.leaves(b)))


class Terminating(TensorPointMass):
    """Every second environment terminates where the others are truncated."""

    def step(self, action):
        observation, reward, terminated, truncated, infos = super().step(action)
        odd = torch.arange(self.num_envs) % 2 == 1
        return observation, reward, truncated & odd, truncated & ~odd, infos


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_discount_is_0_just_where_an_episode_terminates(mode):
    environment = TensorEnvironment(Terminating(4, 3, autoreset=mode), seed=0)
    for i, column in enumerate(columns(environment, 12, push)):
        for row in column:
            assert row.discount.item() == (0 if row.step_type.item() == LAST and i % 2 else 1)


class Remembering(TensorPointMass):
    """Keeps the tensors that it hands out."""

    def step(self, action):
        self.action = action
        self.handed = super().step(action)
        return self.handed


def test_observations_are_the_environments_own_tensors():
    env = Remembering(4, 20)
    environment = TensorEnvironment(env, seed=0)
    environment.reset()
    row = environment.step(torch.zeros(4, 1))
    assert row.observation.data_ptr() == env.handed[0].data_ptr()
    assert isinstance(env.action, torch.Tensor)


class Doubles(TensorPointMass):
    """Speaks float64, in a nest, with a vector reward."""

    def __init__(self, num_envs):
        super().__init__(num_envs, 3)
        state, digit = spaces.Box(-2, 2, (2,), np.float64), spaces.Discrete(5, start=2)
        self.single_observation_space = spaces.Dict(state=state, digit=digit)
        self.reward_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def _observation(self):
        return {"state": super()._observation().double(), "digit": self._elapsed + 2}

    def step(self, action):
        observation, reward, *rest = super().step(action)
        return observation, torch.stack([reward, 2 * reward], -1).double(), *rest


def test_float64_becomes_float32_and_vector_rewards_stay_vectors():
    environment = TensorEnvironment(Doubles(2), seed=0)
    column, _ = columns(environment, 5, lambda _: torch.ones(2, 1))
    assert environment.reward_spec.shape == (2,)
    for row in column:
        assert row.observation["state"].dtype == row.reward.dtype == torch.float32
        assert row.observation["digit"].dtype == torch.int64
        assert row.observation["digit"] == round(row.observation["state"][1].item() * 3)  # counted from 0
        assert row.reward.shape == (2,) and row.discount.shape == ()
    assert [bool(row.reward.any()) for row in column] == [False, True, True, True, False, True]
    assert column[1].reward[1] == 2 * column[1].reward[0]


def test_the_seed_decides_the_starts():
    def start(seed):
        return TensorEnvironment(TensorPointMass(4), seed).reset().observation

    assert torch.equal(start(1), start(1)) and not torch.equal(start(1), start(2))


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_tensor_environment_state_continues_bit_for_bit(mode):
    def make():
        return TensorEnvironment(TensorPointMass(3, 4, autoreset=mode), seed=5)

    def go_on(environment, row):
        seen = []
        for _ in range(9):
            row = environment.step(push(row))
            seen.append(row)
            resets = environment.take_resets()
            row = row if resets is None else nest.where(*resets, row)
            seen.append(row)
        return seen

    one = make()
    row = one.reset()
    for _ in range(3 if mode == "same_step" else 4):  # NEXT_STEP: saved between LAST and FIRST
        row = one.step(push(row))
    state = one.state_dict()
    saved = nest.map(torch.clone, row)
    expected = go_on(one, row)
    other = make()
    assert other.load_state_dict(state)
    for a, b in zip(expected, go_on(other, saved), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(nest.leaves(a), nest.leaves(b)))


class Stateless(VectorEnv):
    """Has no `get_state`."""

    def __init__(self, num_envs):
        inner = TensorPointMass(num_envs, 4)
        self.reset, self.step, self.close = inner.reset, inner.step, inner.close
        self.metadata, self.num_envs, self.device = inner.metadata, num_envs, "cpu"
        self.single_observation_space = inner.single_observation_space
        self.single_action_space = inner.single_action_space


def test_without_a_saved_state_every_episode_starts_again():
    environment = TensorEnvironment(Stateless(2), seed=1)
    row = environment.reset()
    environment.step(push(row))
    other = TensorEnvironment(Stateless(2), seed=1)
    assert not other.load_state_dict(environment.state_dict())
    row = other.step(push(row))
    assert row.step_type.tolist() == [FIRST, FIRST] and row.observation[:, 1].tolist() == [0, 0]
    assert other.step(push(row)).step_type.tolist() == [MID, MID]


def test_without_a_saved_state_each_resume_begins_other_episodes():
    starts = []
    for resume in range(3):
        torch.manual_seed(resume)  # as the run restores it
        environment = TensorEnvironment(Stateless(2), seed=1)
        starts.append(environment.reset().observation[:, 0].tolist())
        environment.load_state_dict({})
        starts.append(environment.step(torch.zeros(2, 1)).observation[:, 0].tolist())
    first, *others = map(tuple, starts)
    assert starts[::2] == [list(first)] * 3 and len({first, *others}) == 4


def test_a_reset_after_a_resume_is_the_only_one():
    environment = TensorEnvironment(Stateless(2), seed=1)
    environment.load_state_dict({})
    row = environment.reset()
    assert environment.step(push(row)).step_type.tolist() == [MID, MID]


class Writing(TensorPointMass):
    """Writes to its actions; flags are numbers, or rewards have a dimension too many."""

    single_action_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)

    def __init__(self, flags=torch.int64, shape=(-1,)):
        super().__init__(3, 4)
        self._flags, self._shape = flags, shape

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        action.mul_(0).add_(99.0)
        return observation, reward.reshape(self._shape), terminated.to(self._flags), truncated.to(self._flags), info


@pytest.mark.parametrize("flags", [torch.int64, torch.uint8, torch.float32])
def test_an_environment_may_write_to_its_actions_and_return_numbers_as_flags(flags):
    plain = TensorEnvironment(TensorPointMass(3, 4), seed=1)
    environment = TensorEnvironment(Writing(flags), seed=1)
    row, other = environment.reset(), plain.reset()
    for k in range(6):
        action = torch.full((3, 1), 0.1 * k)
        row, other = environment.step(action), plain.step(action.clone())
        assert action.eq(0.1 * torch.tensor(k)).all()
        assert all(torch.equal(a, b) for a, b in zip(nest.leaves(row), nest.leaves(other)))


@pytest.mark.parametrize(("shape", "found"), [((-1, 1, 1), r"\(3, 1, 1\)"), ((1, 3), r"\(1, 3\)")])
def test_rewards_of_another_shape_are_refused(shape, found):
    environment = TensorEnvironment(Writing(shape=shape), seed=1)
    row = environment.reset()
    with pytest.raises(UsageError, match=rf"returned reward of shape {found}; with 3 environments it must be \(3,\)"):
        environment.step(push(row))


def test_disabled_autoreset_is_refused():
    env = TensorPointMass(2)
    env.metadata = {"autoreset_mode": AutoresetMode.DISABLED}
    with pytest.raises(UsageError, match="disables autoreset; set its autoreset mode to NEXT_STEP"):
        TensorEnvironment(env, 0)


def test_a_missing_autoreset_mode_is_refused():
    env = TensorPointMass(2)
    env.metadata = {}
    with pytest.raises(UsageError, match="TensorPointMass.metadata has no 'autoreset_mode'"):
        TensorEnvironment(env, 0)


def test_same_step_without_final_observations_is_refused():
    class Forgetful(TensorPointMass):
        def step(self, action):
            *rest, _ = super().step(action)
            return *rest, {}

    environment = TensorEnvironment(Forgetful(2, 3, autoreset="same_step"), 0)
    environment.reset()
    for _ in range(2):  # where nothing ends, none is needed
        assert environment.step(torch.zeros(2, 1)).step_type.tolist() == [MID, MID]
    environment.step(torch.zeros(2, 1))
    with pytest.raises(UsageError, match="Forgetful truncated 2 episodes without returning final observations"):
        environment.judge(float(environment.sign))


def test_floats_are_not_cut_to_the_integers_of_a_space():
    env = TensorPointMass(2)
    env.single_observation_space = spaces.Box(0, 255, (2,), np.uint8)
    with pytest.raises(
        UsageError, match="reset returned observations of dtype torch.float32, which would be truncated to"
    ):
        TensorEnvironment(env, 0).reset()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda observation: observation[:, :1],
            r"returned observation of shape \(2, 1\); with 2 env",
        ),
        (lambda observation: observation[:1], r"observation of shape \(1, 2\)"),
        (torch.Tensor.numpy, "reset returned observation as ndarray; its attribute `device` promises"),
    ],
)
def test_observations_of_another_shape_or_kind_are_named(change, words):
    env = TensorPointMass(2)
    reset = env.reset
    env.reset = lambda **settings: (change(reset(**settings)[0]), {})
    with pytest.raises(UsageError, match=words):
        TensorEnvironment(env, 0).reset()


def test_results_of_a_step_that_are_not_tensors_are_named():
    env = TensorPointMass(2)
    step = env.step
    env.step = lambda action: (step(action)[0], np.zeros(2), *step(action)[2:])
    environment = TensorEnvironment(env, 0)
    row = environment.reset()
    with pytest.raises(UsageError, match="step returned reward as ndarray; its attribute `device` promises"):
        environment.step(push(row))


def test_tensors_without_a_device_are_refused():
    env = TensorPointMass(2)
    env.device = None
    with pytest.raises(UsageError, match="reset returned tensors, but .* has no attribute `device`"):
        make_environment(lambda num_envs: env, num_envs=2).reset()


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_4096_environments_train(tmp_path, mode):
    trainer = Trainer(
        tmp_path,
        algorithm=PPO,
        environment=functools.partial(
            make_environment, TensorPointMass, num_envs=4096, env_kwargs={"length": 3, "autoreset": mode}
        ),
        batches=functools.partial(EpochBatches, num_epochs=1, minibatch_size=8 * 4096),
        listeners=[],
        unroll_length=8,
        num_iterations=1,
        device="cpu",
    )
    before = [parameter.clone() for parameter in trainer.algorithm.parameters()]
    report = trainer.train()
    assert report.iterations == 1
    # In NEXT_STEP, of 8 rows after the first one, every fourth is FIRST and no environment step.
    assert report.env_steps == 4096 * (6 if mode == "next_step" else 8)
    assert any(not torch.equal(a, b) for a, b in zip(before, trainer.algorithm.parameters()))
