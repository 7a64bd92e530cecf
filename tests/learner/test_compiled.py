"""Compiled updates: what the plain learner does, to float error and with the same random numbers, or the plain learner.

To compile a graph takes seconds. Where the fixture `interpreted` is used, a graph is traced and run operation by
operation, which takes milliseconds. PPO, SAC, and DQN with and without a memory are compiled in `slow` tests, the
others in `long` ones.
"""

import copy
import functools
import gc
import importlib
import logging
import math
import shutil
import weakref

import pytest
import torch
from far_device import FarDevice
from gymnasium import spaces
from hidden_names import hide
from torch import nn

from alfish import nest, specs
from alfish.algorithms.a2c import A2C
from alfish.algorithms.acting import reset_state
from alfish.algorithms.appo import APPO
from alfish.algorithms.composition import ICM, RND, Composed, DynamicsFeatures
from alfish.algorithms.cql import CQL
from alfish.algorithms.crossq import XQC, CrossQ
from alfish.algorithms.ddpg import DDPG
from alfish.algorithms.dqn import DQN
from alfish.algorithms.munchausen import MunchausenDQN
from alfish.algorithms.ppo import PPO
from alfish.algorithms.pqn import PQN
from alfish.algorithms.recurrent_sac import RecurrentSAC
from alfish.algorithms.recurrent_td3 import RecurrentTD3
from alfish.algorithms.redq import REDQ, TQC
from alfish.algorithms.reppo import REPPO
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.algorithms.sac import SAC
from alfish.algorithms.td3 import TD3
from alfish.compiler import cuda_graphs, inductor, matmul
from alfish.compiler.inductor import CompiledFunction, NotCompilable, is_checked
from alfish.compiler.torch_internals import HOMES
from alfish.data import AlgStep, Batch, Experience, LossInfo, StepType, TimeStep, trainable
from alfish.environments import make_environment
from alfish.errors import RunError, UsageError
from alfish.functional.return_distributions import Bins, Quantiles
from alfish.learner.batches import EpochBatches, Minibatches, ReplayBatches, take
from alfish.learner.compiled_updates import CALLS_BEFORE_RECORDING
from alfish.learner.kl_adaptive import KLAdaptive
from alfish.learner.learner import Learner
from alfish.learner.optimizers import Adam, RMSprop, TorchOptimizer
from alfish.networks import (
    GRU,
    LSTM,
    MLP,
    ActorCritic,
    AttentionWindow,
    CriticEnsemble,
    MinGRU,
    PredictiveCritic,
    QNetwork,
    StackedMemory,
    Torso,
)
from alfish.networks.layers import UnitLinear
from alfish.parameters.schedules import Linear, Steps
from alfish.replay import AlignedRingBuffer, Prioritized, ReplayView, RingBuffer, Uniform
from alfish.training.trainer import Trainer
from alfish.transforms import ObservationNormalizer, Transforms

pytestmark = [
    # Torch's compiler, at import.
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch's compiler needs g++, which is not installed"),
]
slow, long = pytest.mark.slow, pytest.mark.long
SMALL = functools.partial(MLP, layers=(8,))
NORMALISED = functools.partial(SMALL, norm="rms", activation="silu")
TORSO = functools.partial(Torso, mlp=SMALL)
NETWORK = functools.partial(ActorCritic, actor_torso=TORSO, critic_torso=TORSO)
CRITIC = functools.partial(CriticEnsemble, layers=(8,))
VECTOR = spaces.Box(-1, 1, (4,))
BOX, DISCRETE = spaces.Box(-2, 3, (2,)), spaces.Discrete(3, start=1)
BOTH = spaces.Dict(choice=DISCRETE, parts=spaces.Tuple([BOX, BOX]))
ADAM = functools.partial(Adam, eps=1e-4)  # what is close to 0 / 0 would tell more of float error than of the code
ON_POLICY = {
    "ppo": (functools.partial(PPO, network=NETWORK, value_clip_range=0.2, clip_range=Linear(0.3, 0.1),
                              entropy_coef=Steps([0.1, 0.0], [0.5])), BOTH),
    "a2c": (functools.partial(A2C, network=NETWORK), DISCRETE),
    "appo": (functools.partial(APPO, network=NETWORK, clip_range=Linear(0.3, 0.1), entropy_coef=Linear(0.1)), BOTH),
    "exploring": (functools.partial(APPO, network=NETWORK, uniform_kl_coef=Linear(0.3), reciprocal_clip=True),
                  DISCRETE),
    "impala": (functools.partial(APPO, network=NETWORK, loss="impala"), BOX),
    "pqn": (functools.partial(PQN, q_network=functools.partial(QNetwork, torso=TORSO)), DISCRETE),
    "reppo": (functools.partial(REPPO, actor_mlp=NORMALISED, critic=functools.partial(PredictiveCritic, mlp=NORMALISED),
                                target_kl=1e-3), BOX),
}  # fmt: skip
_SAC = functools.partial(REDQ, actor_mlp=SMALL, critic=functools.partial(CRITIC, dropout=0.1, ensemble_size=3))
OFF_POLICY = {
    "dqn": (functools.partial(DQN, q_network=functools.partial(QNetwork, torso=TORSO), target_period=7), DISCRETE),
    "sac box": (_SAC, BOX),
    "sac discrete": (functools.partial(SAC, actor_mlp=SMALL, critic=CRITIC), DISCRETE),
    "sac both": (_SAC, BOTH),
    "sac, fixed alpha": (functools.partial(SAC, actor_mlp=SMALL, critic=CRITIC, learn_alpha=False), BOX),
    "ddpg": (functools.partial(DDPG, critic=functools.partial(CRITIC, ensemble_size=1)), BOX),
    "td3": (functools.partial(TD3, critic=CRITIC, actor_period=3), BOX),
    "c51": (functools.partial(DQN, q_network=functools.partial(QNetwork, torso=TORSO, dueling=True),
                              target_period=7, values=functools.partial(Bins, num_bins=11)), DISCRETE),
    "qr-dqn": (functools.partial(DQN, q_network=functools.partial(QNetwork, torso=TORSO), target_period=7,
                                 values=functools.partial(Quantiles, num_quantiles=5)), DISCRETE),
    "munchausen": (functools.partial(MunchausenDQN, q_network=functools.partial(QNetwork, torso=TORSO),
                                     entropy_temperature=0.1, target_period=7), DISCRETE),
    "tqc": (functools.partial(TQC, actor_mlp=SMALL, critic=CRITIC,
                              values=functools.partial(Quantiles, num_quantiles=5, num_dropped=2)), BOX),
    "sac, bins": (functools.partial(SAC, actor_mlp=SMALL, critic=CRITIC,
                                    values=functools.partial(Bins, num_bins=11)), BOX),
    "crossq": (functools.partial(CrossQ, actor_mlp=functools.partial(SMALL, norm="batch"),
                                 critic=functools.partial(CRITIC, norm="batch", norm_after=True), actor_period=2,
                                 target_rate=None), BOX),
    "xqc": (functools.partial(XQC, actor_mlp=functools.partial(SMALL, norm="batch", unit_rows=True),
                              critic=functools.partial(CRITIC, norm="batch", unit_rows=True, bias=False),
                              values=functools.partial(Bins, num_bins=11), actor_period=2), BOX),
    "cql box": (functools.partial(CQL, actor_mlp=SMALL, critic=CRITIC, num_samples=3), BOX),
    "cql discrete": (functools.partial(CQL, actor_mlp=SMALL, critic=CRITIC), DISCRETE),
}  # fmt: skip


class SilentTD3(TD3):
    """Does not say when its actor trains."""

    def graph_key(self):
        return None


