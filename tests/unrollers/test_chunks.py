"""The unroller of functional environments: the same rows as `SyncUnroller`, by plain Python and by graphs."""

import functools

import plain_graphs
import pytest
import torch

from alfish import nest
from alfish.algorithms.ppo import PPO
from alfish.algorithms.sac import SAC
from alfish.data import in_line
from alfish.environments import make_environment
from alfish.environments.functional import CartPole
from alfish.errors import UsageError
from alfish.learner.batches import EpochBatches, ReplayBatches, epochs
from alfish.learner.learner import Learner
from alfish.networks import GRU, MLP, ActorCritic, CriticEnsemble, Torso
from alfish.training.listeners import CheckpointSaver
from alfish.training.trainer import Trainer
from alfish.transforms import FrameStack, ObservationNormalizer, Transforms
from alfish.unrollers import CompiledUnroller, SyncUnroller

MLP_4 = functools.partial(MLP, layers=(4,))
STACK = functools.partial(FrameStack, num_frames=2)
WITH_MEMORY = functools.partial(
    ActorCritic, actor_torso=functools.partial(Torso, mlp=MLP_4, memory=functools.partial(GRU, size=4))
)


def unroller_of(kind, env_id="alfish/CartPole-v1", algorithm=PPO, factories=(), num_envs=3, **arguments):
    """An unroller that starts with the same random numbers whatever its kind."""
    torch.manual_seed(0)
    environment = make_environment(env_id, num_envs, seed=0)
    transforms = Transforms(factories, environment.observation_spec, environment.reward_spec)
    made = algorithm(transforms.observation_spec, environment.action_spec, environment.reward_spec)
    made.eval()
    return kind(environment, made, transforms, **arguments)


def assert_equal(found, expected, tolerance=0.0):
    assert nest.paths(found) == nest.paths(expected)
    for path, a, b in zip(nest.paths(found), nest.leaves(nest.tensors(found)), nest.leaves(nest.tensors(expected))):
        assert a.dtype == b.dtype and a.shape == b.shape, path
        assert torch.allclose(a.double(), b.double(), 0, tolerance, equal_nan=True), path


PLAIN = functools.partial(CompiledUnroller, compile=False)


@pytest.mark.parametrize(
    ("env_id", "algorithm", "factories"),
    [
        ("alfish/CartPole-v1", PPO, ()),
        ("alfish/Pendulum-v1", PPO, (ObservationNormalizer,)),
        ("alfish/Pendulum-v1", SAC, ()),
        (
            "alfish/Recall-v0",
            functools.partial(PPO, network=WITH_MEMORY),
            (functools.partial(FrameStack, num_frames=2),),
        ),
    ],
)
def test_rows_equal_those_of_the_sync_unroller(env_id, algorithm, factories):
    ours = unroller_of(PLAIN, env_id, algorithm, factories)
    reference = unroller_of(functools.partial(SyncUnroller, numpy_policy=None), env_id, algorithm, factories)
    for length in (5, 1, 210 if "Pendulum" in env_id else 40):  # in the last one, episodes end
        found = []
        for unroller in (ours, reference):
            torch.manual_seed(length)
            found.append(unroller.unroll(length))
        assert_equal(*found, tolerance=1e-5)
        assert_equal(ours.records._replace(infos=None), reference.records._replace(infos=None), tolerance=1e-5)
    assert in_line(found[0]).experience.time_step.step_type.max() > 1


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_graphs_make_the_same_rows():
    ours = unroller_of(CompiledUnroller, chunk_length=2, num_envs=16)
    reference = unroller_of(PLAIN, chunk_length=3, num_envs=16)
    for length in (2, 4, 40):
        found = []
        for unroller in (ours, reference):
            torch.manual_seed(length)
            found.append(unroller.unroll(length))
        assert_equal(*found, tolerance=1e-4)
    assert not ours._run.is_plain


def test_a_hook_that_cannot_be_traced_runs_as_plain_python(caplog):
    class Reading(PPO):
        def rollout_step(self, time_step, state):
            if time_step.observation.sum().item() > 1e9:
                raise AssertionError
            return super().rollout_step(time_step, state)

    ours = unroller_of(CompiledUnroller, algorithm=Reading)
    for _ in range(2):
        assert len(ours.unroll(4).time_step.step_type) == 5
    assert ours._run.is_plain
    assert "test_chunks.py" in caplog.text and ".item() > 1e9" in caplog.text


class Leveled(CartPole):
    """Its rewards are a level that a method changes."""

    level = 1.0

    def set_level(self, level):
        self.level = level

    def reward(self, state, action, next_state, rng, params=None):
        return torch.full_like(super().reward(state, action, next_state, rng), self.level)


