"""A trained policy acts on the environment's observations, in the environment's units."""

import copy
import functools
import pickle

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn
from toys import Bandit, NestedBandit, OneState

from alfish.algorithms.ppo import PPO
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import AlgStep, StepType
from alfish.environments import make_environment
from alfish.errors import UsageError
from alfish.networks import GRU, ActorCritic, ImpalaCNN, PolicyHead
from alfish.networks.encoders import Encoder, Torso
from alfish.training.evaluator import make_evaluator
from alfish.training.policy import Policy
from alfish.transforms import ObservationNormalizer, PreviousStep, Transform, Transforms
from alfish.unrollers.policy_runner import PolicyRunner


def policy_of(env_id, algorithm=None, factories=(), **options):
    environment = make_environment(env_id, **options)
    torch.manual_seed(0)
    transforms = Transforms(factories, environment.observation_spec, environment.reward_spec, environment.action_spec)
    network = functools.partial(ActorCritic, policy_head=functools.partial(PolicyHead, gain=2.0))
    algorithm = algorithm or functools.partial(PPO, network=network)
    made = algorithm(transforms.observation_spec, environment.action_spec, environment.reward_spec)
    return Policy(made, transforms, environment.observation_space, environment.action_space)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_it_plays_as_the_evaluator_does(env_id):
    policy = policy_of(env_id, factories=[ObservationNormalizer])
    factory = functools.partial(make_environment, env_id)
    evaluation = make_evaluator(factory, policy.algorithm, policy.transforms, 2).evaluate(2, seed=3)
    for k, (value, length) in enumerate(zip(evaluation.returns, evaluation.lengths)):
        env = gymnasium.make(env_id)
        observation, _ = env.reset(seed=3 + k)
        policy.reset()
        total, count, ends = 0.0, 0, False
        while not ends:
            observation, reward, terminated, truncated, _ = env.step(policy.act(observation))
            total, count, ends = total + reward, count + 1, terminated or truncated
        assert count == length and total == pytest.approx(value, rel=1e-3)


small_images = functools.partial(ImpalaCNN, channels=(4,), output_size=8)
encoder = functools.partial(Encoder, image=small_images)


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_nested_observations_and_actions_are_in_the_environments_structure_and_space(nested, sample):
    torso = functools.partial(Torso, encoder=encoder)
    algorithm = functools.partial(PPO, network=functools.partial(ActorCritic, actor_torso=torso, critic_torso=torso))
    policy = policy_of(NestedBandit, algorithm, env_kwargs={"nested_action": nested, "image_size": 8})
    env = NestedBandit(nested, image_size=8)
    observation, _ = env.reset(seed=0)
    for _ in range(3):
        action = policy.act(observation, sample=sample)
        assert action in env.action_space
        observation, *_ = env.step(action)


@pytest.mark.parametrize("kind", ["discrete", "box", "multi_discrete", "multi_binary"])
def test_actions_are_in_the_space(kind):
    policy, env = policy_of(Bandit, env_kwargs={"action": kind}), Bandit(kind)
    observation, _ = env.reset(seed=0)
    for _ in range(20):
        action = policy.act(observation, sample=True)
        assert action in env.action_space, action
        observation, *_ = env.step(action)


def test_a_batch_is_acted_on_row_by_row():
    policy = policy_of("Pendulum-v1")
    observations = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32) / 10
    actions = policy.act(observations, batched=True)
    assert actions.shape == (5, 1) and len({float(action[0]) for action in actions}) == 5
    for observation, action in zip(observations, actions):
        policy.reset()
        np.testing.assert_allclose(policy.act(observation), action, rtol=1e-4)


def test_act_refuses_the_whole_result_of_reset():
    policy = policy_of("Pendulum-v1")
    with pytest.raises(UsageError, match="observation is not an array of numbers .*act requires only the observation"):
        policy.act(gymnasium.make("Pendulum-v1").reset(seed=0))
    with pytest.raises(UsageError, match="observation is not an array of numbers .*requires grad"):
        policy.act(torch.zeros(3, requires_grad=True))


