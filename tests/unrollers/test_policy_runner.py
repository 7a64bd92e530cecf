"""Acting through numpy: what torch would do, to float error, with the weights of this moment, or torch itself."""

import copy
import functools
import io
import logging
import pickle

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from hidden_names import hide
from scripted import assert_equal, unroll
from torch import nn

from alfish import nest, specs
from alfish.algorithms.a2c import A2C
from alfish.algorithms.acting import Actor
from alfish.algorithms.ddpg import DDPG
from alfish.algorithms.dqn import DQN
from alfish.algorithms.ppo import PPO
from alfish.algorithms.recurrent_sac import RecurrentSAC
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.algorithms.sac import SAC
from alfish.algorithms.td3 import TD3
from alfish.data import AlgStep, Batch, Experience, LossInfo, StepType, TimeStep
from alfish.environments import VectorEnvironment, make_environment
from alfish.environments.sequential import SequentialVectorEnv
from alfish.environments.toy import TensorPointMass
from alfish.learner.batches import EpochBatches, Minibatches, ReplayBatches
from alfish.learner.learner import Learner
from alfish.networks import (
    GRU,
    LSTM,
    MLP,
    ActorCritic,
    AttentionWindow,
    CriticEnsemble,
    MinGRU,
    QNetwork,
    StackedMemory,
    TargetNetwork,
    Torso,
)
from alfish.parameters.schedules import Linear
from alfish.training.listeners import CheckpointSaver
from alfish.training.trainer import Trainer
from alfish.transforms import FrameStack, ObservationNormalizer, Transforms
from alfish.unrollers import SyncUnroller
from alfish.unrollers.policy_runner import PolicyRunner

B = 3
VECTOR = spaces.Box(-1, 1, (4,), np.float32)
NESTED = spaces.Dict(
    picture=spaces.Box(0, 255, (4, 4), np.uint8),
    rest=spaces.Tuple([spaces.Box(-1, 1, (2,), np.float64), spaces.MultiBinary(3), VECTOR]),
)
BOXES = spaces.Dict(one=VECTOR, other=spaces.Tuple([spaces.Box(-np.inf, np.inf, (2,), np.float32)]))
IMAGE = spaces.Box(0, 255, (36, 36, 1), np.uint8)
BOX, FREE = spaces.Box(-2, 3, (2,), np.float32), spaces.Box(-np.inf, np.inf, (2,), np.float32)
DISCRETE, MULTI = spaces.Discrete(3, start=1), spaces.MultiDiscrete([2, 3])
BOTH = spaces.Dict(choice=DISCRETE, parts=spaces.Tuple([BOX, BOX]))
ALL = spaces.Dict(choice=DISCRETE, parts=spaces.Tuple([BOX, MULTI, FREE]))
STACK = functools.partial(FrameStack, num_frames=3)
NOISY = functools.partial(TD3, noise_correlation=0.8, noise_std=Linear(0.5, 0.1))
DUELING = functools.partial(DQN, q_network=functools.partial(QNetwork, dueling=True))

RECURRENT = functools.partial(Torso, memory=GRU)
WINDOW = functools.partial(Torso, memory=functools.partial(AttentionWindow, length=6))

