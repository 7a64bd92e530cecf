"""Runs of composed algorithms: parts change what an algorithm trains on, and neither replay nor metrics."""

import functools

import pytest
import torch
from resuming import assert_same, stop_after, tensors_of
from toys import Bandit

from alfish import nest
from alfish.algorithms.a2c import A2C
from alfish.algorithms.appo import APPO
from alfish.algorithms.composition import (
    CPCA,
    ICM,
    RND,
    Composed,
    DynamicsFeatures,
    Reconstruction,
    Representation,
    RewardPart,
)
from alfish.algorithms.dqn import DQN
from alfish.algorithms.ppo import PPO
from alfish.algorithms.sac import SAC
from alfish.algorithms.td3 import TD3
from alfish.environments import make_environment
from alfish.environments.toy import Corridor, TensorPointMass
from alfish.learner.batches import EpochBatches, ReplayBatches
from alfish.learner.learner import Learner
from alfish.networks import GRU, MLP, ActorCritic, CriticEnsemble, DeterministicActor, QNetwork, Torso
from alfish.parameters.schedules import Linear
from alfish.replay import RingView
from alfish.training.listener import Listener
from alfish.training.listeners import CheckpointSaver
from alfish.training.trainer import Trainer
from alfish.unrollers import AsyncUnroller, Workers

SMALL = functools.partial(MLP, layers=(8,))
TORSO = functools.partial(Torso, mlp=SMALL)
NETWORK = functools.partial(ActorCritic, actor_torso=TORSO, critic_torso=TORSO)
CRITIC = functools.partial(CriticEnsemble, layers=(8,))
ALGORITHMS = {
    "ppo": functools.partial(PPO, network=NETWORK),
    "a2c": functools.partial(A2C, network=NETWORK),
    "appo": functools.partial(APPO, network=NETWORK),
    "dqn": functools.partial(DQN, q_network=functools.partial(QNetwork, torso=TORSO)),
    "sac": functools.partial(SAC, actor_mlp=SMALL, critic=CRITIC),
    "td3": functools.partial(TD3, actor=functools.partial(DeterministicActor, mlp=SMALL), critic=CRITIC),
}
ON_POLICY = ("ppo", "a2c", "appo")
SMALL_RND = functools.partial(RND, layers=(8,), output_size=4)
SMALL_ICM = functools.partial(ICM, layers=(8,), num_features=4)
FEATURES = functools.partial(DynamicsFeatures, layers=(8,), num_features=4)


class Kept(Listener):
    """Keeps the rewards and actions that the unroller collected, and the summaries."""

    def __init__(self):
        self.scalars = {}

    def after_iteration(self, run, report):
        self.scalars |= report.scalars


class Distance(RewardPart):
    """The distance that a step covers: no parameter, no loss, no random number."""

    def reward(self, transitions):
        return (transitions.next_observation - transitions.observation).abs().sum(-1)


class Same(Representation):
    """The observation."""

    def __init__(self, observation_spec, action_spec):
        super().__init__(observation_spec, action_spec)
        self.output_size = observation_spec.shape[0]

    def forward(self, observation):
        return observation


def make(root_dir, name, algorithm, env=None, listeners=(), **options):
    env_id, env_kwargs = env or ((TensorPointMass, {"length": 6}) if name in ("sac", "td3") else (Bandit, {}))
    of_rows = functools.partial(EpochBatches, num_epochs=1 if name == "a2c" else 2)
    if name not in ON_POLICY:
        of_rows = functools.partial(
            ReplayBatches, capacity=200, batch_size=8, window_length=3, warmup_env_steps=20, updates_per_env_step=0.5
        )
    defaults = {
        "algorithm": algorithm,
        "environment": functools.partial(make_environment, env_id, num_envs=2, env_kwargs=env_kwargs),
        "batches": of_rows,
        "listeners": list(listeners),
        "unroll_length": 5,
        "num_iterations": 4,
        "summary_period": 10,
        "device": "cpu",
    }
    return Trainer(root_dir, **{**defaults, **options})


