"""`HostUnroller`: the rows of `SyncUnroller`, from weights that are a fixed number of unrolls old."""

import functools

import pytest
import torch
from far_device import FarDevice
from scripted import ScriptedOffPolicy, assert_equal
from toys import OneState

from alfish import host, nest
from alfish.algorithms.acting import changing_tensors, explorers
from alfish.algorithms.appo import APPO
from alfish.algorithms.composition import RND, Composed
from alfish.algorithms.dqn import DQN
from alfish.algorithms.ppo import PPO
from alfish.algorithms.sac import SAC
from alfish.data import AlgStep
from alfish.environments import TensorEnvironment, make_environment
from alfish.environments.toy import TensorPointMass
from alfish.errors import UsageError
from alfish.learner.batches import EpochBatches, ReplayBatches
from alfish.learner.learner import Learner
from alfish.networks import MLP, CriticEnsemble, QNetwork, Torso
from alfish.training.listeners import CheckpointSaver
from alfish.training.trainer import Trainer
from alfish.transforms import ObservationNormalizer, RewardNormalizer, Transforms
from alfish.unrollers import HostUnroller, SyncUnroller

MLP_8 = functools.partial(MLP, layers=(8,))
TORSO = functools.partial(Torso, mlp=MLP_8)
CARTPOLE, PENDULUM = "alfish/CartPole-v1", "alfish/Pendulum-v1"  # they save their episodes
SMALL_SAC = functools.partial(SAC, actor_mlp=MLP_8, critic=functools.partial(CriticEnsemble, layers=(8,)))
Q_LEARNING = functools.partial(DQN, q_network=functools.partial(QNetwork, torso=TORSO))
NOISY = functools.partial(DQN, q_network=functools.partial(QNetwork, torso=TORSO, noisy=True))


def trainer_of(root_dir, unroller, algorithm=Q_LEARNING, env_id=CARTPOLE, **settings):
    batches = functools.partial(ReplayBatches, capacity=100, batch_size=8, warmup_env_steps=8)
    return Trainer(
        root_dir,
        **{
            "algorithm": algorithm,
            "environment": functools.partial(make_environment, env_id, 2, leave_out=()),
            "unroller": unroller,
            "batches": batches,
            "learner": functools.partial(Learner, compile=False),
            "unroll_length": 1,
            "num_env_steps": 64,
            "listeners": [CheckpointSaver(16)],
            "seed": 3,
            "device": "cpu",
            **settings,
        },
    )


ON_POLICY = {
    "batches": functools.partial(EpochBatches, num_epochs=2, minibatch_size=8),
    "unroll_length": 4,
    "transforms": [ObservationNormalizer, RewardNormalizer],
}


@pytest.mark.parametrize("numpy_policy", [None, 0])
@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [(Q_LEARNING, {}), (PPO, ON_POLICY)],
    ids=["dqn", "ppo"],
)
def test_without_a_lag_training_equals_that_of_the_sync_unroller(tmp_path, algorithm, settings, numpy_policy):
    states = []
    for kind, lag in ((SyncUnroller, {}), (HostUnroller, {"lag": 0})):
        unroller = functools.partial(kind, numpy_policy=numpy_policy, **lag)
        trainer = trainer_of(tmp_path / kind.__name__, unroller, algorithm, **settings)
        trainer.train()
        states.append(changing_tensors(trainer.algorithm, trainer.transforms))
        assert trainer.clock.updates > 10
    assert_equal(*states)


def unroller_of(algorithm, lag, factories=()):
    environment = make_environment(OneState, 2, seed=0)
    transforms = Transforms(factories, environment.observation_spec, environment.reward_spec)
    torch.manual_seed(0)
    made = algorithm(transforms.observation_spec, environment.action_spec, environment.reward_spec)
    return HostUnroller(environment, made, transforms, lag=lag), made