@pytest.mark.parametrize(
    ("pixels", "words"),
    [(np.full((8, 8, 1), 0.5), "observation.image has the value 0.5"), (np.full((8, 8, 1), 300), "has the value 300")],
)
def test_values_that_do_not_fit_a_leafs_dtype_are_refused(pixels, words):
    torso = functools.partial(Torso, encoder=encoder)
    algorithm = functools.partial(PPO, network=functools.partial(ActorCritic, actor_torso=torso, critic_torso=torso))
    policy = policy_of(NestedBandit, algorithm, env_kwargs={"nested_action": False, "image_size": 8})
    observation, _ = NestedBandit(False, image_size=8).reset(seed=0)
    assert observation["image"].shape == pixels.shape
    with pytest.raises(UsageError, match=words + ".* but its dtype is uint8; act requires observations as"):
        policy.act({**observation, "image": pixels})
    policy.act({**observation, "image": observation["image"].astype(np.float64)})  # whole numbers


@pytest.mark.parametrize("kind", ["multi_discrete", "multi_binary", "box"])
def test_the_caller_may_write_to_an_action(kind):
    space = spaces.Box(-np.inf, np.inf, (2,)) if kind == "box" else None
    policy = policy_of(*((functools.partial(Unbounded, space),) if space else (Bandit,)), factories=[PreviousStep],
                       **({} if space else {"env_kwargs": {"action": kind}}))  # fmt: skip
    observation = policy.observation_space.sample()
    found = []
    for writes in (False, True):
        policy.reset()
        torch.manual_seed(1)
        for _ in range(5):
            action = policy.act(observation, reward=0.0, sample=True)
            kept = action.copy()
            if writes:
                action[...] = 1 - action
        found.append(kept.tolist())
    assert found[0] == found[1]


class Unbounded(gymnasium.Env):
    observation_space = spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, action_space):
        self.action_space = action_space


def test_a_mask_has_any_shape_that_the_environment_gives_it():
    env = Marked()
    policy = policy_of(Marked, action_mask="observation:legal")
    observation, _ = env.reset()
    assert policy.act(observation) == 2
    batch = {name: np.stack([leaf] * 3) for name, leaf in observation.items()}
    policy.reset()
    assert policy.act(batch, batched=True).tolist() == [2, 2, 2]


class Marked(gymnasium.Env):
    observation_space = spaces.Dict(x=spaces.Box(-1, 1, (2,), np.float32), legal=spaces.Box(0, 1, (1, 3), np.float32))
    action_space = spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return {"x": np.zeros(2, np.float32), "legal": np.array([[0, 0, 1]], np.float32)}, {}


def test_another_number_of_rows_asks_for_a_reset():
    policy = policy_of("Pendulum-v1")
    policy.act(np.zeros((2, 3), np.float32), batched=True)
    with pytest.raises(ValueError, match=r"3 observations after 2; call reset\(\)"):
        policy.act(np.zeros((3, 3), np.float32), batched=True)
    policy.reset()
    policy.act(np.zeros((3, 3), np.float32), batched=True)


def test_another_number_of_rows_may_begin_where_all_are_first():
    policy = policy_of("Pendulum-v1")
    policy.act(np.zeros(3, np.float32))
    assert policy.act(np.zeros((2, 3), np.float32), batched=True, first=True).shape == (2, 1)
    assert policy.act(np.zeros((3, 3), np.float32), batched=True, first=[True] * 3).shape == (3, 1)
    with pytest.raises(ValueError, match="2 observations after 3; .* first=True if all of them begin"):
        policy.act(np.zeros((2, 3), np.float32), batched=True, first=[True, False])
    policy.reset()
    with pytest.raises(ValueError, match="first has 1 entries, but act was called with 2 observations"):
        policy.act(np.zeros((2, 3), np.float32), batched=True, first=[True])


class Cells(gymnasium.Env):
    observation_space = spaces.Dict({"cell": spaces.Discrete(4, start=1), "pair": spaces.MultiDiscrete([2, 3])})
    action_space = spaces.Discrete(2)


@pytest.mark.parametrize(
    "observation, words",
    [
        ({"cell": 5, "pair": [0, 0]}, "observation.cell has a value outside its space of 4 values"),
        ({"cell": 0, "pair": [0, 0]}, "observation.cell has a value outside"),
        ({"cell": 1, "pair": [0, 3]}, "observation.pair has a value outside"),
    ],
)
def test_a_discrete_value_outside_its_space_is_refused(observation, words):
    policy = policy_of(Cells)
    policy.act({"cell": 4, "pair": [1, 2]})
    with pytest.raises(UsageError, match=words):
        policy.act(observation)


