"""The previous action and reward as parts of the observation."""

import functools

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from toys import Bandit, NestedBandit

from alfish import nest, specs
from alfish.algorithms.ppo import PPO
from alfish.data import StepType, TimeStep
from alfish.environments import make_environment
from alfish.environments.toy import HiddenArm
from alfish.errors import UsageError
from alfish.learner.batches import EpochBatches
from alfish.learner.learner import Learner
from alfish.networks import MLP, ActorCritic, Torso
from alfish.training.policy import Policy
from alfish.training.trainer import Trainer
from alfish.transforms import PreviousStep, RewardScale, Transforms
from alfish.unrollers import SyncUnroller
from alfish.unrollers.policy_runner import PolicyRunner

FIRST, MID, LAST = StepType.FIRST, StepType.MID, StepType.LAST
SMALL = functools.partial(MLP, layers=(8,))
TORSO = functools.partial(Torso, mlp=SMALL)
NETWORK = functools.partial(ActorCritic, actor_torso=TORSO, critic_torso=TORSO)


def rows(action, reward, step_type, observation=None):
    """`[T, 1]` rows."""
    action, reward = nest.map(lambda leaf: torch.as_tensor(leaf).unsqueeze(1), (action, torch.as_tensor(reward)))
    step_type = torch.tensor(step_type, dtype=torch.int32).unsqueeze(1)
    observation = torch.zeros(*step_type.shape, 1) if observation is None else observation
    return TimeStep(step_type, reward, torch.ones(step_type.shape), observation, action, step_type)


def test_actions_are_encoded_and_0_in_the_first_row():
    action_space = Dict(
        a=Discrete(3, start=5), b=Tuple([Box(-2, 6, (2,)), MultiDiscrete([2, 2])]),
        c=MultiBinary(2),
    )  # fmt: skip
    transform = PreviousStep(Box(0, 1, (1,)), specs.reward_spec(), specs.action_spec(action_space))
    leaves = {"a": [2, 0, 2], "b": ([[0.0, 0.0], [-1.0, 0.5], [0.0, 0.0]], [[0, 0], [1, 0], [1, 1]])}
    action = {
        "a": torch.tensor(leaves["a"]), "b": tuple(torch.tensor(part) for part in leaves["b"]),
        "c": torch.tensor([[0, 0], [1, 0], [0, 0]], dtype=torch.int8),
    }  # fmt: skip
    given = rows(action, [0.0, 3.0, 9.0], [FIRST, MID, FIRST])
    found = transform.transform(given, None).observation
    assert found["prev_action"].squeeze(1).tolist() == [
        [0] * 11,
        [1, 0, 0] + [-1, 0.5] + [0, 1, 1, 0] + [1, 0],
        [0] * 11,
    ]
    assert found["prev_reward"].squeeze(1).tolist() == [[0], [3], [0]]
    spec = transform.observation_spec
    assert {name: leaf.shape for name, leaf in spec.items()} == {
        "observation": (1,), "prev_action": (11,), "prev_reward": (1,)
    }  # fmt: skip


def test_a_vector_reward_leaf_has_the_units_of_its_transform_position():
    action_spec = specs.action_spec(Discrete(2))
    given = rows(torch.tensor([0, 1]), [[0.0, 0.0], [1.0, 2.0]], [FIRST, LAST])
    behind, before = functools.partial(RewardScale, scale=10.0), PreviousStep
    for factories, expected in (([before, behind], [1, 2]), ([behind, before], [10, 20])):
        chain = Transforms(factories, Box(0, 1, (1,)), specs.reward_spec(2), action_spec)
        seen = chain.transform(given, chain.initial_state(1))
        assert seen.observation["prev_reward"][1, 0].tolist() == expected
        assert seen.reward[1, 0].tolist() == [10, 20]


@pytest.mark.parametrize("part, leaves", [({"reward": False}, {"prev_action"}), ({"action": False}, {"prev_reward"})])
def test_each_leaf_may_be_left_out_and_dict_leaves_stay(part, leaves):
    spec = {"x": Box(0, 1, (1,)), "mask": Discrete(2)}
    transform = PreviousStep(spec, specs.reward_spec(), specs.action_spec(Discrete(2)), **part)
    assert set(transform.observation_spec) == {"x", "mask"} | leaves
    given = rows(torch.tensor([1]), [1.0], [MID], {"x": torch.ones(1, 1, 1), "mask": torch.ones(1, 1)})
    assert set(transform.transform(given, None).observation) == {"x", "mask"} | leaves
    assert set(given.observation) == {"x", "mask"}


def test_settings_that_do_not_fit_are_refused():
    arguments = specs.reward_spec(), specs.action_spec(Discrete(2))
    with pytest.raises(UsageError, match="are both False; leave the transform out"):
        PreviousStep(Box(0, 1, (1,)), *arguments, action=False, reward=False)
    with pytest.raises(
        UsageError,
        match="PreviousStep adds the leaf 'prev_reward', but the observation already has a leaf of this name",
    ):
        PreviousStep({"prev_reward": Box(0, 1, (1,))}, *arguments)