class Published(ScriptedOffPolicy):
    """Always takes the action in the buffer `choice`, and shows it in its info."""

    def __init__(self, *specs):
        super().__init__(*specs)
        self.register_buffer("choice", torch.zeros((), dtype=torch.int64))
        self.register_buffer("unread", torch.zeros(1000))

    def rollout_step(self, time_step, state):
        action = self.choice.expand(len(time_step.step_type)).clone()
        return AlgStep(action, state, {"choice": action})


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_acts_with_the_weights_of_lag_unrolls_ago(lag):
    unroller, algorithm = unroller_of(Published, lag)
    acted, versions = [], []
    for number in range(6):
        algorithm.choice.fill_(number % 2)
        experience = unroller.unroll(2)
        acted += nest.tensors(experience.info["choice"]).unique().tolist()
        versions.append(experience.policy_version.tolist())
        unroller.publish()
    expected = [max(0, number - lag) for number in range(6)]
    assert acted == [number % 2 for number in expected]
    assert versions == [[number] * 2 for number in expected]


def test_reads_only_the_tensors_that_the_policy_reads(monkeypatch):
    read = []

    class Reader(host.PackedReader):
        def __init__(self, tensors):
            super().__init__(tensors)
            read.append([list(tensor.shape) for tensor in tensors])

    monkeypatch.setattr(host, "PackedReader", Reader)
    unroller, _ = unroller_of(Published, 1)
    for _ in range(3):
        unroller.unroll(1)
    assert read == [[[], [], [1000]], [[]]]  # first progress, `choice` and `unread`, then only `choice`


class Branching(Published):
    """Acts with `unread` once `branches` is set, which a trace does not see."""

    branches = False

    def rollout_step(self, time_step, state):
        step = super().rollout_step(time_step, state)
        return step._replace(output=self.unread[:2].long()) if self.branches else step


def test_a_policy_that_gives_up_numpy_acts_with_whole_weights():
    unroller, algorithm = unroller_of(Branching, 2)
    algorithm.choice.fill_(1)
    unroller.unroll(1)
    algorithm.unread.fill_(1)  # not read, because a numpy program acts
    for _ in range(3):
        unroller.unroll(1)
    unroller._algorithm.branches = True
    unroller.unroll(1)
    assert unroller._actor.gave_up
    acted = [nest.tensors(unroller.unroll(1).action).tolist() for _ in range(3)]
    assert acted == [[[1, 1]]] * 3


@pytest.mark.parametrize("numpy_policy", [None, 0])
def test_a_resumed_run_with_a_lag_equals_an_uninterrupted_one(tmp_path, numpy_policy):
    unroller = functools.partial(HostUnroller, numpy_policy=numpy_policy, lag=2)
    states = []
    for name, budgets in (("whole", [64]), ("parts", [32, 64])):
        for budget in budgets:
            trainer = trainer_of(tmp_path / name, unroller, SMALL_SAC, PENDULUM, stop_at=budget)
            trainer.train()
        newest = trainer.unroller.state_dict()["time_step"]
        states.append([*changing_tensors(trainer.algorithm, trainer.transforms), *nest.leaves(newest)])
    assert_equal(*states)


def test_a_resumed_run_may_have_a_smaller_lag():
    unroller, algorithm = unroller_of(Published, 3)
    versions = []
    for number in range(10):
        if number == 6:
            state = unroller.state_dict()
            unroller, _ = unroller_of(Published, 1)
            unroller.load_state_dict(state)
        versions.append(int(unroller.unroll(1).policy_version[0]))
        unroller.publish()
    assert versions == [0, 0, 0, 0, 1, 2, 5, 6, 7, 8]


def test_a_resumed_run_that_acts_in_torch_has_whole_weights():
    unroller, algorithm = unroller_of(Published, 2)
    algorithm.unread.fill_(5)
    for _ in range(4):
        unroller.unroll(1)
    state = unroller.state_dict()
    other, trained = unroller_of(functools.partial(Published), 2)
    trained.unread.fill_(5)
    other = HostUnroller(other.environment, trained, other._transforms, numpy_policy=None, lag=2)
    other.load_state_dict(state)
    other._algorithm.unread.zero_()
    other.unroll(1)
    assert (other._algorithm.unread == 5).all()