def composed(name, **arguments):
    return functools.partial(Composed, algorithm=ALGORITHMS[name], **arguments)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_without_parts_the_algorithm_is_unchanged(tmp_path, name):
    runs = []
    for k, algorithm in enumerate((ALGORITHMS[name], composed(name))):
        runs.append(make(tmp_path / str(k), name, algorithm))
        runs[-1].train()
    bare, same = runs
    assert bare.learner.updates == same.learner.updates > 0
    assert_same(bare.algorithm.state_dict(), same.algorithm.algorithm.state_dict())


@pytest.mark.parametrize("name", ALGORITHMS)
def test_it_trains_on_the_weighted_sum_of_rewards(tmp_path, name):
    """A part with the weight of a reward, and an environment that has this reward, are the same to the algorithm."""

    class Environments(RewardPart):
        def reward(self, transitions):
            return torch.ones_like(transitions.next_discount)

    class Shifted(ALGORITHMS[name].func):
        def preprocess_experience(self, experience):
            return super().preprocess_experience(self.shifted(experience) if self.on_policy else experience)

        def train_step(self, experience, state):
            return super().train_step(experience if self.on_policy else self.shifted(experience), state)

        def calc_loss(self, experience, info):
            return super().calc_loss(experience if self.on_policy else self.shifted(experience), info)

        def shifted(self, experience):
            step = experience.time_step
            return experience._replace(time_step=step._replace(reward=2.0 * step.reward + 0.5))

    part = functools.partial(Environments, coef=Linear(0.5, 0.5))
    shifted = functools.partial(Shifted, **ALGORITHMS[name].keywords)
    runs = []
    for algorithm in (composed(name, rewards=[part], extrinsic_coef=2.0), shifted):
        runs.append(make(tmp_path / str(len(runs)), name, algorithm))
        runs[-1].train()
    assert_same(runs[0].algorithm.algorithm.state_dict(), runs[1].algorithm.state_dict())


@pytest.mark.parametrize("name", ALGORITHMS)
def test_stored_rows_and_metrics_have_the_rewards_of_the_environment(tmp_path, name):
    """Parts do not change the policy here: nothing is trained before the last rows of the run."""
    kept, rows = [], []
    for parts in ([], [Distance, functools.partial(SMALL_RND, coef=100.0)]):
        listener = Kept()

        class Spying(EpochBatches if name in ON_POLICY else ReplayBatches):
            def add(self, experience):
                rows[-1].extend(torch.as_tensor(leaf) for leaf in nest.leaves(experience.time_step))
                super().add(experience)

        rows.append([])
        batches = functools.partial(Spying, **({} if name in ON_POLICY else {"batch_size": 8, "warmup_env_steps": 12}))
        run = make(tmp_path / str(len(parts)), name, composed(name, rewards=parts), batches=batches,
                   listeners=[listener], num_iterations=2)  # fmt: skip
        torch.manual_seed(1)  # to build a part takes random numbers too
        run.train()
        kept.append({key: value for key, value in listener.scalars.items() if key.startswith("metrics/")})
    count = len(rows[0]) // (2 if name in ON_POLICY else 1)  # on-policy, the second unroll has another policy
    assert count and all(torch.equal(a, b) for a, b in zip(rows[0][:count], rows[1][:count]))
    assert name in ON_POLICY or kept[0] == kept[1]


def assert_resumed_equals_whole(runs, stop):
    """Trains a run as a whole, and again with an interruption after `stop` iterations; returns the whole run's trainer.

    `runs` has a function for each of the two directories, which makes a trainer.
    """
    whole = runs[0]()
    whole.train()
    stop_after(runs[1](), stop)
    torch.manual_seed(99)
    resumed = runs[1]()
    resumed.train()
    assert_same(tensors_of(whole), tensors_of(resumed))
    return whole


@pytest.mark.parametrize("name", ["ppo", "dqn", "td3"])
def test_a_resumed_run_is_bit_identical(tmp_path, name):
    env = (TensorPointMass, {"length": 6}) if name != "dqn" else (Bandit, {"length": 4})
    unroll_length, stop = (5, 4) if name != "dqn" else (7, 2)
    runs = []
    for directory in ("whole", "cut"):
        algorithm = composed(name, rewards=[SMALL_RND, SMALL_ICM], representation=FEATURES)
        settings = {"env": env, "unroll_length": unroll_length, "num_iterations": stop + 2}
        saving = [CheckpointSaver(0)]
        runs.append(functools.partial(make, tmp_path / directory, name, algorithm, listeners=saving, **settings))
    assert_resumed_equals_whole(runs, stop)