def test_a_call_of_a_method_of_the_environment_changes_the_next_unroll(interpreted, caplog):
    unroller = unroller_of(CompiledUnroller, Leveled)
    for _ in range(11):  # the next comparison is some unrolls away
        unroller.unroll(4)
    unroller.environment.call("set_level", 5.0)
    rewards = unroller.unroll(4).ends.time_step.reward
    assert (rewards == 5).all() and "make this value a buffer" in caplog.text
    resumed = unroller_of(CompiledUnroller, Leveled)
    resumed.load_state_dict(unroller.state_dict())
    assert resumed._run.is_plain, "the graph of a resumed run is rejected, too"


def test_other_environments_are_refused_with_the_remedy():
    with pytest.raises(UsageError, match="steps functional environments, but CartPole-v1 is not functional"):
        unroller_of(CompiledUnroller, "CartPole-v1")


SMALL_SAC = functools.partial(
    SAC, actor_mlp=functools.partial(MLP, layers=(8,)), critic=functools.partial(CriticEnsemble, layers=(8,))
)


def trained(directory, num_iterations, algorithm):
    env_id, batches = {
        PPO: ("alfish/CartPole-v1", functools.partial(EpochBatches, num_epochs=1, minibatch_size=64)),
        SMALL_SAC: ("alfish/Pendulum-v1", functools.partial(ReplayBatches, 1000, 16, warmup_env_steps=256)),
    }[algorithm]
    trainer = Trainer(
        directory,
        algorithm=algorithm,
        environment=functools.partial(make_environment, env_id, num_envs=16),
        batches=batches,
        unroller=PLAIN,
        learner=functools.partial(Learner, compile=False),
        listeners=[CheckpointSaver()],
        unroll_length=8 if algorithm is PPO else 1,
        num_iterations=num_iterations,
    )
    trainer.train()
    return {name: leaf for name, leaf in trainer.algorithm.state_dict().items() if isinstance(leaf, torch.Tensor)}


@pytest.mark.parametrize("algorithm", [PPO, SMALL_SAC], ids=["PPO", "SAC"])
def test_a_resumed_run_is_bit_identical(tmp_path, algorithm):
    whole = trained(tmp_path / "whole", 20, algorithm)
    trained(tmp_path / "parts", 18, algorithm)
    assert_equal(trained(tmp_path / "parts", 20, algorithm), whole)


def test_every_row_trains_once_in_an_epoch(tmp_path):
    rows = []

    class Seen(PPO):
        def calc_loss(self, experience, info):
            rows.append(experience.time_step.observation.reshape(-1, 4))
            return super().calc_loss(experience, info)

    trainer = Trainer(
        tmp_path,
        algorithm=Seen,
        environment=functools.partial(make_environment, "alfish/CartPole-v1", num_envs=16),
        batches=functools.partial(EpochBatches, num_epochs=1, minibatch_size=32),
        unroller=PLAIN,
        learner=functools.partial(Learner, compile=False),
        listeners=[],
        unroll_length=40,
        num_iterations=1,
    )
    trainer.train()
    assert sum(map(len, rows)) == 16 * 40 and len(torch.cat(rows).unique(dim=0)) == 16 * 40


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_graphs_prepare_unrolls_like_plain_python(interpreted):
    unroller = unroller_of(PLAIN, num_envs=4)
    found = [EpochBatches(1, 32) for _ in range(2)]
    for source in found:
        source.bind(unroller._algorithm, unroller._transforms, 32, 4)
    for _ in range(2):
        experience = unroller.unroll(32)
        rows = []
        for for_graph, source in zip((False, True), found):
            source.add(experience)
            (chunk,) = source.chunks(0, for_graph)
            rows.append(chunk.source)
        assert rows[0].mask.all() and rows[0].mask.shape == (1, 128)
        assert_equal(rows[1], rows[0], tolerance=1e-4)
    assert found[1]._short_graph._graphs and not found[1]._short_graph.is_plain


@pytest.mark.parametrize("too_many", [0, 1])
def test_unrolls_in_which_episodes_end_rarely_are_prepared_with_fewer_rows(too_many, monkeypatch):
    """At the largest number of ends of a column for which the smaller graph suffices, and one more than it."""
    unroller = unroller_of(PLAIN, num_envs=4)
    experience = unroller.unroll(64)
    most = int(experience.ends.ended.sum(0).max())
    assert most > 1
    monkeypatch.setattr(epochs, "_few_ends", lambda length: most - too_many)
    rows = []
    with plain_graphs.interpreted():
        for for_graph in (False, True):
            source = EpochBatches(1, 64)
            source.bind(unroller._algorithm, unroller._transforms, 64, 4)
            source.add(experience)
            rows.append(next(iter(source.chunks(0, for_graph))).source)
    assert rows[1].mask.all()
    assert_equal(rows[1], rows[0], tolerance=1e-4)
    used, unused = (source._graph, source._short_graph) if too_many else (source._short_graph, source._graph)
    assert used._graphs and not used.is_plain and not unused._graphs