WIDE = functools.partial(Torso, mlp=functools.partial(MLP, layers=(128, 128), activation="relu"))
NORMED = functools.partial(CRITIC, norm="layer")
SMALL_RND = functools.partial(RND, layers=(8,), output_size=4, coef=Linear(1.0))
PARTS = {
    "rewards": [SMALL_RND, functools.partial(ICM, layers=(8,), num_features=4)],
    "representation": functools.partial(DynamicsFeatures, layers=(8,), num_features=4),
}
SPECIAL = {
    "stopping ppo": (functools.partial(PPO, network=NETWORK, target_kl=0.01), DISCRETE),
    "measured ppo": (functools.partial(PPO, network=NETWORK, target_kl=1e6), BOTH),
    "layer norm": (functools.partial(REDQ, actor_mlp=functools.partial(SMALL, norm="layer"), critic=NORMED,
                                     target_period=3, target_subset=None), BOTH),
    "silent td3": (functools.partial(SilentTD3, critic=CRITIC, actor_period=3), BOX),
    "wide dqn": (functools.partial(DQN, q_network=functools.partial(QNetwork, torso=WIDE)), DISCRETE),
}  # fmt: skip
RECURRENT = functools.partial(Torso, mlp=SMALL, memory=functools.partial(GRU, size=6))
SCANNED = functools.partial(Torso, mlp=SMALL, memory=functools.partial(MinGRU, size=6))
WINDOW = functools.partial(Torso, mlp=SMALL, memory=functools.partial(AttentionWindow, size=6, length=4, num_heads=2))
LONG_SHORT = functools.partial(Torso, mlp=SMALL, memory=functools.partial(LSTM, size=6))
MEMORY = {
    "ppo, shared memory": (functools.partial(PPO, network=functools.partial(ActorCritic, actor_torso=LONG_SHORT,
                                                                            shared_torso=True)), DISCRETE),
    "ppo, two memories": (functools.partial(PPO, network=functools.partial(ActorCritic, actor_torso=RECURRENT,
                                                                           critic_torso=LONG_SHORT)), DISCRETE),
    "dqn with memory": (functools.partial(DQN, q_network=functools.partial(QNetwork, torso=RECURRENT), target_period=7),
                        DISCRETE),
    "ppo with a window": (functools.partial(PPO, network=functools.partial(ActorCritic, actor_torso=WINDOW,
                                                                           critic_torso=SCANNED)), DISCRETE),
    "dqn with a MinGRU": (functools.partial(DQN, q_network=functools.partial(QNetwork, torso=SCANNED), target_period=7),
                          DISCRETE),
    "dqn with a window": (functools.partial(DQN, q_network=functools.partial(QNetwork, torso=WINDOW), target_period=7),
                          DISCRETE),
    "sac with two layers": (functools.partial(RecurrentSAC, actor_mlp=SMALL, critic=CRITIC, memory=functools.partial(
        StackedMemory, layers=[functools.partial(kind, size=6) for kind in (GRU, MinGRU)])), BOX),
    "sac with memory": (functools.partial(RecurrentSAC, actor_mlp=SMALL, critic=CRITIC,
                                          memory=functools.partial(LSTM, size=6)), BOTH),
    "td3 with memory": (functools.partial(RecurrentTD3, critic=CRITIC, memory=functools.partial(GRU, size=6),
                                          actor_period=1), BOX),
}  # fmt: skip
COMPOSED = {
    "composed ppo": (functools.partial(Composed, algorithm=functools.partial(PPO, network=NETWORK), **PARTS), BOTH),
    "two values": (functools.partial(Composed, algorithm=functools.partial(PPO, network=NETWORK), separate_values=True,
                                     rewards=[functools.partial(SMALL_RND, episodic=False)]), DISCRETE),
    "composed sac": (functools.partial(Composed, algorithm=_SAC, **PARTS), BOX),
    "composed td3": (functools.partial(Composed, algorithm=functools.partial(TD3, critic=CRITIC, actor_period=3),
                                       **PARTS), BOX),
}  # fmt: skip
ALGORITHMS = ON_POLICY | OFF_POLICY | SPECIAL | MEMORY | COMPOSED


def make(name, seed=0):
    torch.manual_seed(seed)
    factory, action = ALGORITHMS[name]
    return factory(specs.observation_spec(VECTOR), specs.action_spec(action), specs.reward_spec())


def rows(algorithm, length, size, seed):
    """`[T, N]` of random rows; some episodes end among them."""
    torch.manual_seed(seed)
    kind = torch.full((length, size), StepType.MID, dtype=torch.int32)
    kind[-1, ::3] = StepType.LAST
    discount = 1.0 - (kind == StepType.LAST) * (torch.rand(length, size) < 0.5).float()
    zeros = specs.zeros(algorithm.action_spec, (length, size))
    env_id = torch.arange(size, dtype=torch.int32).expand(length, size)
    return TimeStep(kind, torch.randn(length, size), discount, torch.randn(length, size, 4), zeros, env_id)


def chunks_of(name, num_updates, size=12, seed=0, weighted=False):
    """One chunk of so many minibatches, which does not depend on how training goes."""
    algorithm = make(name)
    if algorithm.replay_needs.recurrent_state:
        return [windows_of(algorithm, num_updates, size, seed)]
    if not algorithm.on_policy:
        steps = rows(algorithm, 3, num_updates * size, seed)
        action = [specs.sample(algorithm.action_spec, num_updates * size) for _ in range(3)]
        mask = torch.rand(2, num_updates * size) < 0.8
        columns = torch.arange(num_updates * size)
        weight = torch.rand(len(columns)) if weighted else None
        experience = Experience(steps, nest.stack(action), None, None, torch.zeros_like(columns))
        return [Minibatches(Batch(experience, mask, columns, columns, weight), columns.view(num_updates, size))]
    steps, initial = rows(algorithm, 5, size, seed), algorithm.initial_state(size)
    with torch.no_grad():
        state, acted = initial, []
        for t in range(5):
            row = nest.at(steps, t)
            acted.append(algorithm.rollout_step(row, reset_state(state, initial, row.step_type)))
            state = acted[-1].state
    action, info = nest.stack([(step.output, step.info) for step in acted])
    num_epochs = num_updates // 4
    source = EpochBatches(1 if algorithm.unroll_use.single_epoch else num_epochs, size)
    source.bind(algorithm, Transforms([], algorithm.observation_spec, algorithm.reward_spec), 4, size)
    source.add(Experience(steps, action, info, initial))
    return [chunk for _ in range(num_epochs if algorithm.unroll_use.single_epoch else 1) for chunk in source.chunks(0)]


def windows_of(algorithm, num_updates, size, seed):
    """Windows of 5 rows after 2 that warm up, in which episodes end and begin."""
    count = num_updates * size
    steps = rows(algorithm, 7, count, seed)
    steps.step_type[3, ::2], steps.step_type[4, ::2] = StepType.LAST, StepType.FIRST
    steps.step_type[1, ::3] = StepType.FIRST
    action = nest.stack([specs.sample(algorithm.action_spec, count) for _ in range(5)])
    state = nest.map(
        lambda leaf: torch.randn_like(leaf) if leaf.is_floating_point() else torch.randint_like(leaf, 4),
        algorithm.initial_state(count),
    )
    burn_in, steps = nest.split(steps, 2)
    batch = Batch(Experience(steps, action, None, state, burn_in=burn_in), trainable(steps.step_type))
    return Minibatches(batch, torch.arange(count).view(num_updates, size), is_steady=False)


def train(algorithm, learner, iterations):
    """A summary of each iteration (a list of chunks); progress goes from 0 to 1."""
    summaries = []
    for k, chunks in enumerate(iterations):
        algorithm.progress.fill_(k / max(1, len(iterations) - 1))
        summaries.append(learner.train(chunks))
    return summaries


def both(name, iterations, **settings):
    """Algorithm, learner, summaries and the generator's state: plain, then compiled."""
    runs = []
    for is_compiled in (False, True):
        algorithm = make(name)
        learner = Learner(algorithm, compile=is_compiled, **settings)
        torch.manual_seed(7)
        summaries = train(algorithm, learner, iterations)
        runs.append((algorithm, learner, summaries, torch.get_rng_state()))
    assert runs[1][1]._compiled is not None, "it fell back"
    return runs


def assert_close(found, expected, tolerance=1e-4):
    assert nest.paths(found) == nest.paths(expected)
    for path, a, b in zip(nest.paths(found), nest.leaves(found), nest.leaves(expected)):
        a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (a, b))
        assert torch.allclose(a, b, rtol=10 * tolerance, atol=tolerance, equal_nan=True), f"{path}: {a} and {b}"


def state_of(part):
    """An algorithm's or a learner's: its numbers, without the losses of a summary that is not due yet."""
    others = "fell_back", "frozen_parts", "means"
    return {name: value for name, value in part.state_dict().items() if name not in others}


def assert_alike(plain, made, tolerance=1e-4):
    """All that a run is: parameters, targets, optimizers, counters, summaries, and what comes next of the generator."""
    for one, other in zip(plain[:2], made[:2]):
        assert_close(state_of(other), state_of(one), tolerance)
    assert_close(made[2], plain[2], 10 * tolerance)
    assert torch.equal(made[3], plain[3]), "other random numbers"


def unmoved(name, algorithm):
    """The parameters that are those that training began with."""
    before = dict(make(name).named_parameters())
    return {key for key, value in algorithm.named_parameters() if torch.equal(value, before[key])}


def warnings_in(caplog):
    return [record for record in caplog.records if record.name == "absl" and record.levelno >= logging.WARNING]