def test_the_mode_repeats_itself_and_samples_do_not():
    policy, observation = policy_of("Pendulum-v1"), np.ones(3, np.float32)
    assert len({float(policy.act(observation)[0]) for _ in range(5)}) == 1
    assert len({float(policy.act(observation, sample=True)[0]) for _ in range(5)}) > 1


class Remembering(RLAlgorithm):
    """Its action is how many steps it has taken, as it is told by its memory; looks at what it is given."""

    on_policy = True

    def initial_state(self, batch_size):
        return torch.zeros(batch_size, dtype=torch.int64)

    def rollout_step(self, time_step, state):
        first = time_step.step_type == StepType.FIRST
        assert (first == (state == 0)).all()
        assert ((state == 0) | (time_step.prev_action == state - 1)).all()
        return AlgStep(state, state + 1)

    def train_step(self, experience, state): ...

    def calc_loss(self, experience, info): ...


class Long(OneState):
    def __init__(self):
        super().__init__(100)
        self.action_space = spaces.Discrete(100, start=-50)


def test_the_policy_keeps_its_state_until_it_is_reset():
    policy = policy_of(Long, Remembering)
    observation = np.ones(1, np.float32)
    assert [int(policy.act(observation)) for _ in range(3)] == [-50, -49, -48]
    policy.reset()
    assert [int(policy.act(observation)) for _ in range(2)] == [-50, -49]


class Dropping(nn.Module):
    """A torso whose features depend on whether it trains."""

    def __init__(self, observation_spec):
        super().__init__()
        self.output_size, self._dropout = observation_spec.shape[0], nn.Dropout(0.5)

    def initial_state(self, batch_size):
        return None

    def forward(self, time_step, state):
        return self._dropout(time_step.observation), state


def test_acting_uses_eval_mode_and_restores_the_mode():
    network = functools.partial(ActorCritic, actor_torso=Dropping, policy_head=functools.partial(PolicyHead, gain=2.0))
    policy = policy_of("Pendulum-v1", functools.partial(PPO, network=network))
    policy.algorithm.train()
    assert len({float(policy.act(np.ones(3, np.float32))[0]) for _ in range(10)}) == 1
    assert policy.algorithm.training


def test_no_gradient_is_kept():
    policy = policy_of("Pendulum-v1")
    policy.act(np.ones(3, np.float32))
    assert all(parameter.grad is None for parameter in policy.algorithm.parameters())


def test_first_begins_an_episode_in_single_rows():
    policy, observations = policy_of(Long, Remembering), np.ones((3, 1), np.float32)

    def act(first=None):
        return policy.act(observations, batched=True, first=first).tolist()

    # `Remembering` asserts that prev_action and the state begin anew with each FIRST row, and only there.
    assert act() == [-50, -50, -50] and act() == [-49, -49, -49]
    assert act([False, True, False]) == [-48, -50, -48]
    assert act([False, False, False]) == [-47, -49, -47]
    assert act(torch.tensor([True, False, True]).numpy()) == [-50, -48, -50]
    with pytest.raises(ValueError, match="first has 2 entries, but act was called with 3 observations"):
        act([True, False])
    policy.reset()
    alone = [int(policy.act(observations[0], first=first)) for first in (True, False, None, True)]
    assert alone == [-50, -49, -48, -50]


class Arm(OneState):
    """Observes more than its policy needs."""

    def __init__(self):
        super().__init__(100)
        self.observation_space = spaces.Dict(
            joints=spaces.Box(-1, 1, (3,)), hidden=spaces.Dict(mass=spaces.Box(0, 1, (2,)), kind=spaces.Discrete(3))
        )


class Keep(Transform):
    """Keeps `joints` only."""

    def __init__(self, observation_spec, reward_spec):
        super().__init__(observation_spec, reward_spec)
        self.observation_spec = {"joints": observation_spec["joints"]}

    def transform(self, time_step, state):
        return time_step._replace(observation={"joints": time_step.observation["joints"]})


