"""CompiledUnroller with every kind of policy, observation, reward and replay: what is trained is SyncUnroller's."""

import functools

import numpy as np
import pytest
import torch
from gymnasium import spaces

from alfish import nest
from alfish.algorithms.dqn import DQN
from alfish.algorithms.ppo import PPO
from alfish.algorithms.sac import SAC
from alfish.data import StepType, in_line, trainable
from alfish.environments import make_environment
from alfish.environments.functional import CartPole
from alfish.learner.batches import EpochBatches, ReplayBatches
from alfish.learner.learner import Learner
from alfish.networks import (
    GRU,
    MLP,
    ActorCritic,
    AttentionWindow,
    CriticEnsemble,
    MinGRU,
    QNetwork,
    StackedMemory,
    Torso,
)
from alfish.replay import Prioritized
from alfish.training.trainer import Trainer
from alfish.transforms import Transforms
from alfish.unrollers import CompiledUnroller, SyncUnroller

SYNC = functools.partial(SyncUnroller, numpy_policy=None)
PLAIN = functools.partial(CompiledUnroller, compile=False)
MLP_8 = functools.partial(MLP, layers=(8,))
TORSO = functools.partial(Torso, mlp=MLP_8)
RECURRENT = functools.partial(TORSO, memory=functools.partial(GRU, size=4))
STACKED = functools.partial(
    TORSO,
    memory=functools.partial(StackedMemory, layers=[MinGRU, functools.partial(AttentionWindow, length=4, size=8)]),
)


def ppo(torso=TORSO):
    return functools.partial(PPO, network=functools.partial(ActorCritic, actor_torso=torso, critic_torso=torso))


def dqn(torso=TORSO):
    return functools.partial(DQN, q_network=functools.partial(QNetwork, torso=torso), target_period=4)


class Rails(CartPole):
    """A pole on a cart whose third action is a brake; a cart that is far out may not be pushed further."""

    observation_space = spaces.Dict(
        legal=spaces.MultiBinary(3), pose=spaces.Box(-10, 10, (2, 2), np.float32), side=spaces.Discrete(2, start=5)
    )
    action_space = spaces.Discrete(3)
    reward_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    max_episode_steps = 14

    def transition(self, state, action, rng, params=None):
        after = super().transition(state, (action == 1).long(), rng)
        return after._replace(velocity=torch.where(action == 2, 0.9 * after.velocity, after.velocity))

    def observation(self, state, rng, params=None):
        allowed = [state.position > -0.03, state.position < 0.03, torch.ones_like(state.position)]
        return {
            "legal": torch.stack([leaf.to(torch.int8) for leaf in allowed], -1),
            "pose": torch.stack(tuple(state), -1).unflatten(-1, (2, 2)),
            "side": (state.position > 0).long() + 5,
        }

    def reward(self, state, action, next_state, rng, params=None):
        return torch.stack([torch.ones_like(state.position), -(action == 2).to(torch.float32)], -1)


def unroller_of(kind, algorithm, num_envs):
    """An unroller that starts with the same random numbers whatever its kind."""
    torch.manual_seed(0)
    environment = make_environment(Rails, num_envs, action_mask="observation:legal", rewards=["up", "calm"])
    transforms = Transforms((), environment.observation_spec, environment.reward_spec)
    made = algorithm(transforms.observation_spec, environment.action_spec, environment.reward_spec)
    made.eval()
    return kind(environment, made, transforms)


def assert_equal(found, expected, tolerance):
    assert nest.paths(found) == nest.paths(expected)
    for path, a, b in zip(nest.paths(found), nest.leaves(nest.tensors(found)), nest.leaves(nest.tensors(expected))):
        assert a.dtype == b.dtype and a.shape == b.shape, path
        assert torch.allclose(a.double(), b.double(), 0, tolerance, equal_nan=True), path


def compare_rows(ours, reference, lengths, tolerance):
    """Compares the rows of two unrollers; returns those of the last unroll in line."""
    for length in lengths:
        found = []
        for unroller in (ours, reference):
            torch.manual_seed(length)
            found.append(unroller.unroll(length))
        assert_equal(*found, tolerance)
        assert_equal(ours.records._replace(infos=None), reference.records._replace(infos=None), tolerance)
    return in_line(found[0]).experience


@pytest.mark.parametrize("algorithm", [ppo(RECURRENT), dqn(RECURRENT), ppo(STACKED)], ids=["PPO", "DQN", "stacked"])
def test_complex_rows_equal_those_of_the_sync_unroller(algorithm):
    ours, reference = (unroller_of(kind, algorithm, 3) for kind in (PLAIN, SYNC))
    ours.stores_states = reference.stores_states = True
    rows = compare_rows(ours, reference, (3, 1, 40), 0.0)
    time_step = rows.time_step
    assert time_step.reward.shape[2:] == (2,) and {*time_step.observation} == {"legal", "pose", "side"}
    trains = trainable(time_step.step_type)
    legal = time_step.observation["legal"][:-1].gather(-1, rows.action[:-1, :, None])[..., 0]
    assert (legal[trains] == 1).all() and (time_step.observation["legal"] == 0).any()
    state = rows.info.state[0] if isinstance(rows.info.state, tuple) else rows.info.state
    leaf = nest.leaves(state)[0]
    is_first = time_step.step_type == StepType.FIRST
    assert leaf[~is_first & (time_step.step_type != StepType.PAD)].abs().sum() > 0
    assert (time_step.step_type == StepType.LAST).sum() > 5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_graphs_make_the_same_rows_with_memory_masks_dicts_and_two_rewards():
    compiled = functools.partial(CompiledUnroller, chunk_length=2)
    ours, reference = (unroller_of(kind, ppo(RECURRENT), 16) for kind in (compiled, PLAIN))
    ours.stores_states = reference.stores_states = True
    compare_rows(ours, reference, (2, 4, 20), 1e-4)
    assert not ours._run.is_plain and ours._run._graphs


