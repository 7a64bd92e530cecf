"""Buffers to which code assigns new tensors: their tensors stay, with the new values."""

import functools

import pytest
import torch
from gymnasium import spaces
from torch import nn

from alfish import specs
from alfish.algorithms.ppo import PPO
from alfish.algorithms.sac import SAC
from alfish.data import StepType, TimeStep
from alfish.environments import make_environment
from alfish.environments.toy import TensorPointMass
from alfish.errors import UsageError
from alfish.learner.batches import EpochBatches, ReplayBatches
from alfish.learner.learner import Learner
from alfish.networks import MLP, ActorCritic, CriticEnsemble, Torso
from alfish.networks.buffers import BufferKeeper, UnsavedAttributes
from alfish.training.listener import Listener
from alfish.training.trainer import Trainer
from alfish.transforms import Transform, Transforms
from alfish.unrollers import AsyncUnroller

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's compiler, at import


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("absent", None)
        self.inner = nn.BatchNorm1d(3)


class TestBufferKeeper:
    def test_a_replaced_tensor_returns_with_the_new_values(self):
        module = Counts()
        mean, tracked = module.mean, module.inner.num_batches_tracked
        keeper = BufferKeeper(module)
        module.mean = module.mean + torch.ones(2, requires_grad=True)
        module.inner.num_batches_tracked = torch.tensor(7)
        keeper.restore()
        assert module.mean is mean and mean.tolist() == [1, 1] and not mean.requires_grad
        assert module.inner.num_batches_tracked is tracked and tracked == 7

    def test_remembered_tensors_are_kept_from_then_on(self):
        module = Counts()
        keeper = BufferKeeper(module)
        module.mean = new = torch.ones(2)
        keeper.remember()
        module.mean = 2 * module.mean
        keeper.restore()
        assert module.mean is new and new.tolist() == [2, 2]

    def test_a_buffer_without_tensor_stays_as_it_is(self):
        module = Counts()
        keeper = BufferKeeper(module)
        module.absent, module.mean = torch.ones(1), None
        keeper.restore()
        assert module.absent is not None and module.mean is None

    @pytest.mark.parametrize(
        "new, words",
        [
            (torch.zeros(3), r"mean has changed from \[2\] torch.float32 to \[3\]"),
            (torch.zeros(2).long(), "to .*int64"),
        ],
    )
    def test_another_shape_or_dtype_is_refused(self, new, words):
        module = Counts()
        keeper = BufferKeeper(module)
        module.mean = new
        with pytest.raises(UsageError, match=words):
            keeper.restore()


class Values(nn.Module):
    def __init__(self):
        super().__init__()
        self.number, self.constant, self.flag, self.written = 1.5, 3, False, 0
        self.assigned, self.in_place, self.fixed = torch.zeros(2), torch.zeros(2), torch.ones(1)
        self.register_buffer("mean", torch.zeros(2))


class Saved(Values):
    def get_extra_state(self):
        return {"number": self.number}


class TestUnsavedAttributes:
    def test_each_attribute_that_has_changed_is_named_once(self):
        module = Values()
        attributes = UnsavedAttributes([nn.Sequential(module)], {"written"})
        assert list(attributes.changed()) == []
        module.number, module.flag, module.written, module.mean = 0.5, True, 4, torch.ones(2)
        module.in_place += 1
        module.assigned = module.assigned + 1
        module.eval()
        found = sorted(attributes.changed())
        names = ["assigned", "in_place", "number"]
        assert [sentence.split()[0] for sentence in found] == [f"Values.{name}" for name in names]
        assert "has changed from 1.5 to 0.5, but is not a buffer" in found[2] and "torch.tensor(1.5)" in found[2]
        assert list(attributes.changed()) == []

    def test_modules_with_extra_state_are_left_out(self):
        module = Saved()
        attributes = UnsavedAttributes([module], ())
        module.number = 2.0
        assert list(attributes.changed()) == []


class Decaying(PPO):
    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.scale = 1.0

    def after_update(self):
        self.scale *= 0.5


def test_a_run_says_which_attributes_are_not_saved(tmp_path):
    trainer = Trainer(
        tmp_path,
        algorithm=functools.partial(Decaying, network=SMALL),
        environment="CartPole-v1",
        batches=functools.partial(EpochBatches, num_epochs=1),
        unroll_length=8,
        num_iterations=3,
        summary_period=1,
        listeners=[],
        device="cpu",
    )
    trainer.train()
    assert (tmp_path / "log.txt").read_text().count("Decaying.scale has changed from 1.0 to ") == 1


class Level(SAC):
    """Acts with a buffer to which `after_iteration` assigns a tensor."""

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.register_buffer("level", torch.tensor(0.0))

    def rollout_step(self, time_step, state):
        step = super().rollout_step(time_step, state)
        return step._replace(output=torch.zeros_like(step.output) + self.level)

    def after_iteration(self, experience):
        self.level = self.level + 0.05


class LevelInPlace(Level):
    def after_iteration(self, experience):
        self.level.add_(0.05)