class Joints(Encoder):
    """Encodes `joints` only, of all that it is given."""

    def __init__(self, observation_spec):
        super().__init__(observation_spec["joints"])

    def forward(self, observation):
        return super().forward(observation["joints"])


FULL = {"joints": np.ones(3, np.float32), "hidden": {"mass": np.ones(2, np.float32), "kind": 1}}


@pytest.mark.parametrize("part", [{}, {"hidden": None}, {"hidden": {"kind": 2}}])
@pytest.mark.parametrize("way", ["transform", "encoder", "privileged critic"])
def test_leaves_that_do_not_change_the_action_may_be_missing(way, part):
    # The normalizer reads all float leaves, and FrameStack carries them along; nothing of them reaches the action.
    factories = [ObservationNormalizer, Keep] if way == "transform" else [ObservationNormalizer]
    torso = functools.partial(Torso, encoder=Joints, memory=functools.partial(GRU, size=4))
    actor = {"actor_torso": torso} | ({"critic_torso": torso} if way == "encoder" else {})
    network = functools.partial(ActorCritic, **({} if way == "transform" else actor))
    policy = policy_of(Arm, functools.partial(PPO, network=network), factories)
    whole = [policy.act(FULL) for _ in range(3)]
    policy.reset()
    assert [policy.act({"joints": FULL["joints"]} | part) for _ in range(3)] == whole
    assert policy.act(FULL) == policy.act({"joints": FULL["joints"]} | part)
    rows = {"joints": np.ones((2, 3), np.float32)}
    policy.reset()
    assert policy.act(rows, batched=True).shape == (2,)


def test_a_missing_required_leaf_is_named_without_side_effects():
    policy = policy_of(Arm, factories=[ObservationNormalizer])
    partial = {"joints": FULL["joints"], "hidden": {"kind": 2}}
    with pytest.raises(UsageError, match=r"action depends on observation\.hidden\.mass, which was not given"):
        policy.act(partial)
    policy = policy_of(Long, Remembering)
    with pytest.raises(UsageError, match="act was given none of the leaves observation$"):
        policy.act(None)
    assert int(policy.act(np.ones(1, np.float32))) == -50


class Looking(Remembering):
    """Looks at values of the observation in ways of its own."""

    look = None

    def rollout_step(self, time_step, state):
        return AlgStep((state + self.look(time_step.observation["hidden"]["mass"])).long(), state + 1)


@pytest.mark.parametrize(
    "look",
    [
        lambda mass: mass.sum().item(),
        lambda mass: 1 if (mass > 2).any() else 0,
        lambda mass: torch.zeros(1).copy_(mass[:, 0]),
        lambda mass: torch.zeros(1).index_put((torch.tensor([0]),), mass[:, 0]),
        lambda mass: torch.tensor(mass[0, 0].numpy()),
        lambda mass: torch.stack(torch.max(mass, 1)[:1]).sum(),
    ],
)
def test_each_way_of_reading_a_missing_leaf_is_refused(look):
    algorithm = type("Looking", (Looking,), {"look": staticmethod(look)})
    with pytest.raises(UsageError, match="depends on observation.hidden.mass, which was not given"):
        policy_of(Arm, algorithm).act({"joints": FULL["joints"]})


def recurrent_policy():
    torso = functools.partial(Torso, memory=functools.partial(GRU, size=4))
    network = functools.partial(ActorCritic, actor_torso=torso, critic_torso=torso)
    return policy_of("Pendulum-v1", functools.partial(PPO, network=network), [ObservationNormalizer, PreviousStep])


def through_torch(monkeypatch):
    def make(actor, state, numpy_policy):
        return PolicyRunner(actor, state, None)

    monkeypatch.setattr("alfish.training.policy.PolicyRunner", make)


def program(policy, sample=False):
    return policy._runners[sample]._program


@pytest.mark.parametrize("sample", [False, True])
def test_numpy_acts_as_torch_does_with_memory_rewards_and_first_rows(monkeypatch, sample):
    rng = np.random.default_rng(0)
    calls = [
        {"observation": rng.normal(size=(3, 3)) / 9, "reward": rng.normal(size=3), "first": rng.random(3) < 0.3}
        for _ in range(12)
    ]
    found = []
    for translates in (True, False):
        if not translates:
            through_torch(monkeypatch)
        policy = recurrent_policy()
        torch.manual_seed(1)
        found.append([policy.act(**call, batched=True, sample=sample) for call in calls])
        assert (program(policy, sample) is not None) == translates
    np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-5)