# What is compiled does what the plain learner does.


WAYS = [
    pytest.param(True, marks=slow, id="compiled"),
    pytest.param(False, id="interpreted"),
]


@pytest.fixture(params=WAYS)
def really(request):
    """Whether graphs are compiled."""
    if not request.param:
        request.getfixturevalue("interpreted")


def test_compiled_sac_equals_plain_sac(really, caplog):
    """Three groups, random numbers, importance weights, clipping, schedules, a batch that is not finite."""
    iterations = [chunks_of("sac box", 4, seed=k, weighted=True) for k in range(5)]
    iterations[2][0].source.experience.time_step.reward[:, 30] = math.nan  # in the third update of the third iteration
    iterations[2][0].source.mask[:, 30] = True
    rates = {"critic": Linear(1e-2, 1e-3), "actor": 3e-3, "alpha": Steps([0.0, 1e-2], [0.5])}
    plain, made = both("sac box", iterations, learning_rate=rates, max_grad_norm=0.5, optimizer=ADAM)
    assert_alike(plain, made)
    assert made[1].updates == 20 and made[2][-1]["nonfinite_updates"] == 1
    assert made[1].state_dict()["optimizers"]["critic"]["num_steps"] == 19
    assert {"loss/actor", "grad_norm/critic", "learning_rate/alpha", "entropy_box", "q"} <= set(made[2][0])
    assert warnings_in(caplog) == []


def test_ppo_stops_as_it_did(really):
    """The update that exceeds the KL is skipped and ends its iteration; it counts for nothing."""
    iterations = [chunks_of("stopping ppo", 8, seed=k) for k in range(4)]
    plain, made = both("stopping ppo", iterations, learning_rate=0.01, optimizer=ADAM)
    assert_alike(plain, made)
    assert 4 < made[1].updates < 32
    assert made[1].state_dict()["optimizers"]["all"]["num_steps"] == made[1].updates


LED = {"optimizer": ADAM, "learning_rate": KLAdaptive(1e-3, target=0.02), "max_grad_norm": 0.5}


@pytest.mark.parametrize("is_interpreted", [pytest.param(True, marks=slow), pytest.param(False, marks=long)])
def test_compiled_updates_follow_the_kl(is_interpreted, request):
    if is_interpreted:
        request.getfixturevalue("interpreted")
    iterations = [chunks_of("measured ppo", 12, seed=k) for k in range(3)]
    plain, made = both("measured ppo", iterations, **LED)
    assert_alike(plain, made)
    assert made[2][-1]["learning_rate"] != pytest.approx(1e-3)


SETTINGS = {
    "adam": {"optimizer": ADAM, "learning_rate": 3e-3},
    "adam with decay, clipped": {
        "optimizer": functools.partial(ADAM, weight_decay=0.1), "learning_rate": Linear(1e-2), "max_grad_norm": 0.1,
    },
    "rmsprop, clipped": {
        "optimizer": functools.partial(RMSprop, eps=1e-2), "learning_rate": Linear(1e-3, 1e-2), "max_grad_norm": 0.5,
    },
}  # fmt: skip


def check_updates(name, settings, num_iterations, caplog):
    count = 12 if name in ON_POLICY else 13
    iterations = [chunks_of(name, count, seed=k, weighted=True) for k in range(num_iterations)]
    plain, made = both(name, iterations, **settings)
    assert_alike(plain, made)
    assert made[1].updates == num_iterations * count
    assert all(key.startswith("temperatures") and "fixed" in name for key in unmoved(name, made[0]))
    assert len(made[1]._compiled._made) == (2 if name in ("td3", "crossq", "xqc") else 1)
    assert warnings_in(caplog) == []


FAST = ("a2c", "dqn", "sac discrete", "crossq")  # others in fast tests are PPO, SAC and TD3, recorded


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else slow) for name in [*ON_POLICY, *OFF_POLICY]]
)
def test_updates_equal_the_plain_learner(name, interpreted, caplog):
    """Each algorithm with one of the settings."""
    settings = [*SETTINGS.values()][[*ON_POLICY, *OFF_POLICY].index(name) % len(SETTINGS)]
    check_updates(name, settings, 1, caplog)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("name", [pytest.param(name, marks=long) for name in [*ON_POLICY, *OFF_POLICY]])
def test_fifty_compiled_updates_equal_the_plain_learner(name, settings, caplog):
    check_updates(name, settings, 4, caplog)


@slow
def test_compiled_dqn_updates_equal_the_plain_learner(caplog):
    check_updates("dqn", SETTINGS["rmsprop, clipped"], 4, caplog)


@pytest.mark.parametrize(("name", "is_interpreted"), [("sac both", True), pytest.param("sac both", False, marks=long)])
def test_updates_whose_kernels_are_called_from_python_equal_the_plain_learner(
    name, is_interpreted, request, monkeypatch, caplog
):
    """As on a GPU, where random numbers are drawn before the graph runs."""
    monkeypatch.setattr(inductor, "WRAPPER_FROM_TORCH", "99")
    if is_interpreted:
        request.getfixturevalue("interpreted")
    check_updates(name, SETTINGS["rmsprop, clipped"], 1, caplog)


@pytest.mark.parametrize(
    ("name", "is_interpreted"),
    [
        *(pytest.param(name, True, marks=() if name == "dqn with memory" else slow) for name in MEMORY),
        *(pytest.param(name, False, marks=long) for name in MEMORY),
    ],
)
def test_updates_with_memory_equal_the_plain_learner(name, is_interpreted, request, caplog):
    """In a graph the rows go one by one; else in pieces where that is faster."""
    if is_interpreted:
        request.getfixturevalue("interpreted")
    iterations = [chunks_of(name, 4 if is_interpreted else 12, seed=k) for k in range(2 if is_interpreted else 3)]
    plain, made = both(name, iterations, optimizer=ADAM, learning_rate=3e-3)
    assert_alike(plain, made)
    assert len(made[1]._compiled._made) == 1 and unmoved(name, made[0]) == set()
    assert warnings_in(caplog) == []


def test_a_memory_over_many_rows_runs_uncompiled(caplog):
    algorithm = make("dqn with memory")
    steps = rows(algorithm, 40, 4, 0)
    action = nest.stack([specs.sample(algorithm.action_spec, 4) for _ in range(40)])
    batch = Batch(Experience(steps, action, None, algorithm.initial_state(4)), trainable(steps.step_type))
    learner = Learner(algorithm, compile=True)
    learner.train([Minibatches(batch, None)])
    assert learner.is_plain and learner.updates == 1
    (record,) = warnings_in(caplog)
    assert "compiling a memory over 40 rows takes minutes" in record.message


@pytest.mark.parametrize(
    ("name", "is_interpreted"),
    [
        *((name, True) for name in ("dqn with a MinGRU", "dqn with a window")),
        pytest.param("dqn with a window", False, marks=slow),
        pytest.param("dqn with a MinGRU", False, marks=long),
    ],
)
def test_parallel_memories_run_as_one_graph_over_many_rows(name, is_interpreted, request, caplog):
    if is_interpreted:
        request.getfixturevalue("interpreted")
    algorithm = make(name)
    steps = rows(algorithm, 40, 4, 0)
    action = nest.stack([specs.sample(algorithm.action_spec, 4) for _ in range(40)])
    batch = Batch(Experience(steps, action, None, algorithm.initial_state(4)), trainable(steps.step_type))
    learner = Learner(algorithm, compile=True)
    learner.train([Minibatches(batch, None)])
    assert not learner.is_plain and warnings_in(caplog) == []


@pytest.mark.parametrize(
    ("name", "is_interpreted"),
    [
        *(pytest.param(name, True, marks=() if name == "two values" else slow) for name in COMPOSED),
        *(pytest.param(name, False, marks=long) for name in COMPOSED),
    ],
)
def test_updates_with_parts_equal_the_plain_learner(name, is_interpreted, request, caplog):
    if is_interpreted:
        request.getfixturevalue("interpreted")
    iterations = [chunks_of(name, 4, seed=k) for k in range(3)]
    plain, made = both(name, iterations, optimizer=ADAM, learning_rate=3e-3)
    assert_alike(plain, made)
    assert all(key.startswith("rewards.rnd.target") or key.endswith("log_std") for key in unmoved(name, made[0]))
    assert {"rnd/error", "rnd/reward"} <= made[2][-1].keys()
    assert warnings_in(caplog) == []


def test_batches_of_another_shape_compile_another_graph(interpreted):
    sizes = (6, 5, 6, 5, 7)
    iterations = [chunks_of("dqn", 2, size, seed=k, weighted=k == 4) for k, size in enumerate(sizes)]
    plain, made = both("dqn", iterations, optimizer=ADAM, learning_rate=1e-2)
    assert_alike(plain, made)
    assert len(made[1]._compiled._made) == 3


