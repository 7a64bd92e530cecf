"""How warm-up acts: by the algorithm's `random_action`, whoever steps the environments."""

import functools

import pytest
import torch
from scripted import unroll
from toys import Stamped
from worker_parts import KeepingToMask, Masked, SeeingOffPolicy

from alfish import specs
from alfish.data import AlgStep
from alfish.environments import TensorEnvironment, make_environment
from alfish.environments.toy import TensorPointMass
from alfish.errors import UsageError
from alfish.learner.batches import ReplayBatches
from alfish.training.trainer import Trainer
from alfish.transforms import Transform, Transforms
from alfish.unrollers import AsyncUnroller, SyncUnroller, Workers

IN_WORKERS = functools.partial(
    AsyncUnroller,
    num_workers=1,
    mode="lockstep",
    max_env_errors=None,
    workers=functools.partial(Workers, close_timeout=2.0),
)


@pytest.mark.parametrize("unroller", [SyncUnroller, IN_WORKERS])
def test_warm_up_keeps_to_the_mask_of_the_observation(tmp_path, unroller):
    """The environment raises at an action that it does not take."""
    trainer = Trainer(
        tmp_path,
        algorithm=KeepingToMask,
        environment=functools.partial(make_environment, Masked, num_envs=2),
        unroller=unroller,
        batches=functools.partial(ReplayBatches, capacity=500, batch_size=8, warmup_env_steps=100),
        listeners=[],
        unroll_length=8,
        num_iterations=12,
        device="cpu",
    )
    trainer.train()
    step = trainer.batches.buffer.read(torch.tensor([0, 1]), torch.arange(80)[:, None].expand(-1, 2)).time_step
    taken = step.prev_action[1:][step.step_type[1:] != 0]
    first = step.observation["mask"][:-1].long().argmax(-1)[step.step_type[1:] != 0]
    both = torch.unique(taken[:80] == first[:80])
    assert both.tolist() == [False, True]  # neither the policy's alone


class Plus(Transform):
    """Adds 1000 to what networks see."""

    def transform(self, time_step, state):
        return time_step._replace(observation=time_step.observation + 1000)


class Telling(SeeingOffPolicy):
    """Draws one of its actions, by what it sees."""

    def random_action(self, time_step):
        self.seen = time_step.observation
        assert not torch.is_grad_enabled()
        return torch.full((len(time_step.step_type),), 2)


def _sync(environment, algorithm, factories=()):
    transforms = Transforms(factories, environment.observation_spec, environment.reward_spec)
    made = algorithm(transforms.observation_spec, environment.action_spec, environment.reward_spec)
    return SyncUnroller(environment, made, transforms), made


def test_it_sees_what_networks_see():
    unroller, algorithm = _sync(make_environment(Stamped, num_envs=3), Telling, [Plus])
    rows = unroll(unroller, 4, at_random=True)
    assert rows.action.tolist() == [[2] * 3] * 4
    assert torch.equal(algorithm.seen, rows.time_step.observation[-1] + 1000)
    assert not torch.equal(unroll(unroller, 4).action, rows.action)


def test_by_default_it_is_a_uniform_draw_from_torchs_generator():
    unroller, algorithm = _sync(make_environment(Stamped, num_envs=3), SeeingOffPolicy)
    torch.manual_seed(4)
    found = unroll(unroller, 5, at_random=True).action
    torch.manual_seed(4)
    assert torch.equal(found, torch.stack([specs.sample(algorithm.action_spec, 3) for _ in range(5)]))


class Pulling(SeeingOffPolicy):
    def rollout_step(self, time_step, state):
        return AlgStep(torch.zeros(len(time_step.reward), 1), state)

    def random_action(self, time_step):
        return time_step.observation[:, :1].sign()


def test_tensor_environments_receive_equal_calls():
    unroller, _ = _sync(TensorEnvironment(TensorPointMass(4), seed=0), Pulling)
    rows = unroll(unroller, 6, at_random=True)
    assert torch.equal(rows.action, rows.time_step.observation[..., :1].sign()) and rows.action.any()


class Wrong(SeeingOffPolicy):
    def random_action(self, time_step):
        return torch.zeros(len(time_step.step_type))


def test_what_is_not_an_action_is_refused_in_a_sentence():
    unroller, _ = _sync(make_environment(Stamped, num_envs=3), Wrong)
    with pytest.raises(UsageError) as error:
        unroll(unroller, 2, at_random=True)
    assert str(error.value) == (
        "random_action of Wrong returned a tensor of shape [3] and dtype float32 as action; Discrete(3) asks for a "
        "tensor of shape [3] and dtype int64"
    )