def test_changed_weights_are_seen():
    policy, other = policy_of("Pendulum-v1", factories=[ObservationNormalizer]), policy_of("Pendulum-v1")
    observation = np.full(3, 0.01, np.float32)
    before = policy.act(observation)
    with torch.no_grad():
        for parameter in (*policy.algorithm.parameters(), *other.algorithm.parameters()):
            parameter.mul_(1.5)
    after = policy.act(observation)
    assert program(policy) is not None and abs(after - before) > 1e-3
    np.testing.assert_allclose(after, other.act(observation), rtol=1e-4)
    for parameter in policy.algorithm.parameters():
        parameter.data = torch.zeros_like(parameter)  # moved, as a learner does
    assert policy.act(observation) == [0.0] and program(policy) is not None


def test_a_part_missing_in_some_calls_is_requested_where_it_is_read():
    policy = recurrent_policy()
    policy.act(np.zeros(3, np.float32))
    assert program(policy) is not None
    with pytest.raises(UsageError, match="action depends on the reward of the last action, which was not given"):
        policy.act(np.zeros(3, np.float32))
    policy.act(np.zeros(3, np.float32), reward=1.0)
    policy = policy_of(Arm, factories=[ObservationNormalizer])
    policy.act(FULL)
    assert program(policy) is not None
    with pytest.raises(UsageError, match=r"action depends on observation\.hidden\.mass, which was not given"):
        policy.act({"joints": FULL["joints"], "hidden": {"kind": 2}})


def test_a_policy_without_a_privileged_leaf_acts_through_numpy():
    torso = functools.partial(Torso, encoder=Joints)
    policy = policy_of(Arm, functools.partial(PPO, network=functools.partial(ActorCritic, actor_torso=torso)))
    whole = policy.act(FULL)
    policy.reset()
    assert policy.act({"joints": FULL["joints"]}) == whole and program(policy) is not None


def test_leaves_read_only_by_critic_memory_may_be_missing_later():
    memory = functools.partial(GRU, size=4)
    actor, critic = functools.partial(Torso, encoder=Joints), functools.partial(Torso, memory=memory)
    network = functools.partial(ActorCritic, actor_torso=actor, critic_torso=critic)
    policy = policy_of(Arm, functools.partial(PPO, network=network))
    whole = policy.act(FULL)
    assert program(policy) is not None
    assert [policy.act({"joints": FULL["joints"]}) for _ in range(2)] == [whole, whole]


def test_another_number_of_rows_is_translated_after_some_calls():
    policy = policy_of("Pendulum-v1")
    policy.act(np.zeros(3, np.float32))
    for count in range(10):
        actions = policy.act(np.zeros((2, 3), np.float32), batched=True, first=True)
        assert actions.shape == (2, 1) and (program(policy) is not None) == (count >= 8)


def test_a_copy_of_a_policy_continues_independently():
    policy = recurrent_policy()
    policy.act(np.ones(3, np.float32))
    copies = copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))
    call = {"observation": np.zeros(3, np.float32), "reward": 1.0}
    expected = policy.act(**call)
    assert all(one.act(**call) == expected for one in copies)


@pytest.mark.parametrize(
    "observation, batched, words",
    [
        (np.ones((2, 3)), False, r"observation has shape \[2, 3\], but \[3\] is expected; with batched=True, each row"),
        (np.ones(3), True, r"observation has shape \[3\], but \[3, 3\] is expected"),
        (np.ones(()), True, r"observation has shape \[\], but \[0, 3\] is expected"),
    ],
)
def test_an_observation_of_another_shape_is_refused(observation, batched, words):
    with pytest.raises(UsageError, match=words):
        policy_of("Pendulum-v1").act(observation, batched)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_an_observation_that_is_not_finite_is_refused(value):
    policy = policy_of("Pendulum-v1")
    with pytest.raises(UsageError, match="^observation has a value that is not finite"):
        policy.act(np.array([0, value, 0], np.float32))
    assert np.isfinite(policy.act(np.array([0, 3e38, 3e38], np.float32))).all()