def test_a_curriculum_has_the_progress_of_the_run_at_the_first_reset():
    seen = []
    unroller, algorithm = unroller_of(Published, 1)
    unroller.environment.follows_progress = True
    unroller.environment.set_progress = seen.append
    algorithm.progress.fill_(0.5)
    unroller.unroll(1)
    assert seen == [0.5, 0.5]


def test_a_run_on_the_cpu_is_told_that_the_copy_is_for_nothing():
    unroller, _ = unroller_of(Published, 1)
    lines = []
    unroller.log = lines.append
    unroller.unroll(1)
    unroller.unroll(1)
    assert lines == ["HostUnroller acts with a copy of the policy, but a CPU trains; SyncUnroller needs no copy"]


def test_a_lag_changes_training(tmp_path):
    states = []
    for lag in (0, 2):
        trainer = trainer_of(tmp_path / str(lag), functools.partial(HostUnroller, lag=lag), SMALL_SAC, PENDULUM)
        trainer.train()
        states.append(list(trainer.algorithm.parameters()))
    assert not all(map(torch.equal, *states))


@pytest.mark.parametrize(("algorithm", "lag"), [(PPO, 0), (Q_LEARNING, 1)])
def test_the_default_lag_is_1_off_policy_only(algorithm, lag):
    assert unroller_of(algorithm, None)[0]._lag == lag


def test_refuses_a_lag_for_an_algorithm_that_needs_its_own_rows():
    with pytest.raises(UsageError, match="HostUnroller.lag is 1, but PPO is on-policy and .* set it to 0"):
        unroller_of(PPO, 1)
    unroller_of(APPO, 1)


def test_refuses_environments_on_a_device():
    with FarDevice() as far:
        env = TensorPointMass(2, 5)
        env.device = far.device
        environment = TensorEnvironment(env, seed=0)
        transforms = Transforms((), environment.observation_spec, environment.reward_spec)
        algorithm = SAC(environment.observation_spec, environment.action_spec, environment.reward_spec)
        with pytest.raises(UsageError, match="HostUnroller acts on the CPU, but the rows of .* are on meta; bind"):
            HostUnroller(environment, algorithm, transforms)


def test_tensors_that_modules_share_are_shared_in_the_copy():
    with FarDevice() as far:
        environment = make_environment(OneState, 2, seed=0)
        transforms = Transforms((), environment.observation_spec, environment.reward_spec)
        specs = environment.observation_spec, environment.action_spec, environment.reward_spec
        algorithm = Composed(*specs, algorithm=Q_LEARNING, rewards=[RND]).to(far.device)
        progress = torch.zeros((), dtype=torch.float64, device=far.device)
        algorithm.progress = algorithm.algorithm.progress = progress
        own = HostUnroller(environment, algorithm, transforms)._algorithm
        assert own.progress is own.algorithm.progress and own.progress.device.type == "cpu"


def test_the_copy_stays_on_the_cpu_and_in_evaluation_mode():
    with FarDevice() as far:
        environment = make_environment(OneState, 2, seed=0)
        transforms = Transforms((), environment.observation_spec, environment.reward_spec)
        algorithm = NOISY(environment.observation_spec, environment.action_spec, environment.reward_spec).to(far.device)
        algorithm.tell_progress(0.5)
        unroller = HostUnroller(environment, algorithm, transforms, lag=0)
        own = unroller._algorithm
        assert {tensor.device.type for tensor in changing_tensors(own, unroller._transforms)} == {"cpu"}
        assert own is not algorithm and algorithm.training and not own.training
        assert all(module.training for module in explorers(own)) and explorers(own)
        algorithm.progress.fill_(0.25)
        unroller.unroll(1)
        assert own.progress_number() == 0.25  # schedules of the copy follow the run, not the moment of the copy