def test_layer_norm_and_targets_that_wait_are_compiled(interpreted):
    plain, made = both("layer norm", [chunks_of("layer norm", 7)], optimizer=ADAM, learning_rate=1e-2)
    assert_alike(plain, made)


@pytest.mark.parametrize("name", [pytest.param("sac both", marks=slow), "td3"])
def test_a_resumed_learner_continues_with_equal_bits(name, interpreted):
    iterations = [chunks_of(name, 2, seed=k) for k in range(5)]
    settings = {"optimizer": ADAM, "learning_rate": 1e-2, "compile": True}

    def start():
        algorithm = make(name)
        return algorithm, Learner(algorithm, **settings)

    algorithm, learner = start()
    torch.manual_seed(3)
    for chunks in iterations[:3]:
        learner.train(chunks)
    saved = copy.deepcopy((algorithm.state_dict(), learner.state_dict(), torch.get_rng_state()))
    for chunks in iterations[3:]:
        learner.train(chunks)
    again, resumed = start()
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    torch.set_rng_state(saved[2])
    for chunks in iterations[3:]:
        resumed.train(chunks)
    one, other = ((a.state_dict(), b.state_dict()) for a, b in ((algorithm, learner), (again, resumed)))
    for path, a, b in zip(nest.paths(one), nest.leaves(one), nest.leaves(other)):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, path
    # A plain learner takes the same state.
    again = make(name)
    plain = Learner(again, optimizer=ADAM, learning_rate=1e-2)
    again.load_state_dict(saved[0])
    plain.load_state_dict(saved[1])
    torch.set_rng_state(saved[2])
    for chunks in iterations[3:]:
        plain.train(chunks)
    assert_close((other[0], state_of(resumed)), (again.state_dict(), state_of(plain)))


# Algorithms made for the purpose.


class Regression(RLAlgorithm):
    """Two weights, a loss that `hook(self, loss, experience)` may change; after_update counts."""

    on_policy = True

    def __init__(self, hook=lambda self, loss, experience: loss, kind=lambda self: None):
        super().__init__({}, {}, specs.reward_spec())
        torch.manual_seed(0)
        self.linear = nn.Linear(1, 1)
        self.register_buffer("offset", torch.zeros(()))
        self.held = torch.tensor([2.0, 3.0])  # no buffer
        self.count, self._hook, self._kind = 0, hook, kind

    def rollout_step(self, time_step, state):
        return AlgStep()

    def train_step(self, experience, state):
        prediction = self.linear(experience.time_step.observation[..., None]).squeeze(-1)
        return AlgStep(info=(prediction - experience.time_step.reward - self.offset).square())

    def calc_loss(self, experience, info):
        loss = self._hook(self, info, experience)
        return loss if isinstance(loss, LossInfo) else LossInfo(loss)

    def after_update(self):
        self.count += 1
        self.offset += 0.125

    def graph_key(self):
        return self._kind(self)


def regression_chunk(seed=0, size=4, poison=None):
    torch.manual_seed(seed)
    reward, observation = torch.randn(1, size), torch.randn(1, size)
    if poison is not None:
        reward[0, 0] = poison
    step = TimeStep(torch.ones(1, size, dtype=torch.int32), reward, torch.ones(1, size), observation, None, None)
    return Minibatches(Batch(Experience(step, None, None, None), torch.ones(1, size, dtype=torch.bool)), None)


def regress(hook=None, kind=lambda self: None, num_updates=12, poison=(), seed=5, **settings):
    """As `both`, for a Regression."""
    runs = []
    for is_compiled in (False, True):
        algorithm = Regression(hook or (lambda self, loss, experience: loss), kind)
        learner = Learner(algorithm, **{"learning_rate": 0.05, "compile": is_compiled} | settings)
        chunks = [regression_chunk(k, poison=math.nan if k in poison else None) for k in range(num_updates)]
        torch.manual_seed(seed)
        summaries = [learner.train([chunk]) for chunk in chunks]
        runs.append((algorithm, learner, summaries, torch.get_rng_state()))
    return runs


def _number(self, loss, experience):
    return loss if loss.mean() > 0 else -loss


def _item(self, loss, experience):
    return loss * (1 + 0 * loss.mean().item())


def _through_numpy(self, loss, experience):
    return loss + torch.from_numpy(experience.time_step.reward.numpy())


def _attribute(self, loss, experience):
    return loss * self.held[0]


def _picked(self, loss, experience):
    return loss + 0 * loss[loss.detach() > 0.5].sum()


def _printing(self, loss, experience):
    print("loss", float(loss.detach().mean()))
    return loss


UNCOMPILABLE = {
    "looks at a value": _number, "takes a number out": _item, "goes through numpy": _through_numpy,
    "reads a plain tensor": _attribute, "picks rows by value": _picked, "prints a number": _printing,
}  # fmt: skip


@pytest.mark.parametrize("name", UNCOMPILABLE)
def test_an_uncompilable_hook_runs_uncompiled(name, caplog, capsys):
    hook = UNCOMPILABLE[name]
    plain, made = regress(hook, poison={3})
    assert made[1]._compiled is None
    for one, other in zip(plain, made):
        one, other = ((state_of(x) if hasattr(x, "state_dict") else x) for x in (one, other))
        for a, b in zip(nest.leaves(one), nest.leaves(other)):
            torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), rtol=0, atol=0, equal_nan=True)
    [record] = warnings_in(caplog)
    line = hook.__code__.co_firstlineno + 1
    assert "Regression cannot be compiled, so its updates run as plain Python" in record.message
    assert f"test_compiled.py:{line} in {hook.__name__}" in record.message
    assert len(set(capsys.readouterr().out.splitlines())) == (12 if name == "prints a number" else 0)


def test_an_optimizer_without_apply_is_not_compiled(caplog):
    plain, made = regress(optimizer=functools.partial(TorchOptimizer, optimizer=torch.optim.SGD))
    assert torch.equal(plain[0].linear.weight, made[0].linear.weight) and made[1]._compiled is None
    [record] = warnings_in(caplog)
    assert "the optimizer of 'all', TorchOptimizer, has no `apply`" in record.message


@pytest.mark.parametrize("name", [name for name in HOMES if name not in ("CppCodeCache", "TorchDispatchMode")])
def test_updates_are_plain_if_torch_moved_a_private_name(name, monkeypatch, caplog):
    place = hide(monkeypatch, name)
    plain, made = regress(num_updates=3)
    assert torch.equal(plain[0].linear.weight, made[0].linear.weight) and made[1].is_plain
    [record] = warnings_in(caplog)
    assert f"run as plain Python: torch {torch.__version__} has no {place}" in record.message


def test_precisions(caplog):
    with pytest.raises(UsageError, match="'bfloat16' requires Learner.compile = True"):
        Learner(Regression(), precision="bfloat16")
    for settings in ({"compile": True}, {}):
        with pytest.raises(UsageError, match="'float16'; it must be one of 'float32', 'bfloat16'"):
            Learner(Regression(), precision="float16", **settings)
    with pytest.raises(UsageError, match="'half'"):
        CompiledFunction(lambda x: x, torch.zeros(1), precision="half")
    Learner(Regression(), precision="float32")


def test_which_updates_are_compared():
    assert [count for count in range(70) if is_checked(count)] == [*range(9), 16, 32, 64]


def test_non_finite_updates_are_skipped_and_finally_end_the_run(interpreted, caplog):
    plain, made = regress(poison={2, 3, 7}, num_updates=9)
    assert made[1]._compiled is not None and warnings_in(caplog) == []
    assert_alike(plain, made)
    assert [round(summary["nonfinite_updates"]) for summary in made[2]] == [0, 0, 1, 2, 2, 2, 2, 3, 3]
    algorithm, learner = made[:2]
    assert algorithm.count == learner.updates == 9 and algorithm.offset == 9 / 8
    before = copy.deepcopy((algorithm.linear.state_dict(), learner.state_dict()["optimizers"]))
    bad = regression_chunk(poison=math.nan)
    for _ in range(9):
        learner.train([bad])
    with pytest.raises(RunError, match="not finite in 10 consecutive updates"):
        learner.train([bad])
    after = algorithm.linear.state_dict(), learner.state_dict()["optimizers"]
    assert all(torch.as_tensor(a).equal(torch.as_tensor(b)) for a, b in zip(nest.leaves(before), nest.leaves(after)))
    assert learner.state_dict()["num_applied"] == 6