SMALL_SAC = functools.partial(SAC, actor_mlp=MLP_8, critic=functools.partial(CriticEnsemble, layers=(8,)))


def run(directory, unroller, case, num_iterations=6, **arguments):
    env_id, algorithm, batches, environment = CASES[case]
    trainer = Trainer(
        directory,
        algorithm=algorithm,
        environment=functools.partial(make_environment, env_id, **{"num_envs": 8, **environment}),
        batches=batches,
        unroller=unroller,
        learner=functools.partial(Learner, compile=False),
        listeners=[],
        num_iterations=num_iterations,
        **{"unroll_length": 8, "num_threads": 1, **arguments},
    )
    trainer.train()
    return trainer


def state_of(trainer):
    """The state of a run, with its replay, and without times."""
    state = trainer.state_dict()
    kept = {name: state[name] for name in ("algorithm", "transforms", "learner", "batches", "metrics", "rng")}
    kept["episodes"] = {name: state["unroller"][name] for name in ("time_step", "state", "environment")}
    if not trainer.algorithm.on_policy:
        kept["replay"] = trainer.batches.buffer.state_dict()
        kept["sampler"] = trainer.batches._collected.sampler.state_dict()
    return kept


def assert_same_run(one, other):
    found, expected = state_of(one), state_of(other)
    assert nest.paths(found) == nest.paths(expected)
    for path, a, b in zip(nest.paths(found), nest.leaves(found), nest.leaves(expected)):
        if path.startswith("metrics."):  # sums over rows in tensors are rounded in another way than those in arrays
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=path)
        else:
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, path


EPOCHS = functools.partial(EpochBatches, num_epochs=2, minibatch_size=32)
REPLAY = functools.partial(ReplayBatches, 320, 16, updates_per_env_step=0.125, warmup_env_steps=128)
MASKED = {"action_mask": "observation:legal"}
CASES = {
    "memory": ("alfish/Recall-v0", ppo(RECURRENT), EPOCHS, {}),
    "all": (Rails, ppo(RECURRENT), functools.partial(EPOCHS, sequence_length=4), MASKED),
    "DQN, priorities": ("alfish/CartPole-v1", dqn(), functools.partial(REPLAY, sampler=Prioritized), {}),
    "DQN, 3 steps": ("alfish/Catch-v0", dqn(), functools.partial(REPLAY, window_length=4), {}),
    "DQN, all": (
        Rails,
        dqn(RECURRENT),
        functools.partial(REPLAY, window_length=6, state_period=8, burn_in=2, sampler=Prioritized),
        MASKED,
    ),
    "SAC": ("alfish/Pendulum-v1", SMALL_SAC, REPLAY, {}),
    "SAC, masks": (Rails, SMALL_SAC, REPLAY, MASKED),
    "many": ("alfish/CartPole-v1", ppo(), functools.partial(EpochBatches, 1, 8192), {"num_envs": 2048}),
}


# Those that "all" and "DQN, all" are made of are not run alone, apart from the shortest way through each source.
@pytest.mark.parametrize("case", ["memory", "all", "DQN, priorities", "DQN, 3 steps", "DQN, all", "SAC", "SAC, masks"])
def test_a_run_equals_a_run_with_the_sync_unroller_bit_for_bit(tmp_path, case):
    ours, reference = (run(tmp_path / kind.func.__name__, kind, case) for kind in (PLAIN, SYNC))
    assert_same_run(ours, reference)
    assert ours.learner.updates > 20


@pytest.mark.parametrize("case", ["all", "DQN, all", "SAC"])
def test_results_depend_on_the_seed_only(tmp_path, case):
    runs = [run(tmp_path / f"{k}", PLAIN, case, seed=seed) for k, seed in enumerate((3, 3, 4))]
    assert_same_run(*runs[:2])
    with pytest.raises(AssertionError):
        assert_same_run(*runs[1:])


@pytest.fixture
def threads():
    number = torch.get_num_threads()
    yield
    torch.set_num_threads(number)


def test_one_and_two_threads_give_the_same_rows(threads):
    """With so many environments, torch divides an operation between its threads."""
    found = []
    for number in (1, 2):
        torch.set_num_threads(number)
        unroller = unroller_of(PLAIN, ppo(functools.partial(Torso, mlp=functools.partial(MLP, layers=(64,)))), 2048)
        found.append([unroller.unroll(length) for length in (1, 6)])
    assert_equal(*found, 0.0)


@pytest.mark.parametrize(
    "compile",
    [
        False,
        pytest.param(
            True, marks=[pytest.mark.slow, pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")]
        ),
    ],
)
def test_two_threads_give_the_same_bits_each_time(tmp_path, threads, compile):
    kind = functools.partial(CompiledUnroller, compile=compile, chunk_length=2)
    runs = [run(tmp_path / f"{k}", kind, "many", num_iterations=1, num_threads=2) for k in range(2)]
    assert torch.get_num_threads() == 2
    assert_same_run(*runs)