CASES = {  # algorithm, observation, action, transforms
    "ppo discrete": (PPO, VECTOR, DISCRETE, []),
    "ppo box": (PPO, NESTED, BOX, [ObservationNormalizer]),
    "ppo unbounded": (PPO, BOXES, FREE, [STACK, ObservationNormalizer]),
    "ppo nested": (PPO, NESTED, ALL, [ObservationNormalizer]),
    "a2c multi-discrete": (A2C, BOXES, MULTI, [STACK]),
    "a2c nested": (A2C, VECTOR, ALL, []),
    "dqn": (functools.partial(DQN, epsilon=Linear(0.6, 0.2)), NESTED, DISCRETE, [ObservationNormalizer]),
    "dueling dqn": (DUELING, VECTOR, DISCRETE, [STACK]),
    "sac box": (SAC, NESTED, BOX, []),
    "sac discrete": (SAC, VECTOR, DISCRETE, [ObservationNormalizer]),
    "sac both": (SAC, BOXES, BOTH, [STACK, ObservationNormalizer]),
    "ppo with a GRU": (functools.partial(PPO, network=functools.partial(ActorCritic, actor_torso=RECURRENT,
                                                                        shared_torso=True)), VECTOR, DISCRETE, []),
    "a2c with two memories": (functools.partial(A2C, network=functools.partial(
        ActorCritic, actor_torso=RECURRENT, critic_torso=functools.partial(Torso, memory=LSTM))), VECTOR, BOX, [STACK]),
    "dqn with an LSTM": (functools.partial(DQN, q_network=functools.partial(
        QNetwork, torso=functools.partial(Torso, memory=LSTM))), NESTED, DISCRETE, [ObservationNormalizer]),
    "ppo with an attention window": (functools.partial(PPO, network=functools.partial(
        ActorCritic, actor_torso=WINDOW, critic_torso=functools.partial(Torso, memory=MinGRU))), VECTOR, BOX, [STACK]),
    "sac with stacked memories": (functools.partial(RecurrentSAC, memory=functools.partial(
        StackedMemory, layers=[GRU, LSTM, AttentionWindow])), VECTOR, DISCRETE, []),
    "sac with batch norm": (functools.partial(SAC, actor_mlp=functools.partial(MLP, norm="batch")), VECTOR, BOX, []),
    "sac with a GRU": (RecurrentSAC, VECTOR, BOTH, []),
    "ddpg": (DDPG, NESTED, BOX, []),
    "td3": (TD3, VECTOR, BOX, []),
    "a one-hot code": (PPO, spaces.Discrete(3), DISCRETE, []),
    "td3 with memory": (NOISY, BOXES, spaces.Tuple([BOX, BOX]), [STACK, ObservationNormalizer]),
    "an image": (A2C, IMAGE, DISCRETE, []),
    "an image, off-policy": (DQN, IMAGE, DISCRETE, [STACK]),
}  # fmt: skip
THROUGH_TORCH = {
    "a bit": (PPO, VECTOR, spaces.MultiBinary(2), []),
}


class Anything(gymnasium.Env):
    """Random observations, whatever is done; episodes of 3, 4, 5, 3, ... actions."""

    def __init__(self, observation_space, action_space):
        self.observation_space, self.action_space = observation_space, action_space
        self._episode = 0

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            super().reset(seed=seed)
            self.observation_space.seed(seed)
        self._episode, self._step = self._episode + 1, 0
        return self.observation_space.sample(), {}

    def step(self, action):
        self._step += 1
        return self.observation_space.sample(), 1.0, False, self._step == 3 + self._episode % 3, {}


def make_unroller(case, numpy_policy):
    make, observation, action, transforms = case
    torch.manual_seed(0)
    kwargs = {"observation_space": copy.deepcopy(observation), "action_space": action}
    environment = make_environment(Anything, num_envs=B, env_kwargs=kwargs, seed=5)
    chain = Transforms(transforms, environment.observation_spec, environment.reward_spec)
    algorithm = make(chain.observation_spec, environment.action_spec, chain.reward_spec)
    with torch.no_grad():  # away from where the policy is the same whatever it sees
        for parameter in algorithm.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    algorithm.eval()
    return SyncUnroller(environment, algorithm, chain, numpy_policy=numpy_policy)


def warnings_in(caplog):
    return [record for record in caplog.records if record.name == "absl" and record.levelno >= logging.WARNING]


def assert_close(found, expected):
    assert nest.paths(found) == nest.paths(expected)
    for path, a, b in zip(nest.paths(found), *(map(nest.as_tensor, nest.leaves(rows)) for rows in (found, expected))):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), path
        if a.is_floating_point():
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-5), f"{path}: {(a - b).abs().max()}"
        else:
            assert torch.equal(a, b), path