@pytest.mark.parametrize(
    "env_id, kwargs", [(Bandit, {"action": "box"}), (NestedBandit, {"nested_action": True, "image_size": 8})]
)
def test_networks_see_in_replay_what_they_saw_while_acting(env_id, kwargs):
    """Every row of every window, whatever ended and began in it."""
    environment = make_environment(env_id, num_envs=3, env_kwargs=kwargs)
    seen = {}

    class Watching(PreviousStep):
        def forward(self, time_step, state):
            after, state = super().forward(time_step, state)
            seen.setdefault("rows", []).append(after.observation)
            return after, state

    torch.manual_seed(0)
    algorithm, chain = parts_of(environment, PPO, Watching)
    unroller = SyncUnroller(environment, algorithm, chain, numpy_policy=None)
    unroll = nest.tensors(unroller.unroll(9))
    trained = chain.transform(unroll.time_step, unroll.transform_state)
    acted = nest.stack(seen["rows"])
    for name in ("prev_action", "prev_reward"):
        torch.testing.assert_close(trained.observation[name], acted[name], rtol=0, atol=0)
    first = unroll.time_step.step_type == FIRST
    assert first[1:].any() and not trained.observation["prev_action"][first].any()
    assert trained.observation["prev_action"][~first].any(-1).all()
    assert trained.observation["prev_reward"][~first].any()


def test_policies_with_box_actions_act_in_numpy():
    environment = make_environment(Bandit, num_envs=2, env_kwargs={"action": "box"})
    made, chain = parts_of(environment, functools.partial(PPO, network=NETWORK))
    unroller = SyncUnroller(environment, made, chain)
    unroller.unroll(4)
    assert unroller._actor._program is not None


def parts_of(environment, algorithm, factory=PreviousStep):
    chain = Transforms([factory], environment.observation_spec, environment.reward_spec, environment.action_spec)
    return algorithm(chain.observation_spec, environment.action_spec, chain.reward_spec), chain


class TestPolicy:
    def make(self, algorithm, factory=PreviousStep):
        environment = make_environment(HiddenArm)
        return Policy(
            *parts_of(environment, algorithm, factory), environment.observation_space, environment.action_space
        )

    def test_it_receives_the_reward_of_its_last_action(self):
        policy, one = self.make(Repeating), np.ones(1, np.float32)
        assert policy.act(one) == 0  # its first action, whatever the reward before it was
        assert policy.act(one, reward=1.0) == 0
        assert policy.act(one, reward=0.0) == 1
        assert policy.act(one, reward=1.0) == 1
        assert policy.act(one, reward=1.0, first=True) == 0

    def test_rows_have_rewards_of_their_own(self):
        policy, ones = self.make(Repeating), np.ones((3, 1), np.float32)
        assert policy.act(ones, batched=True).tolist() == [0, 0, 0]
        assert policy.act(ones, batched=True, reward=[1, 0, 0], first=[False, False, True]).tolist() == [0, 1, 0]
        with pytest.raises(ValueError, match=r"reward has shape \[2\], but \[3\] is expected"):
            policy.act(ones, batched=True, reward=[1, 0])

    def test_transforms_receive_the_previous_action_with_0_at_starts(self, monkeypatch):
        found = []
        # A translation would call the transform on zeros, too.
        monkeypatch.setattr(PolicyRunner, "_translate", lambda runner, row: setattr(runner, "gave_up", True))

        class Watching(RewardScale):
            def transform(self, time_step, state):
                found.append(time_step.reward.tolist())
                return super().transform(time_step, state)

        policy, ones = self.make(PPO, functools.partial(Watching, scale=2.0)), np.ones((2, 1), np.float32)
        policy.act(ones, batched=True, reward=3.0)
        policy.act(ones, batched=True, reward=3.0)
        policy.act(ones, batched=True, reward=[3.0, 4.0], first=[True, False])
        assert found == [[0, 0], [3, 3], [0, 4]]

    def test_a_missing_reward_is_named_unless_no_action_depends_on_it(self):
        policy, one = self.make(Repeating), np.ones(1, np.float32)
        policy.act(one)
        with pytest.raises(UsageError, match="depends on the reward of the last action, which was not given"):
            policy.act(one)
        policy = self.make(PPO, functools.partial(RewardScale, scale=2.0))
        assert policy.act(one) == policy.act(one)


class Repeating(PPO):
    """Repeats a rewarded action and changes one without reward; begins with 0."""

    def predict_step(self, time_step, state):
        was = time_step.observation["prev_action"]
        rewarded = time_step.observation["prev_reward"][:, 0] > 0
        begins = time_step.step_type == FIRST
        action = torch.where(rewarded, was.argmax(-1), 1 - was.argmax(-1))
        return super().predict_step(time_step, state)._replace(output=torch.where(begins, 0, action))


def train(tmp_path, algorithm, batches, num_env_steps, learning_rate=1e-2, **parts):
    trainer = Trainer(
        tmp_path,
        environment=functools.partial(make_environment, HiddenArm, num_envs=8),
        algorithm=algorithm,
        transforms=[functools.partial(PreviousStep, **parts)],
        batches=batches,
        learner=functools.partial(Learner, learning_rate=learning_rate),
        num_env_steps=num_env_steps,
        unroll_length=16,
        listeners=[],
        seed=0,
    )
    trainer.train()
    evaluator = trainer.evaluator(40)
    evaluation = evaluator.evaluate(40)
    evaluator.close()
    return evaluation.mean


PPO_SETTINGS = {
    "algorithm": functools.partial(PPO, network=NETWORK, gamma=0.5, lambda_=0.5, entropy_coef=0.01),
    "batches": functools.partial(EpochBatches, num_epochs=4, minibatch_size=64),
    "num_env_steps": 4000,
}


@pytest.mark.parametrize("parts", [{}, {"reward": False}, {"action": False}])
def test_ppo_repeats_what_was_rewarded_where_it_sees_both(tmp_path, parts):
    """7.5 of 8 is the best on average, and 4 without either of the two."""
    found = train(tmp_path, **PPO_SETTINGS, **parts)
    assert found > 7 if not parts else found < 5.5