REMEMBERING = functools.partial(Torso, mlp=SMALL, memory=functools.partial(GRU, size=4))
AUXILIARY = {
    "ppo": functools.partial(
        PPO, network=functools.partial(ActorCritic, actor_torso=REMEMBERING, critic_torso=REMEMBERING)
    ),
    "dqn": functools.partial(DQN, q_network=functools.partial(QNetwork, torso=REMEMBERING)),
}
LOSSES = [functools.partial(Reconstruction, decoder=SMALL), functools.partial(CPCA, horizon=2, classifier_size=8)]


def with_auxiliary_losses(root_dir, name, **options):
    algorithm = functools.partial(Composed, algorithm=AUXILIARY[name], auxiliary_losses=LOSSES)
    env = (TensorPointMass, {"length": 6}) if name == "ppo" else (Bandit, {"length": 4})
    return make(root_dir, name, algorithm, env, **options)


@pytest.mark.parametrize("name", AUXILIARY)
def test_a_resumed_run_with_auxiliary_losses_is_bit_identical(tmp_path, name):
    unroll_length, stop = (5, 2) if name == "ppo" else (7, 2)  # at an episode's end, because a bandit has no state
    runs = []
    for directory in ("whole", "cut"):
        settings = {"unroll_length": unroll_length, "num_iterations": 4, "listeners": [CheckpointSaver(0)]}
        runs.append(functools.partial(with_auxiliary_losses, tmp_path / directory, name, **settings))
    assert assert_resumed_equals_whole(runs, stop).learner.updates > 0


@pytest.mark.parametrize("name", AUXILIARY)
def test_compiled_and_plain_auxiliary_losses_are_equal(tmp_path, name, interpreted):
    runs = []
    for is_compiled in (False, True):
        learner = functools.partial(Learner, compile=is_compiled)
        runs.append(
            with_auxiliary_losses(tmp_path / str(is_compiled), name, learner=learner, unroll_length=3, num_iterations=6)
        )
        runs[-1].train()
    plain, compiled = runs
    assert compiled.learner.updates == plain.learner.updates > 0 and not compiled.learner.is_plain
    for one, other in zip(plain.algorithm.parameters(), compiled.algorithm.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dqn", "td3"])
def test_compiled_updates_gather_windows_from_the_ring_as_without_parts(tmp_path, name, interpreted):
    """Rewards of parts are computed in the graph, so rows are neither copied nor changed for them."""

    runs = []
    for is_compiled in (False, True):
        algorithm = composed(name, rewards=[SMALL_RND, SMALL_ICM], representation=FEATURES)
        learner = functools.partial(Learner, compile=is_compiled)
        runs.append(make(tmp_path / str(is_compiled), name, algorithm, learner=learner))
        runs[-1].train()
    plain, compiled = runs
    assert isinstance(compiled.learner._compiled._source, RingView), "a graph reads the ring"
    for one, other in zip(plain.algorithm.parameters(), compiled.algorithm.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-4)


RECURRENT = functools.partial(Torso, mlp=SMALL, memory=functools.partial(GRU, size=4))
WITH_MEMORY = {
    "ppo": functools.partial(PPO, network=functools.partial(ActorCritic, actor_torso=RECURRENT, critic_torso=TORSO)),
    "dqn": functools.partial(DQN, q_network=functools.partial(QNetwork, torso=RECURRENT)),
}


@pytest.mark.parametrize("name", WITH_MEMORY)
def test_without_reward_parts_memory_algorithms_are_unchanged(tmp_path, name):
    """Rows of burn-in and states of the memory reach it, also behind a representation that changes nothing."""
    options = {}
    if name == "dqn":
        options["batches"] = functools.partial(
            ReplayBatches, capacity=200, batch_size=8, window_length=3, warmup_env_steps=20, burn_in=1, state_period=5
        )
    runs = []
    for parts in (None, {}, {"representation": Same}):
        algorithm = WITH_MEMORY[name]
        if parts is not None:
            algorithm = functools.partial(Composed, algorithm=algorithm, **parts)
        runs.append(make(tmp_path / str(len(runs)), name, algorithm, (Bandit, {}), **options))
        runs[-1].train()
    assert runs[0].learner.updates > 0
    for run in runs[1:]:
        assert_same(runs[0].algorithm.state_dict(), run.algorithm.algorithm.state_dict())


@pytest.mark.parametrize("name", ["ppo", "a2c", "dqn"])
def test_a_run_with_a_value_for_each_part_continues_with_its_weights(tmp_path, name):
    part = functools.partial(SMALL_RND, coef=Linear(1.0), episodic=False)
    algorithm = composed(name, rewards=[part], separate_values=True)
    env, stop, options = (TensorPointMass, {"length": 6}), 1, {}
    if name == "dqn":  # at the end of all episodes there is no state of the environment
        env, stop, options = (Bandit, {"length": 4}), 2, {"unroll_length": 7}
    runs = [
        functools.partial(make, tmp_path / k, name, algorithm, env, [CheckpointSaver(0)], **options)
        for k in ("whole", "cut")
    ]
    whole = runs[0]()
    whole.train()
    stop_after(runs[1](), stop)
    torch.manual_seed(99)
    resumed = runs[1]()
    assert resumed.algorithm.algorithm.reward_weights.tolist() == [1.0, 1.0]
    resumed.train()
    assert_same(tensors_of(whole), tensors_of(resumed))
    assert 0 < float(resumed.algorithm.algorithm.reward_weights[1]) < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["appo", "dqn"])