@pytest.mark.parametrize("name", [*CASES, *THROUGH_TORCH])
def test_an_unroll_is_torchs(name, caplog):
    case = CASES.get(name) or THROUGH_TORCH[name]
    unrolls = []
    for numpy_policy in (None, 0):
        unroller = make_unroller(case, numpy_policy)
        caplog.clear()
        torch.manual_seed(3)
        rows = []
        for k in range(3):
            unroller._algorithm.progress.fill_(k / 2)
            rows.append(unroll(unroller, 5, at_random=k == 1))
            unroller._transforms.observe(rows[-1].time_step, rows[-1].transform_state, 0)
        unrolls.append((rows, unroller._state, unroller._transform_state, torch.get_rng_state()))
        assert warnings_in(caplog) == []
        assert (unroller._actor._program is not None) == (numpy_policy == 0 and name in CASES)
        assert unroller.state_dict()["num_calls"] == 15 + 3 * unroller._algorithm.on_policy
    assert_close(unrolls[1], unrolls[0])
    assert len(torch.cat([x.time_step.step_type for x in unrolls[0][0]]).unique()) == 3


# Rows as arrays, from the environment's step to the end of the unroll.


class Remembering(RLAlgorithm):
    """Acts by what it has seen: a hidden state, and a count of the steps since FIRST."""

    on_policy = True

    def __init__(self, *specs):
        super().__init__(*specs)
        size = specs[0].shape[0]
        self.inner, self.outer = nn.Linear(size + 3, 3), nn.Linear(3, 2)

    def initial_state(self, batch_size):
        return {"hidden": torch.full((batch_size, 3), 0.5), "count": torch.zeros(batch_size, dtype=torch.int64)}

    def rollout_step(self, time_step, state):
        hidden = self.inner(torch.cat([time_step.observation, state["hidden"]], -1)).tanh()
        action = self.outer(hidden) + torch.randn(len(hidden), 2)
        return AlgStep(action, {"hidden": hidden, "count": state["count"] + 1}, {"state": state, "noise": action})

    def train_step(self, experience, state):
        return AlgStep()

    def calc_loss(self, experience, info):
        return LossInfo(experience.time_step.reward * 0)


class Resumable(SequentialVectorEnv):
    """Gives and takes all that it is."""

    def get_state(self):
        return pickle.dumps((self.envs, self._waits)).hex()

    def set_state(self, state):
        self.envs, self._waits = pickle.loads(bytes.fromhex(state))


MEMORIES = {
    "memory": (Remembering, VECTOR, BOX, [STACK, ObservationNormalizer]),
    "off-policy": (type("OffPolicy", (Remembering,), {"on_policy": False}), VECTOR, BOX, [STACK]),
    "td3 with memory": CASES["td3 with memory"],
    "ppo nested": CASES["ppo nested"],
    "dqn": CASES["dqn"],
}


def resumable(name, numpy_policy):
    """`make_unroller`'s, in an environment that can be saved at any moment."""
    unroller = make_unroller(MEMORIES[name], numpy_policy)

    def staggered(column):
        env = Anything(*(copy.deepcopy(space) for space in MEMORIES[name][1:3]))
        env._episode = column
        return env

    makers = [functools.partial(staggered, column) for column in range(B)]
    unroller.environment = VectorEnvironment(Resumable(makers, AutoresetMode.NEXT_STEP), seeds=[5, 6, 7])
    return unroller


class InTensors:
    """The environment with tensors in the places of arrays."""

    def __init__(self, environment):
        self._environment = environment

    def __getattr__(self, name):
        return getattr(self._environment, name)

    def convert(self, rows):
        return nest.tensors(rows)

    def reset(self):
        return nest.tensors(self._environment.reset())

    def step(self, action):
        assert all(isinstance(leaf, torch.Tensor) for leaf in nest.leaves(action))
        return nest.tensors(self._environment.step(nest.arrays(action)))


@pytest.mark.parametrize(("name", "numpy_policy"), [
    ("memory", None), ("memory", 7), ("off-policy", 0), ("td3 with memory", None), ("td3 with memory", 7),
    ("ppo nested", 0), ("dqn", 7),
])  # fmt: skip
def test_an_unroll_through_arrays_is_the_one_through_tensors(name, numpy_policy):
    """In an environment that computes in tensors, the same rows come out."""
    runs = []
    for in_tensors in (False, True):
        unroller = resumable(name, numpy_policy)
        if in_tensors:
            unroller.environment = InTensors(unroller.environment)
        torch.manual_seed(3)
        rows = [unroll(unroller, 5, at_random=k == 1) for k in range(4)]
        records = [unroller.records.step_type, unroller.records.reward]
        saved = unroller.state_dict()
        states = saved["time_step"], saved["state"], saved["transform_state"]
        assert (unroller._actor._program is not None) == (numpy_policy is not None)
        runs.append((rows, states, [torch.from_numpy(each) for each in records], torch.get_rng_state()))
    assert_equal(*runs)
    assert len(torch.cat([rows.time_step.step_type for rows in runs[0][0]]).unique()) == 3