@pytest.mark.parametrize("key", [lambda self: torch.tensor(0), lambda self: [0], lambda self: (1, torch.ones(1))])
def test_a_graph_key_is_a_plain_value(key, interpreted):
    with pytest.raises(UsageError, match="graph_key of Regression returned .*; it must return a plain value"):
        regress(kind=key)


@pytest.mark.parametrize("period", [2, 3, 5])
def test_an_undeclared_counter_is_detected(period, caplog, interpreted):
    def hook(self, loss, experience):
        return loss * (3.0 if self.count % period == period - 1 else 1.0)

    plain, made = regress(hook)
    assert_alike(plain, made)
    [record] = warnings_in(caplog)
    assert "return it from `graph_key`" in record.message and made[1]._compiled is None
    caplog.clear()
    plain, made = regress(hook, kind=lambda self: self.count % period == period - 1)
    assert_alike(plain, made)
    assert warnings_in(caplog) == [] and len(made[1]._compiled._made) == 2


def test_a_later_change_is_noticed_at_the_next_comparison(caplog, interpreted):
    """Until then updates are those of the hook as it was traced."""

    def hook(self, loss, experience):
        return loss * (3.0 if self.count >= 11 else 1.0)

    plain, made = regress(hook, num_updates=16)
    assert made[1]._compiled is not None and warnings_in(caplog) == []
    assert not torch.allclose(plain[0].linear.weight, made[0].linear.weight, atol=1e-4)
    caplog.clear()
    _, made = regress(hook, num_updates=17)
    assert made[1]._compiled is None and len(warnings_in(caplog)) == 1


def test_unannounced_changes_of_groups_are_noticed(caplog, interpreted):
    runs = []
    for is_compiled in (False, True):
        algorithm = make("silent td3")
        learner = Learner(algorithm, compile=is_compiled, optimizer=ADAM)
        torch.manual_seed(7)
        runs.append(
            (algorithm, learner, train(algorithm, learner, [chunks_of("silent td3", 12)]), torch.get_rng_state())
        )
    assert runs[1][1]._compiled is None and len(warnings_in(caplog)) == 1
    assert_alike(*runs)


class Alternating(Regression):
    """Trains one of two groups in turn, with losses of one value."""

    def __init__(self, hook, kind):
        super().__init__(hook, kind)
        self.first, self.second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
        self.linear.requires_grad_(False)

    def parameter_groups(self):
        return {"first": [self.first], "second": [self.second]}

    def calc_loss(self, experience, info):
        name = "second" if self.count % 2 else "first"
        weight = getattr(self, name)
        return LossInfo({name: info + (weight - weight.detach()).sum()})


@pytest.mark.parametrize("told", [True, False])
def test_groups_that_train_in_turn_keep_their_rates(told, caplog, interpreted):
    runs = []
    for is_compiled in (False, True):
        algorithm = Alternating(None, lambda self: self.count % 2 if told else None)
        learner = Learner(algorithm, compile=is_compiled, learning_rate={"first": 0.1, "second": 0.01})
        summaries = [learner.train([regression_chunk(k)]) for k in range(5)]
        runs.append((algorithm, learner, summaries, torch.get_rng_state()))
    assert_alike(*runs)
    torch.testing.assert_close(runs[1][0].first.detach(), torch.full((2,), -0.3), atol=1e-4, rtol=0)
    torch.testing.assert_close(runs[1][0].second.detach(), torch.full((2,), -0.02), atol=1e-4, rtol=0)
    assert (runs[1][1]._compiled is not None, len(warnings_in(caplog))) == (told, not told)


def test_buffers_and_frozen_parameters_are_read_as_they_are(interpreted):
    """`offset` moves in after_update, by load_state_dict, and by hand."""
    algorithms = [Regression(), Regression()]
    learners = [Learner(a, compile=k == 1, learning_rate=0.05) for k, a in enumerate(algorithms)]
    for k in range(20):
        for algorithm, learner in zip(algorithms, learners):
            if k == 9:
                algorithm.offset.fill_(-5.0)
            if k == 12:
                state = algorithm.state_dict()
                algorithm.load_state_dict({name: value + 1 for name, value in state.items()})
            learner.train([regression_chunk(k)])
        assert_close(algorithms[1].state_dict(), algorithms[0].state_dict())
    assert learners[1]._compiled is not None


class Normed(Regression):
    """Its statistics move whenever its losses are computed."""

    def __init__(self, hook):
        super().__init__(hook)
        self.norm = nn.BatchNorm1d(1)

    def train_step(self, experience, state):
        seen = self.norm(experience.time_step.observation.reshape(-1, 1)).view_as(experience.time_step.observation)
        prediction = self.linear(seen[..., None]).squeeze(-1)
        return AlgStep(info=(prediction - experience.time_step.reward).square())


def test_moving_statistics_move_once_an_update(interpreted, caplog):
    """The comparisons with plain updates leave them alone."""
    runs = []
    for is_compiled in (False, True):
        algorithm = Normed(lambda self, loss, experience: loss)
        learner = Learner(algorithm, learning_rate=0.05, compile=is_compiled)
        summaries = [learner.train([regression_chunk(k)]) for k in range(12)]
        runs.append((algorithm, learner, summaries, torch.get_rng_state()))
    plain, made = runs
    assert_alike(plain, made)
    assert not made[1].is_plain and warnings_in(caplog) == []
    assert made[0].norm.num_batches_tracked == 12 and made[0].norm.running_mean.abs() > 0.01


def test_compiled_functions_take_no_gradients(interpreted):
    weight = torch.ones(3, 3, requires_grad=True)
    function = CompiledFunction(lambda given: given[0] @ given[1], (weight, torch.ones(3, 2)))
    assert not function((weight, torch.ones(3, 2))).requires_grad


def test_a_loss_may_take_gradients_itself(interpreted, caplog):
    def hook(self, loss, experience):
        (steepness,) = torch.autograd.grad(loss.sum(), self.linear.weight, create_graph=True)
        return loss + steepness.square().sum()

    plain, made = regress(hook)
    assert_alike(plain, made)
    assert not made[1].is_plain and not warnings_in(caplog)


def test_random_numbers_equal_those_of_the_plain_update(interpreted):
    def hook(self, loss, experience):
        noise = torch.randn_like(loss) + torch.rand(4) + torch.randperm(4) + torch.bernoulli(torch.full((4,), 0.5))
        return LossInfo(loss + noise, extra={"noise": noise})

    plain, made = regress(hook, num_updates=20)
    assert_alike(plain, made)
    assert len({round(summary["noise"], 5) for summary in made[2]}) == 20


# Minibatches, as columns of a chunk.


def columns_of(seed=0, num_updates=3, size=4, length=2, as_columns=True, weighted=False):
    """A chunk of shuffled minibatches, and some rows that do not train; or a chunk for each of them."""
    torch.manual_seed(seed)
    count = num_updates * size
    reward, observation = torch.randn(length, count), torch.randn(length, count)
    mask = torch.rand(length, count) < 0.7
    observation[~mask] = 1e3
    step = TimeStep(
        torch.ones(length, count, dtype=torch.int32), reward, torch.ones(length, count), observation, None, None
    )
    batch = Batch(Experience(step, None, None, None), mask, weight=torch.rand(count) if weighted else None)
    chunk = Minibatches(batch, torch.randperm(count).view(num_updates, size))
    return [chunk] if as_columns else one_by_one(chunk)


def one_by_one(chunk):
    """A chunk for each of its minibatches."""
    return [Minibatches(take(chunk.source, columns), None) for columns in chunk.index]


def extras(self, loss, experience):
    rows = experience.time_step.observation
    wide = torch.stack([rows, rows.square(), -rows], -1)
    whole = rows.detach().mean() + self.linear.weight.sum()
    return LossInfo(loss, extra={"rows": rows, "wide": wide, "first": loss[:1], "whole": whole, "signs": rows > 0})


def in_three_ways(iterations, hook=extras):
    """As `both`: plain on each minibatch alone, plain on columns, compiled on columns. `iterations(as_columns)`."""
    runs = []
    for as_columns, is_compiled in ((False, False), (True, False), (True, True)):
        algorithm = Regression(hook)
        learner = Learner(algorithm, learning_rate=0.05, compile=is_compiled)
        summaries = [learner.train(chunks) for chunks in iterations(as_columns)]
        runs.append((algorithm, learner, summaries, torch.get_rng_state()))
    return runs