def actions_of(root_dir, algorithm):
    """The last action of each unroll of a worker."""
    trainer = Trainer(
        root_dir,
        algorithm=functools.partial(algorithm, critic=functools.partial(CriticEnsemble, layers=(8,))),
        environment=functools.partial(make_environment, TensorPointMass, num_envs=2),
        unroller=functools.partial(AsyncUnroller, num_workers=1, mode="lockstep", unroll_length=4),
        batches=functools.partial(ReplayBatches, capacity=200, batch_size=4, warmup_env_steps=8),
        learner=functools.partial(Learner, compile=False),
        unroll_length=4,
        num_iterations=6,
        listeners=[],
        device="cpu",
    )
    trainer.start()
    acted, unroll = [], trainer.unroller.unroll

    def recorded(*arguments, **options):
        experience = unroll(*arguments, **options)
        acted.append(float(experience.action.reshape(-1)[-1]))
        return experience

    trainer.unroller.unroll = recorded
    trainer.train()
    return acted


def test_workers_act_with_assigned_buffers(tmp_path):
    found = actions_of(tmp_path / "assigned", Level)
    assert found == actions_of(tmp_path / "in place", LevelInPlace) and found[-1] > found[-2] > 0


class Assigned(Transform):
    """Shifts observations by their largest value so far, with statistics that are assigned."""

    in_graphs = True

    def __init__(self, observation_spec, reward_spec):
        super().__init__(observation_spec, reward_spec)
        self.register_buffer("largest", torch.zeros(()))

    def transform(self, time_step, state):
        return time_step._replace(observation=time_step.observation - self.largest)

    def observe(self, time_step):
        self.largest = torch.maximum(self.largest, time_step.observation.amax())


def test_statistics_of_transforms_stay_the_same_tensors(tmp_path):
    trainer = Trainer(
        tmp_path,
        algorithm=functools.partial(PPO, network=SMALL),
        environment=functools.partial(make_environment, TensorPointMass, num_envs=2),
        batches=functools.partial(EpochBatches, num_epochs=1),
        transforms=[Assigned],
        unroll_length=8,
        num_iterations=3,
        listeners=[],
        device="cpu",
    )
    before = trainer.transforms.others[0].largest
    trainer.train()
    assert trainer.transforms.others[0].largest is before and before > 0


TORSO = functools.partial(Torso, mlp=functools.partial(MLP, layers=(8,)))
SMALL = functools.partial(ActorCritic, actor_torso=TORSO, critic_torso=TORSO)


class Cooling(PPO):
    """Weighs its loss by a buffer to which a hook assigns a tensor."""

    hook = "after_update"

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings, network=SMALL)
        self.register_buffer("weight", torch.tensor(1.0))
        self.register_buffer("copy", torch.tensor(1.0))

    def calc_loss(self, experience, info):
        found = super().calc_loss(experience, info)
        loss = found.loss * self.weight
        if self.hook == "calc_loss":
            self.weight = self.copy = 0.8 * self.weight + 0.01 * info.value.detach().mean()
        return found._replace(loss=loss)

    def after_update(self):
        if self.hook == "after_update":
            self.weight = 0.8 * self.weight

    def after_iteration(self, experience):
        if self.hook == "after_iteration":
            self.weight = 0.8 * self.weight


class Cools(Listener):
    def after_iteration(self, run, report):
        if run.algorithm.hook == "listener":
            run.algorithm.weight = 0.8 * run.algorithm.weight


@pytest.mark.parametrize("hook", ["calc_loss", "after_update", "after_iteration", "listener"])
def test_compiled_updates_read_assigned_buffers(tmp_path, interpreted, hook):
    found = []
    for compile in (False, True):
        algorithm = type("Cooling", (Cooling,), {"hook": hook})
        trainer = Trainer(
            tmp_path / str(compile),
            algorithm=algorithm,
            environment=functools.partial(make_environment, TensorPointMass, num_envs=2),
            batches=functools.partial(EpochBatches, num_epochs=2, minibatch_size=8),
            learner=functools.partial(Learner, compile=compile, learning_rate=1e-2),
            unroll_length=8,
            num_iterations=6,
            listeners=[Cools()],
            device="cpu",
        )
        trainer.train()
        parts = [*trainer.algorithm.parameters(), trainer.algorithm.weight, trainer.algorithm.copy]
        found.append(torch.cat([part.detach().reshape(-1) for part in parts]))
    assert not trainer.learner.is_plain and trainer.algorithm.weight < 0.5
    assert torch.allclose(*found, atol=1e-5)


def test_transforms_keep_tensors_after_a_move_to_another_place():
    transforms = Transforms([Assigned], spaces.Box(-9, 9, (4,)), specs.reward_spec())
    transforms.double().float()  # torch replaces the buffers
    before = transforms.others[0].largest
    rows = torch.full((2, 3, 4), 5.0)
    step = _rows(rows)
    transforms.observe(step, transforms.initial_state(3), 0)
    assert transforms.others[0].largest is before and before == 5


def _rows(observation):
    leading = observation.shape[:2]
    kind = torch.full(leading, StepType.MID, dtype=torch.int32)
    return TimeStep(kind, torch.zeros(leading), torch.ones(leading), observation, torch.zeros(leading), kind * 0)