@pytest.mark.parametrize("name", MEMORIES)
def test_unrolls_are_arrays_and_saved_states_are_tensors(name):
    unroller = resumable(name, 0)
    for _ in range(2):
        rows = unroller.unroll(4)
        carried = unroller.time_step, unroller._state, unroller._transform_state
        assert all(type(leaf) is np.ndarray for leaf in nest.leaves((carried, rows)))
        saved = unroller.state_dict()
        saved = saved["time_step"], saved["state"], saved["transform_state"]
        assert all(isinstance(leaf, torch.Tensor) for leaf in nest.leaves(saved))


@pytest.mark.parametrize(("name", "numpy_policy"), [
    ("memory", None), ("memory", 0), ("memory", 5), ("off-policy", 5), ("td3 with memory", 0), ("td3 with memory", 5),
    ("ppo nested", 5), ("dqn", None), ("dqn", 0),
])  # fmt: skip
def test_a_cut_and_resumed_run_is_bit_identical(name, numpy_policy):
    """Wherever the rows are cut: some columns have just ended, or begun."""
    length, cuts, num_unrolls, ends = 2, (1, 2, 3), 5, set()
    whole = resumable(name, numpy_policy)
    torch.manual_seed(3)
    expected, saved = [], []
    for k in range(num_unrolls):
        rows = nest.map(torch.clone, unroll(whole, length, at_random=k == 2))
        expected.append((rows, torch.from_numpy(whole.records.step_type), torch.get_rng_state()))
        saved.append(copy.deepcopy(whole.state_dict()))
        if k + 1 in cuts:
            ends |= set(whole.time_step.step_type.tolist())
    assert ends == {StepType.FIRST, StepType.MID, StepType.LAST}
    for cut_at in cuts:
        resumed = resumable(name, numpy_policy)
        resumed.load_state_dict(saved[cut_at - 1])
        torch.set_rng_state(expected[cut_at - 1][2])
        for k in range(cut_at, num_unrolls):
            rows = unroll(resumed, length, at_random=k == 2)
            assert_equal((rows, torch.from_numpy(resumed.records.step_type), torch.get_rng_state()), expected[k])
        assert (resumed._actor._program is None) == (numpy_policy is None)