@pytest.mark.parametrize("weighted", [False, True])
def test_columns_of_a_chunk_are_separate_minibatches(interpreted, weighted, caplog):
    def iterations(as_columns):
        return [columns_of(k, as_columns=as_columns, weighted=weighted) for k in range(5)]

    alone, plain, made = in_three_ways(iterations)
    assert_alike(alone, plain, 1e-6)
    assert_alike(plain, made)
    assert {"rows", "wide", "first", "whole", "signs"} <= set(made[2][0]) and warnings_in(caplog) == []
    assert made[1].updates == made[0].count == 15 and len(made[1]._compiled._made) == 1
    assert abs(made[2][0]["rows"]) < 10 and 0 < made[2][0]["signs"] < 1  # over the rows that train


def test_several_chunks_an_iteration_are_trained_in_their_order(interpreted):
    def iterations(as_columns):
        return [sum((columns_of(10 * k + j, as_columns=as_columns) for j in range(3)), []) for k in range(2)]

    alone, _, made = in_three_ways(iterations)
    assert_alike(alone, made)
    assert made[1].updates == 18 and len(made[1]._compiled._made) == 1


def test_each_graph_is_reported_with_the_seconds_that_it_took(interpreted):
    learner, lines = Learner(make("ppo"), compile=True), []
    learner.log = lines.append
    learner.train(chunks_of("ppo", 10))
    begun, done = lines
    assert begun == "Compiling the update of PPO; training waits"
    assert done.startswith("Compiled the update of PPO in ") and done.endswith(" s")


@pytest.mark.parametrize(
    "precision, cost, says", [("bfloat16", 1.8, True), ("bfloat16", 0.6, False), ("float32", 1.8, False)]
)
def test_slower_bfloat16_is_reported(interpreted, monkeypatch, precision, cost, says):
    monkeypatch.setattr(matmul, "bfloat16_cost", lambda: cost)
    learner, lines = Learner(Regression(), compile=True, precision=precision), []
    learner.log = lines.append
    learner.train(columns_of(num_updates=10))
    assert any("takes 1.8 times as long in bfloat16" in line for line in lines) == says


def test_the_speed_of_bfloat16_is_not_measured_for_a_gpu(interpreted, monkeypatch):
    monkeypatch.setattr(matmul, "bfloat16_cost", lambda: pytest.fail("measured on the CPU"))
    learner = Learner(Regression(), compile=True, precision="bfloat16")
    monkeypatch.setattr(learner._plain, "on_cpu", False)
    learner.train(columns_of(num_updates=10))


@pytest.fixture
def products():
    """torch's settings of a GPU's products."""
    settings = torch.backends.cuda.matmul
    before, settings.fp32_precision = settings.fp32_precision, "ieee"
    yield settings
    settings.fp32_precision = before


@pytest.mark.parametrize(("precision", "in_update"), [("float32", "ieee"), ("tf32", "tf32")])
def test_updates_on_a_gpu_use_tf32_if_requested(products, precision, in_update):
    found = set()

    def asks(self, loss, experience):
        found.add(products.fp32_precision)
        return loss

    with FarDevice() as far:
        learner = Learner(Regression(asks).to(far.device), compile=False, precision=precision)
        chunks = columns_of(as_columns=False)
        learner.train(nest.map(lambda leaf: leaf.to(far.device) if torch.is_tensor(leaf) else leaf, chunks))
    assert found == {in_update} and products.fp32_precision == "ieee"