def test_workers_act_with_the_weights_of_parts(tmp_path, name):
    """In lockstep the same seed gives the same bits, and a representation is published with the algorithm."""
    runs = []
    for k in range(2):
        unroller = functools.partial(
            AsyncUnroller, num_workers=2, mode="lockstep", workers=functools.partial(Workers, close_timeout=2.0)
        )
        algorithm = composed(name, rewards=[SMALL_RND, SMALL_ICM], representation=FEATURES)
        run = make(tmp_path / str(k), name, algorithm, (Bandit, {}), unroller=unroller, unroll_length=8,
                   num_iterations=6)  # fmt: skip
        run.train()
        runs.append(run)
    assert_same(*(run.algorithm.state_dict() for run in runs))
    assert runs[0].learner.updates > 0


CORRIDOR = {
    "environment": functools.partial(make_environment, Corridor, num_envs=8),
    "batches": functools.partial(EpochBatches, num_epochs=4, minibatch_size=128),
    "learner": functools.partial(Learner, learning_rate=3e-3),
    "unroll_length": 64,
    "num_env_steps": 25_000,
    "device": "cpu",
}


def corridor(tmp_path, rewards, seed):
    algorithm = functools.partial(
        Composed, algorithm=functools.partial(PPO, entropy_coef=0.01), rewards=rewards, extrinsic_coef=10.0
    )
    trainer = Trainer(tmp_path, algorithm=algorithm, listeners=[kept := Kept()], seed=seed, **CORRIDOR)
    trainer.train()
    return kept.scalars["metrics/average_return"]


@pytest.mark.parametrize(
    "seed", [pytest.param(0, marks=pytest.mark.slow), *(pytest.param(k, marks=pytest.mark.long) for k in (1, 2))]
)
def test_curiosity_finds_the_last_of_twenty_rooms(tmp_path, seed):
    assert corridor(tmp_path / "curious", [functools.partial(ICM, coef=0.1)], seed) > 0.9
    assert corridor(tmp_path / "indifferent", [], seed) == 0.0


@pytest.mark.slow
def test_an_algorithm_learns_from_features_that_only_models_of_the_environment_train(tmp_path):
    algorithm = functools.partial(Composed, algorithm=PPO, representation=DynamicsFeatures)
    rooms = functools.partial(make_environment, Corridor, num_envs=8, env_kwargs={"num_rooms": 5})
    settings = CORRIDOR | {"environment": rooms, "num_env_steps": 10_000}
    trainer = Trainer(tmp_path, algorithm=algorithm, listeners=[kept := Kept()], **settings)
    trainer.train()
    assert kept.scalars["metrics/average_return"] > 0.95
    assert kept.scalars["train/dynamicsfeatures/inverse_loss"] < 0.3  # log 4 at the start