def test_unroller_states_can_be_saved_to_a_file():
    unroller = make_unroller(MEMORIES["memory"], 0)
    unroll(unroller, 4)
    file = io.BytesIO()
    torch.save(saved := unroller.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert_equal(*((state["time_step"], state["state"], state["transform_state"]) for state in (loaded, saved)))


def test_an_unroll_is_unchanged_while_acting_continues():
    unroller = resumable("memory", 0)
    unrolls = [unroll(unroller, 4) for _ in range(2)]
    then = nest.map(torch.clone, unrolls)
    for _ in range(4):
        unroll(unroller, 4)
    assert_equal(unrolls, then)


# One actor beside another: rows made by hand.

FLOAT = specs.observation_spec(VECTOR)


def row(batch_size=B, step_type=StepType.MID):
    zeros = torch.zeros(batch_size)
    observation, kind = torch.randn(batch_size, 4), torch.full((batch_size,), step_type, dtype=torch.int32)
    return TimeStep(kind, zeros, zeros + 1, observation, None, torch.arange(batch_size, dtype=torch.int32))


class Simple(RLAlgorithm):
    """Acts with `act(self, observation)`."""

    on_policy = False

    def __init__(self, act, shape=(2,)):
        super().__init__(FLOAT, spaces.Box(-1, 1, shape), specs.reward_spec())
        torch.manual_seed(0)
        self.online = nn.Linear(4, 2)
        self.target = TargetNetwork(self.online, 0.5)
        self.register_buffer("offset", torch.zeros(2))
        self.count, self._act = 0, act

    def rollout_step(self, time_step, state):
        return AlgStep(self._act(self, time_step.observation), state)

    def train_step(self, experience, state):
        return AlgStep(info=self.online(experience.time_step.observation).square().sum(-1))

    def calc_loss(self, experience, info):
        return LossInfo(info)

    def after_update(self):
        self.target.update(self.online)
        self.offset.add_(1)


def actor_of(algorithm, numpy_policy, transforms=()):
    chain = Transforms(transforms, FLOAT, specs.reward_spec())
    actor = PolicyRunner(Actor(algorithm, chain), algorithm.initial_state(B), numpy_policy)
    states = chain.initial_state(B), algorithm.initial_state(B)

    @torch.no_grad()
    def act(time_step):
        step, _ = actor(time_step, *states)
        return nest.as_tensor(step.output)

    return actor, act, chain


def test_it_switches_after_so_many_calls():
    algorithm = Simple(lambda self, x: self.online(x))
    actor, act, _ = actor_of(algorithm, 3)
    for k in range(6):
        assert (actor._program is None, actor.num_calls) == (k <= 3, k)
        x = row()
        torch.testing.assert_close(act(x), algorithm.online(x.observation).detach())
    never, act, _ = actor_of(algorithm, None)
    act(row())
    assert never._program is None and never.num_calls == 1


@pytest.mark.parametrize("what", ["learner", "load_state_dict", "progress", "transforms"])
def test_weights_that_change_are_seen_at_once(what):
    algorithm = Simple(lambda self, x: self.online(x) + self.target(x) + self.offset + self.progress)
    learner = Learner(algorithm, learning_rate=0.1)
    transforms = [functools.partial(ObservationNormalizer, clip=3.0)]
    actor, act, chain = actor_of(algorithm, 0, transforms)
    x = row()
    before = act(x)
    assert actor._program is not None
    experience = nest.map(lambda leaf: leaf[None], x)
    for _ in range(2):
        if what == "learner":
            batch = Batch(Experience(experience, None, None, None), torch.ones(1, B, dtype=torch.bool))
            learner.train([Minibatches(batch, None)])
        elif what == "load_state_dict":
            other = Simple(lambda self, x: x)
            other.online.weight.data.copy_(algorithm.online.weight + 1)
            algorithm.load_state_dict(other.state_dict())
        elif what == "progress":
            algorithm.progress += 0.25
        else:
            chain.observe(nest.map(lambda leaf: leaf[None], row()), chain.initial_state(B), 0)
        after = act(x)
        assert (after - before).abs().max() > 1e-2
        with torch.no_grad():
            seen, _ = chain(x, chain.initial_state(B))
            torch.testing.assert_close(after, algorithm.rollout_step(seen, None).output)
        before = after
    assert actor._program is not None


def _counted(self, x):
    self.count += 1
    return self.online(x) + self.count


def test_python_counters_in_a_step_give_one_warning(caplog):
    algorithm = Simple(_counted)
    actor, act, _ = actor_of(algorithm, 2)
    for _ in range(20):
        act(row())
    [record] = warnings_in(caplog)
    assert "Simple acts differently in numpy" in record.message and "make the value a buffer" in record.message
    assert actor._program is None


def test_the_program_is_compared_before_it_acts(caplog):
    algorithm = Simple(_counted)
    actor, act, _ = actor_of(algorithm, 0)
    x = row()
    found = act(x)
    assert actor._program is None and len(warnings_in(caplog)) == 1
    torch.testing.assert_close(found, algorithm.online(x.observation).detach() + algorithm.count)


@pytest.mark.parametrize("period", [2, 3, 5])
def test_a_value_that_changes_now_and_then_is_noticed_too(caplog, period):
    """Powers of two alone would never meet every third call."""
    algorithm = Simple(lambda self, x: self.online(x) + (self.count % period == period - 1))
    actor, act, _ = actor_of(algorithm, 4)
    for _ in range(4 + period):
        x = row()
        found = act(x)
        with torch.no_grad():
            torch.testing.assert_close(found, algorithm.rollout_step(x, None).output)
        algorithm.count += 1
    assert len(warnings_in(caplog)) == 1 and actor._program is None


def test_a_change_much_later_is_noticed_at_the_next_look(caplog):
    algorithm = Simple(lambda self, x: self.online(x) + self.count)
    actor, act, _ = actor_of(algorithm, 0)
    for k in range(40):
        algorithm.count = int(k >= 20)
        act(row())
        assert (actor._program is None) == (k >= 32)
    assert len(warnings_in(caplog)) == 1


def test_a_buffer_that_is_rebound_is_noticed(caplog):
    algorithm = Simple(lambda self, x: self.online(x) + self.offset)
    actor, act, _ = actor_of(algorithm, 0)
    act(row())
    algorithm.offset = torch.ones(2)
    act(row())
    assert actor._program is None and len(warnings_in(caplog)) == 1


def test_inspection_draws_no_random_numbers():
    algorithm = Simple(lambda self, x: self.online(x) + torch.randn_like(x)[:, :2])
    found = []
    for numpy_policy in (None, 0):
        _, act, _ = actor_of(algorithm, numpy_policy)
        torch.manual_seed(4)
        found.append(torch.stack([act(row()) for _ in range(12)]))
    torch.testing.assert_close(*found)


def test_the_source_array_of_a_constant_may_be_written():
    algorithm = Simple(lambda self, x: self.online(x) + torch.from_numpy(self.table))
    algorithm.table = np.zeros(2, np.float32)
    actor, act, _ = actor_of(algorithm, 0)
    for k in range(20):
        algorithm.table[0] = k
        x = row()
        torch.testing.assert_close(act(x), algorithm.rollout_step(x, None).output.detach())
    assert actor._program is not None


def test_a_constant_that_changes_is_noticed(caplog):
    algorithm = Simple(lambda self, x: self.online(x) + torch.tensor([self.count, 2.0]))
    actor, act, _ = actor_of(algorithm, 0)
    for k in range(20):
        algorithm.count = int(k >= 9)
        act(row())
        assert (actor._program is None) == (k >= 16)
    [record] = warnings_in(caplog)
    assert "make the value a buffer" in record.message


HELD = torch.ones(4)
UNTRANSLATABLE = {
    "an operation without translation": (lambda self, x: torch.linalg.norm(x, dim=-1).erfinv(), ()),
    "a plain tensor": (lambda self, x: x + HELD, (4,)),
    "a look at a value": (lambda self, x: x if float(self.progress) < 2 else -x, (4,)),
    "a buffer that it writes": (lambda self, x: self.online(x) + self.offset.add_(1), (2,)),
    "a mean in bfloat16": (lambda self, x: x.bfloat16().mean(-1).float(), ()),
    "a scaled sum": (lambda self, x: torch.add(x, x, alpha=2.0), (4,)),
}


@pytest.mark.parametrize("name", UNTRANSLATABLE)
def test_what_cannot_be_translated_acts_through_torch_without_a_warning(name, caplog):
    algorithm, twin = (Simple(*UNTRANSLATABLE[name]) for _ in range(2))
    actor, act, _ = actor_of(algorithm, 1)
    _, expected, _ = actor_of(twin, None)
    for _ in range(5):
        x = row()
        assert torch.equal(act(x).nan_to_num(), expected(x).nan_to_num())
    assert actor._program is None and warnings_in(caplog) == []


@pytest.mark.parametrize("name", ["TorchDispatchMode", "reparametrize_module"])
def test_acting_falls_back_to_torch_if_a_private_name_moved(name, monkeypatch, caplog):
    algorithm = Simple(lambda self, x: self.online(x))
    actor, act, _ = actor_of(algorithm, 0)
    hide(monkeypatch, name)
    for _ in range(3):
        x = row()
        torch.testing.assert_close(act(x), algorithm.online(x.observation).detach())
    [record] = warnings_in(caplog)
    assert "Simple acts with torch, which is slower: torch" in record.message and actor.gave_up


def test_translating_a_step_leaves_modules_as_they_were():
    algorithm = Simple(lambda self, x: self.online(x) + self.offset)
    before = {name: id(value) for name, value in [*algorithm.named_parameters(), *algorithm.named_buffers()]}
    _, act, _ = actor_of(algorithm, 0)
    act(row())
    assert {name: id(value) for name, value in [*algorithm.named_parameters(), *algorithm.named_buffers()]} == before


def test_states_at_episode_starts_are_not_assumed_initial():
    """There the two are one tensor."""
    algorithm = Simple(lambda self, x: x, ())
    algorithm.rollout_step = lambda time_step, state: AlgStep(state, state + 1)
    state = torch.zeros(B)
    actor = PolicyRunner(Actor(algorithm, Transforms([], FLOAT, specs.reward_spec())), state, 0)
    for k in range(3):
        step, _ = actor(row(), (), state)
        assert actor._program is not None and step.output.tolist() == [k] * B
        state = step.state


# Whole runs.

SMALL = functools.partial(MLP, layers=(8,))
REPLAY = functools.partial(ReplayBatches, capacity=60, batch_size=4, warmup_env_steps=20)
TORSO = functools.partial(Torso, mlp=SMALL)
RUNS = {
    "ppo": (
        functools.partial(PPO, network=functools.partial(ActorCritic, actor_torso=TORSO, critic_torso=TORSO)),
        EpochBatches,
    ),
    "td3": (functools.partial(NOISY, critic=functools.partial(CriticEnsemble, layers=(8,))), REPLAY),
}


def make_trainer(root_dir, name, numpy_policy=30):
    algorithm, batches = RUNS[name]
    return Trainer(
        root_dir,
        algorithm=algorithm,
        environment=functools.partial(make_environment, TensorPointMass, num_envs=2, env_kwargs={"length": 6}),
        batches=batches,
        unroller=functools.partial(SyncUnroller, numpy_policy=numpy_policy),
        learner=functools.partial(Learner, learning_rate=1e-2),
        transforms=[functools.partial(FrameStack, num_frames=2), ObservationNormalizer],
        listeners=[CheckpointSaver(0)],
        unroll_length=5,
        num_iterations=14,
        device="cpu",
    )


def parts_of(trainer):
    state = trainer.state_dict()
    return {name: state[name] for name in ("algorithm", "transforms", "learner", "unroller", "rng")}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_resumed_across_the_switch_acts_bit_for_bit(tmp_path, name):
    whole = make_trainer(tmp_path / "whole", name)
    whole.train()
    assert whole.unroller._actor._program is not None
    for stop in (3, 9) if name == "ppo" else (9,):  # before the switch and after it
        cut = make_trainer(tmp_path / f"cut{stop}", name)
        cut.start()
        for report in cut.iterate():
            if report.iterations == stop:
                break
        assert (cut.unroller._actor._program is None) == (stop == 3)
        cut.save()
        cut.close()
        torch.manual_seed(99)
        resumed = make_trainer(tmp_path / f"cut{stop}", name)
        resumed.start()
        assert resumed.unroller._actor.num_calls == cut.unroller._actor.num_calls > 0
        resumed.train()
        one, other = parts_of(whole), parts_of(resumed)
        for path, a, b in zip(nest.paths(one), nest.leaves(one), nest.leaves(other)):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, path


def test_giving_up_compilation_is_saved_in_the_checkpoint(tmp_path):
    unroller = make_unroller(CASES["dqn"], 0)
    step = unroller._algorithm.rollout_step
    count = [0.0]

    def counted(time_step, state):
        count[0] += 1
        found = step(time_step, state)
        return found._replace(output=(found.output + int(count[0])) % 3)

    unroller._algorithm.rollout_step = counted
    unroll(unroller, 4)
    assert unroller._actor.gave_up and unroller._actor._program is None
    resumed = make_unroller(CASES["dqn"], 0)
    resumed.load_state_dict(unroller.state_dict())
    unroll(resumed, 4)
    assert resumed._actor.gave_up and resumed._actor._program is None


def test_parameters_that_a_learner_puts_elsewhere_are_acted_with(caplog):
    algorithm = Simple(lambda self, x: self.online(x))
    actor, act, _ = actor_of(algorithm, 0)
    act(row())
    before = algorithm.online.weight.data_ptr()
    updates = Learner(algorithm, learning_rate=0.1)  # lays all parameters in one vector
    assert algorithm.online.weight.data_ptr() != before and updates is not None
    for _ in range(3):
        with torch.no_grad():
            algorithm.online.weight += 1
        actor.refresh()
        x = row()
        torch.testing.assert_close(act(x), algorithm.online(x.observation).detach())
    assert actor._program is not None and not warnings_in(caplog)