def test_each_number_of_columns_has_a_graph_of_its_own(interpreted):
    """Of one chunk's layout: 4 of its 12 columns, 6 of them, all of them."""

    def iterations(as_columns):
        for k, num_updates in enumerate((3, 2, 3, 1, 2)):
            chunks = columns_of(k, num_updates, 12 // num_updates, as_columns=as_columns)
            yield [chunks[0]._replace(index=None)] if as_columns and num_updates == 1 else chunks

    alone, plain, made = in_three_ways(iterations)
    assert_alike(plain, made)
    assert_alike(alone, made)
    assert sorted(key[1:-1] for key in made[1]._compiled._made) == [(), ((4,),), ((6,),)]


def test_chunks_of_another_layout_have_their_own_graph(interpreted):
    def iterations(as_columns):
        sizes = ((2, 4, False), (3, 4, False), (2, 4, True), (2, 4, False))
        return [
            columns_of(k, 3, size, length, as_columns, weighted) for k, (length, size, weighted) in enumerate(sizes)
        ]

    alone, _, made = in_three_ways(iterations)
    assert_alike(alone, made)
    assert len(made[1]._compiled._made) == 3


@pytest.mark.parametrize("at", [0, 1, 2, 6])
def test_a_fallback_in_mid_chunk_continues_with_the_next_minibatch(interpreted, at, caplog):
    """Once: no minibatch is left out, and none is trained on twice."""

    def hook(self, loss, experience):
        return LossInfo(loss * (3.0 if self.count >= at else 1.0), extra={"rows": experience.time_step.observation})

    def iterations(as_columns):
        return [columns_of(k, num_updates=4, as_columns=as_columns) for k in range(3)]

    alone, plain, made = in_three_ways(iterations, hook)
    if at == 0:  # nothing changes in the course of it
        assert made[1]._compiled is not None and warnings_in(caplog) == []
    else:
        assert made[1]._compiled is None and len(warnings_in(caplog)) == 1
    assert_alike(alone, made)
    assert_alike(plain, made)
    assert made[1].updates == made[0].count == 12


def test_a_stop_amid_a_chunk_ends_the_iteration(interpreted):
    def hook(self, loss, experience):
        too_far = (experience.time_step.reward > 100).to(loss.dtype)[: len(loss)]
        return LossInfo(loss, extra={"rows": experience.time_step.observation}, stop=too_far)

    def iterations(as_columns):
        for k in range(3):
            chunks = columns_of(k, num_updates=4, as_columns=True) + columns_of(9, num_updates=4, as_columns=True)
            if k == 1:  # in the third minibatch
                chunks[0].source.experience.time_step.reward[:, chunks[0].index[2, 0]] = 1000
            yield chunks if as_columns else [part for chunk in chunks for part in one_by_one(chunk)]

    alone, plain, made = in_three_ways(iterations, hook)
    assert_alike(alone, plain, 1e-6)
    assert_alike(plain, made)
    for algorithm, learner, *_ in (alone, plain, made):
        assert algorithm.count == learner.updates == 8 + 2 + 8
        assert learner.state_dict()["num_applied"] == learner.state_dict()["optimizers"]["all"]["num_steps"] == 18


@pytest.mark.parametrize("may_stop", [False, True])
def test_weights_of_fixed_norm_are_scaled_after_compiled_updates(may_stop, interpreted):
    def hook(self, loss, experience):
        return LossInfo(loss, stop=0 * loss if may_stop else None)

    algorithm = Regression(hook)
    algorithm.linear = UnitLinear(1, 1)
    algorithm.linear.project()
    learner = Learner(algorithm, compile=True, learning_rate=0.05)
    before = algorithm.linear.bias.item()
    learner.train(columns_of(num_updates=4))
    assert learner.updates == 4 and algorithm.linear.bias.item() != before
    assert abs(algorithm.linear.weight.item()) == 1


def test_values_that_are_not_finite_skip_only_their_minibatch(interpreted):
    def iterations(as_columns):
        for k in range(2):
            [chunk] = columns_of(k, num_updates=4)
            column = chunk.index[2, 0]
            chunk.source.mask[0, column] = True
            chunk.source.experience.time_step.reward[0, column] = math.nan
            yield [chunk] if as_columns else one_by_one(chunk)

    def hook(self, loss, experience):
        return LossInfo(loss, extra={"rows": experience.time_step.observation})

    alone, plain, made = in_three_ways(iterations, hook)
    assert_alike(alone, made)
    assert_alike(plain, made)
    assert made[1].updates == 8 and made[1].state_dict()["num_applied"] == 6 and made[2][1]["nonfinite_updates"] == 2
    assert made[1].state_dict()["optimizers"]["all"]["num_steps"] == 6


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_chunk_is_let_go_of_after_training(interpreted, is_compiled):
    learner = Learner(Regression(extras), compile=is_compiled)
    chunks = columns_of() + columns_of(1)
    references = [weakref.ref(leaf) for chunk in chunks for leaf in nest.leaves((chunk.source, chunk.index))]
    learner.train(chunks)
    assert learner.is_plain != is_compiled
    chunks.clear()
    gc.collect()
    assert len(references) > 8 and not any(reference() is not None for reference in references)
    learner.train(columns_of(2))
    assert learner.updates == 9


def runs_from_replay(
    root,
    sampler=Uniform,
    device="cpu",
    transforms=(),
    window_length=2,
    env_id="CartPole-v1",
    buffer=RingBuffer,
    **settings,
):
    """Updates and state, plain and with the learner's settings; and the latter's trainer."""
    networks = functools.partial(QNetwork, torso=functools.partial(Torso, mlp=functools.partial(MLP, layers=(8,))))
    replay = {"capacity": 200, "batch_size": 8, "warmup_env_steps": 20, "updates_per_env_step": 0.5}
    replay |= {"window_length": window_length, "buffer": buffer}
    runs = []
    for is_compiled in (False, True):
        trainer = Trainer(
            root / str(is_compiled),
            algorithm=functools.partial(DQN, q_network=networks, target_period=10),
            environment=functools.partial(make_environment, env_id, num_envs=2),
            batches=functools.partial(ReplayBatches, sampler=sampler, **replay),
            learner=functools.partial(Learner, compile=is_compiled, **settings if is_compiled else {}),
            transforms=transforms,
            listeners=[],
            unroll_length=4,
            num_env_steps=140,
            device=device,
        )
        trainer.train()
        runs.append((trainer.clock.updates, trainer.algorithm.state_dict()))
    return runs, trainer


@pytest.mark.parametrize(
    ("sampler", "options"),
    [
        (Uniform, {}),
        (Prioritized, {}),
        (Prioritized, {"transforms": [ObservationNormalizer], "window_length": 4}),
        (Uniform, {"env_id": "alfish/CartPole-v1", "window_length": 4, "buffer": AlignedRingBuffer}),
    ],
)
def test_gathering_windows_in_the_graph_gives_equal_results(tmp_path, interpreted, sampler, options):
    runs, trainer = runs_from_replay(tmp_path, sampler, **options)
    assert_close(*runs)
    assert runs[0][0] > 40 and not trainer.learner.is_plain
    made = trainer.learner._compiled
    assert len(made._made) == 1 and isinstance(made._source, ReplayView)


@pytest.mark.parametrize("summarize", [True, False])
def test_summaries_are_made_where_they_are_wanted(interpreted, summarize):
    runs = []
    for is_compiled in (False, True):
        algorithm = Regression(extras)
        summary = Learner(algorithm, compile=is_compiled).train(columns_of(), summarize)
        assert bool(summary) == summarize
        runs.append((summary, algorithm.state_dict()))
    assert_close(*runs)


# Wide networks.


@long
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_wide_network_trains_equally(precision, caplog, monkeypatch):
    monkeypatch.setattr(matmul, "LARGE_PRODUCT", 128**3)
    iterations = [chunks_of("wide dqn", 10, 128, seed=k) for k in range(2)]
    runs = []
    for settings in ({}, {"compile": True, "precision": precision}):
        algorithm = make("wide dqn")
        learner = Learner(algorithm, optimizer=ADAM, learning_rate=1e-3, **settings)
        runs.append((algorithm, learner, train(algorithm, learner, iterations), torch.get_rng_state()))
    plain, made = runs
    assert made[1]._compiled is not None and warnings_in(caplog) == []
    if precision == "float32":
        assert_alike(plain, made, 1e-4)
    else:
        assert made[2][-1]["loss"] == pytest.approx(plain[2][-1]["loss"], rel=0.05)
        difference = (made[0].q_network.advantage.weight - plain[0].q_network.advantage.weight).abs().max()
        assert 1e-6 < difference < 5e-3


# A function alone.


@slow
def test_sizes_are_fixed_in_a_graph(monkeypatch):
    """Variable ones would cost Python a look at each of them, and loops their known ends."""
    from torch._inductor import compile_fx

    sizes, real = [], compile_fx.compile_fx_inner

    def spy(graph, inputs, **options):
        sizes.extend(size for leaf in inputs for size in (*leaf.shape, *leaf.stride()))
        return real(graph, inputs, **options)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", spy)
    x, index, y = torch.rand(5, 7), torch.randint(7, (9,)), torch.rand(7, 3)
    function = CompiledFunction(lambda given: (given[0][:, given[1]] + 1, given[0] @ given[2]), (x, index, y))
    assert sizes == [5, 7, 7, 1, 9, 1, 7, 3, 3, 1] and all(type(size) is int for size in sizes)
    found, product = function((x, index, y))
    assert torch.equal(found, x[:, index] + 1) and torch.allclose(product, x @ y)


@slow
@pytest.mark.skipif(not matmul.suits_products(), reason="products are torch's here")
@pytest.mark.parametrize(("precision", "num_stored"), [("float32", 2), ("bfloat16", 5)])
def test_operands_of_products_are_stored_once(precision, num_stored, monkeypatch):
    """However it is turned: `x` and its logarithm; in bfloat16 `w`, `a` and `b`, too."""
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_cpp_code

    if precision == "bfloat16" and not matmul.has_bfloat16_products():
        pytest.skip("oneDNN's products are stored as well")
    monkeypatch.setattr(matmul, "LARGE_PRODUCT", 64**3)
    monkeypatch.setattr(matmul, "NARROW", 64)

    def function(given):
        a, b, w = given
        x = torch.exp(a @ w.T)
        return x @ b, x.T @ b, torch.log(x).T @ b

    given = torch.rand(64, 64), torch.rand(64, 64), torch.rand(64, 64) / 64
    with config.patch(force_disable_caches=True):
        compiled_function, code = run_and_get_cpp_code(lambda: CompiledFunction(function, given, precision))
    assert code.count(".store(") == num_stored
    torch.testing.assert_close(compiled_function(given), function(given), rtol=0.05, atol=0.05)


@slow
def test_compiled_functions_write_and_draw_like_plain_functions():
    def function(given):
        given["x"].add_(given["y"]).mul_(2)
        return {"noise": torch.randn(3), "none": None, "sum": (given["x"].sum(),)}

    x = torch.ones(3)
    again = CompiledFunction(function, {"x": x, "y": x})  # one tensor in two places is two arguments
    assert torch.equal(x, torch.ones(3)), "tracing writes nothing"
    y = torch.arange(3.0)
    torch.manual_seed(2)
    found = again({"x": x, "y": y})
    torch.manual_seed(2)
    assert torch.equal(found["noise"], torch.randn(3))
    assert found["none"] is None and x.tolist() == [2, 4, 6] and found["sum"][0] == 12 and y.tolist() == [0, 1, 2]


def test_a_function_that_cannot_be_traced_is_reported_with_its_line():
    def function(x):
        if x.sum() > 0:
            return x
        return -x

    with pytest.raises(NotCompilable, match=rf"test_compiled.py:{function.__code__.co_firstlineno + 1} in function"):
        CompiledFunction(function, torch.ones(2))


ONES = torch.ones(2)


def aliasing(given):
    """Results that are arguments, parts of them, one another, and parts of one another; `x` is written."""
    x, y, z = given["x"], given["y"], given["z"]
    made = y + 1
    x.mul_(2)
    return {
        "written": x, "argument": y, "part": y[1:], "again": y, "transposed": y.T, "flat": y.view(-1), "made": made,
        "row": made[0], "twice": made, "column": made[:, 1], "wide": z.expand(4, 3), "late": x.sum(),
    }  # fmt: skip


@pytest.fixture(params=[
    pytest.param("innermost", marks=slow), pytest.param("outermost", marks=long), pytest.param("interpreted"),
])  # fmt: skip
def callables(request, monkeypatch):
    """What is called; and, as it grows, the innermost callables of what was compiled."""
    made = []
    if request.param == "interpreted":
        request.getfixturevalue("interpreted")
        return request.param, made
    compiler = importlib.import_module("torch._inductor.compile_fx")
    compile_inner = compiler.compile_fx_inner

    def spy(*arguments, **options):
        graph = compile_inner(*arguments, **options)
        made.append(graph.current_callable)
        if request.param == "innermost":
            return graph

        def call(leaves):
            return graph(leaves)

        call._boxed_call = True  # as torch asks of what takes a list
        return call

    monkeypatch.setattr(compiler, "compile_fx_inner", spy)
    return request.param, made


def test_aliased_results_are_returned_in_separate_memory(callables):
    """At every call; and what is written in place is written."""

    def arguments(k):
        return {"x": torch.arange(6.0).view(2, 3), "y": torch.arange(6.0).view(3, 2) + k, "z": torch.arange(3.0) - k}

    function = CompiledFunction(aliasing, arguments(0))
    way, made = callables
    assert len(made) == (way != "interpreted") and (function._call in made) == (way == "innermost")
    for k in range(3):
        given, twin = arguments(k), arguments(k)
        found = function(given)
        expected = nest.map(torch.clone, aliasing(twin))
        assert_close(found, expected, 0)
        assert_close(given, twin, 0)
        everything = [*nest.leaves(found), *nest.leaves(given)]
        for i, one in enumerate(everything):
            others = [leaf.clone() for leaf in everything]
            one.fill_(-77)
            assert all(torch.equal(a, b) for j, (a, b) in enumerate(zip(everything, others)) if j != i)


def test_written_parts_are_read_unchanged(callables):
    """Apart from the argument itself."""

    def function(x):
        before = x[1:], x.view(-1)
        x.mul_(2)
        before[0].add_(1)
        return {"before": before, "whole": x, "sum": x.sum()}

    made = CompiledFunction(function, torch.zeros(2, 3))
    for k in range(3):
        given, twin = torch.arange(6.0).view(2, 3) + k, torch.arange(6.0).view(2, 3) + k
        found, expected = made(given), nest.map(torch.clone, function(twin))
        assert_close(found, expected, 0)
        assert torch.equal(given, twin)
        given.fill_(-77)
        assert_close(found, expected, 0)


def test_calls_keep_earlier_results_and_their_list_of_leaves(callables):
    function = CompiledFunction(lambda given: (given["a"] - given["b"], given["a"]), {"a": ONES, "b": ONES.clone()})
    results = [function({"a": torch.full((2,), 1.0 + k), "b": ONES}) for k in range(4)]
    assert [[leaf.tolist() for leaf in result] for result in results] == [[[k] * 2, [k + 1] * 2] for k in range(4)]
    leaves = [torch.full((2,), 5.0), torch.full((2,), 2.0)]
    for _ in range(2):
        assert function.call_flat(leaves)[0].tolist() == [3, 3] and len(leaves) == 2


def test_a_fallback_is_saved_in_the_checkpoint():
    learner = Learner(Regression(extras), compile=True)
    assert not learner.state_dict()["fell_back"]
    learner._compiled, learner._fell_back = None, True
    resumed = Learner(Regression(extras), compile=True)
    resumed.load_state_dict(learner.state_dict())
    assert resumed.is_plain and resumed.state_dict()["fell_back"]


# CUDA graphs. Where there is no GPU, recording is imitated, and the rest is as it is.


@pytest.fixture
def recording(monkeypatch):
    """Makes a learner record on a CPU; what it gives back grows by one entry, its launches, for each graph.

    As on a GPU, to record runs nothing, and each launch reads and writes the memory that was recorded.
    """

    def begin(learner):
        updates, launches = learner._compiled, []
        updates._records = True

        def record(call, device):
            before, generators = [leaf.clone() for leaf in updates._leaves], torch.get_rng_state()
            results = call()
            torch.set_rng_state(generators)
            for leaf, value in zip(updates._leaves, before):
                leaf.copy_(value)
            mine = len(launches)
            launches.append(0)

            def launch():
                launches[mine] += 1
                for own, result in zip(nest.leaves(results), nest.leaves(call())):
                    own.copy_(result)

            return launch, results

        monkeypatch.setattr(cuda_graphs, "record", record)
        return launches

    return begin


@pytest.mark.parametrize("name", ["ppo", "sac both", "td3", pytest.param("sac with memory", marks=slow)])
def test_recorded_updates_equal_the_plain_learner(name, recording, interpreted, caplog):
    """Minibatches of a chunk, and chunks that are one; two kinds of updates; random numbers; schedules; memory."""
    settings = {"optimizer": ADAM, "learning_rate": Linear(1e-2), "max_grad_norm": 0.5}
    runs = []
    for is_compiled in (False, True):
        algorithm = make(name)
        learner = Learner(algorithm, compile=is_compiled, **settings)
        launches = recording(learner) if is_compiled else None
        torch.manual_seed(7)
        iterations = ([chunk] for k in range(2) for chunk in chunks_of(name, 8, seed=k, weighted=True))
        runs.append((algorithm, learner, train(algorithm, learner, list(iterations)), torch.get_rng_state()))
    assert_alike(*runs)
    assert len(launches) == len(learner._compiled._made) == (2 if name == "td3" else 1)
    assert sum(launches) == learner.updates - CALLS_BEFORE_RECORDING * len(launches)
    assert warnings_in(caplog) == []


def test_recorded_updates_follow_the_kl(recording, interpreted):
    runs, iterations = [], [chunks_of("measured ppo", 12, seed=k) for k in range(3)]
    for is_compiled in (False, True):
        algorithm = make("measured ppo")
        learner = Learner(algorithm, compile=is_compiled, **LED)
        launches = recording(learner) if is_compiled else None
        torch.manual_seed(7)
        runs.append((algorithm, learner, train(algorithm, learner, iterations), torch.get_rng_state()))
    assert_alike(*runs)
    assert launches == [learner.updates - CALLS_BEFORE_RECORDING]
    rates = [summary["learning_rate"] for summary in runs[1][2]]
    print(rates)
    assert max(rates) > 1.4e-3 > 0.9e-3 > min(rates), "it rises and it falls"


def test_recorded_updates_read_the_rows_and_learning_rates_of_their_call(recording, interpreted):
    """Chunks of two layouts in turns; their memory is written over once they are trained on."""

    def run(is_compiled):
        algorithm = Regression(extras)
        learner = Learner(algorithm, compile=is_compiled, learning_rate=Linear(0.05))
        launches = recording(learner) if is_compiled else None
        summaries = []
        for k in range(8):
            algorithm.progress.fill_(k / 8)
            chunks, again = (columns_of(k, size=4 + k % 2, weighted=True) for _ in range(2))
            summaries.append(learner.train(chunks))
            assert torch.equal(chunks[0].index, again[0].index), "launches write into what they were given"
            for leaf in nest.leaves(chunks[0].source):
                leaf.zero_()
        return (algorithm, learner, summaries, torch.get_rng_state()), launches

    (plain, _), (made, launches) = run(False), run(True)
    assert_alike(plain, made)
    assert launches == [9, 9]


def test_a_recording_that_does_something_else_ends_the_run(recording, interpreted, monkeypatch):
    learner = Learner(Regression(extras), compile=True)
    recording(learner)
    real = cuda_graphs.record

    def record(call, device):
        launch, results = real(call, device)

        def wrong():
            launch()
            results["total"].add_(1)

        return wrong, results

    monkeypatch.setattr(cuda_graphs, "record", record)
    with pytest.raises(RunError, match=r"of the CUDA graph are .*; set Learner.cuda_graphs = False"):
        learner.train(columns_of(num_updates=6))
    assert learner.updates == CALLS_BEFORE_RECORDING


def test_the_message_about_an_unrecordable_function_names_the_setting():
    """Here because there is no GPU, or because the function looks at a value."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.ones(2, device=device)
    with pytest.raises(RunError, match=r"cannot be recorded as a CUDA graph \(.+\); set Learner.cuda_graphs = False"):
        cuda_graphs.RecordedFunction(lambda given: given[0] * float(given[0].sum()), [x])
    assert (x + 1).tolist() == [2, 2]


def test_cuda_graphs_are_of_compiled_updates_on_a_gpu():
    with pytest.raises(UsageError, match="Learner.cuda_graphs = True requires Learner.compile = True or 'auto'"):
        Learner(Regression(extras), compile=False, cuda_graphs=True)
    learner = Learner(Regression(extras), compile=True, cuda_graphs=True)
    assert not learner._compiled._records, "there is nothing to record on a CPU"


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_gpu
@slow
@pytest.mark.parametrize("name", [*ON_POLICY, *OFF_POLICY])
def test_recorded_gpu_updates_equal_the_plain_learner(name, caplog):
    runs = []
    for is_recorded in (False, True):
        algorithm = make(name).to("cuda")
        learner = Learner(algorithm, compile=is_recorded, cuda_graphs=is_recorded, optimizer=ADAM, learning_rate=3e-3)
        torch.manual_seed(7)
        iterations = [
            [chunk._replace(source=nest.to(chunk.source, "cuda"), index=nest.to(chunk.index, "cuda"))]
            for k in range(5)
            for chunk in chunks_of(name, 12, seed=k, weighted=True)
        ]
        torch.cuda.manual_seed(7)
        summaries = train(algorithm, learner, iterations)
        runs.append((algorithm.cpu(), learner, summaries, torch.cuda.get_rng_state()))
    assert learner.updates == 60 and all(graph.recorded is not None for graph in learner._compiled._made.values())
    assert_alike(*runs)
    assert warnings_in(caplog) == []


@needs_gpu
@slow
def test_a_run_from_replay_on_a_gpu_trains_equally_when_recorded(tmp_path):
    runs, trainer = runs_from_replay(tmp_path, device="cuda", cuda_graphs=True)
    assert_close(runs[1][1], runs[0][1], 1e-3)
    assert all(graph.recorded is not None for graph in trainer.learner._compiled._made.values())
