"""Reward parts and representations: what they compute from rows, and what trains them."""

import copy
import functools
import pickle

import numpy as np
import pytest
import torch
from gymnasium import spaces

from alfish import nest, specs
from alfish.algorithms.composition import (
    ICM,
    RND,
    Composed,
    DynamicsFeatures,
    Representation,
    RewardPart,
    transitions_of,
)
from alfish.algorithms.dqn import DQN
from alfish.algorithms.ppo import PPO
from alfish.algorithms.sac import SAC
from alfish.data import Experience, LossInfo, StepType, TimeStep
from alfish.errors import UsageError
from alfish.functional.values import LowerBounded
from alfish.learner.optimizers import Adam
from alfish.learner.updates import Updates
from alfish.parameters.schedules import Linear
from alfish.specs import ActionMask

FIRST, MID, LAST, PAD = StepType.FIRST, StepType.MID, StepType.LAST, StepType.PAD
OBSERVATION = spaces.Box(-1, 1, (3,), np.float32)
ACTIONS = {
    "discrete": spaces.Discrete(4),
    "box": spaces.Box(-1, 1, (2,), np.float32),
    "nest": {"arm": spaces.Discrete(3), "push": spaces.Box(-1, 1, (1,), np.float32)},
}
PARTS = {
    "rnd": functools.partial(RND, layers=(8,), output_size=4),
    "icm": functools.partial(ICM, layers=(8,), num_features=4),
    "features": functools.partial(DynamicsFeatures, layers=(8,), num_features=4),
}


def rows(kinds, action_spec=ACTIONS["discrete"], seed=0):
    """Rows `[T, 1]` of these kinds."""
    torch.manual_seed(seed)
    kind = torch.tensor(kinds, dtype=torch.int32).unsqueeze(1)
    action = specs.sample(action_spec, len(kind))
    return TimeStep(
        step_type=kind,
        reward=torch.randn(len(kind), 1),
        discount=torch.ones(len(kind), 1),
        observation=torch.randn(len(kind), 1, 3),
        prev_action=nest.map(lambda leaf: leaf.unsqueeze(1), action),
        env_id=torch.zeros(len(kind), 1, dtype=torch.int32),
    )


def experience_of(time_step):
    return Experience(time_step, time_step.prev_action, None, None)


def test_recorded_steps_have_executed_actions_and_next_rows():
    step = rows([FIRST, MID, LAST])
    found = transitions_of(step)
    assert torch.equal(found.observation, step.observation[:2])
    assert torch.equal(found.next_observation, step.observation[1:])
    assert torch.equal(found.action, step.prev_action[1:])  # that of a row is of the action before it
    assert torch.equal(found.next_discount, step.discount[1:])


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("name", PARTS)
def test_a_part_has_one_loss_per_step_and_trains_all_its_parameters(name, action):
    part = PARTS[name](OBSERVATION, ACTIONS[action])
    transitions = transitions_of(rows([FIRST, MID, MID, LAST], ACTIONS[action]))
    torch.manual_seed(1)  # of RND, rows that train
    loss = part.loss(transitions)
    assert loss.loss.shape == (3, 1)
    learned = {key: p for key, p in part.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(loss.loss.sum(), list(learned.values()), allow_unused=True)
    assert all(gradient is not None for gradient in gradients), [
        key for key, gradient in zip(learned, gradients) if gradient is None
    ]
    if isinstance(part, RewardPart):
        with torch.no_grad():
            reward = part.reward(transitions)
        assert reward.shape == (3, 1) and (reward > 0).all()


def test_rnd_rewards_the_network_distance_at_the_next_observation():
    part = PARTS["rnd"](OBSERVATION, ACTIONS["discrete"])
    step = rows([FIRST, MID, LAST])
    expected = 0.5 * (part.predictor(step.observation) - part.target(step.observation)).square().sum(-1)
    assert torch.allclose(part.reward(transitions_of(step)), expected[1:])


def test_rnd_trains_only_the_predictor_on_a_share_of_the_rows():
    part = PARTS["rnd"](OBSERVATION, ACTIONS["discrete"])
    assert not any(parameter.requires_grad for parameter in part.target.parameters())
    step = rows([FIRST, *[MID] * 4000])
    transitions = transitions_of(step)
    loss, error = part.loss(transitions).loss, part.loss(transitions).extra["error"]
    trained = loss != 0
    assert 0.2 < trained.float().mean() < 0.3
    assert torch.allclose(loss[trained], 4 * error[trained])
    assert abs(loss.mean() / error.mean() - 1) < 0.15


def test_rnd_counts_each_row_once_and_no_padding():
    part = PARTS["rnd"](OBSERVATION, ACTIONS["discrete"])
    step = rows([MID, MID, LAST, FIRST, PAD])
    part.after_iteration(experience_of(step), num_seen=1)
    moments = part.normalizer._moments[0]
    assert moments.count == 3
    assert torch.allclose(moments.shift, step.observation[1:4, 0].mean(0), atol=1e-6)
    assert part.scale._moments.count == 2  # a FIRST row is the result of no step


@pytest.mark.parametrize("episodic", [True, False])
def test_rnd_divides_rewards_by_the_deviation_of_their_discounted_returns(episodic):
    part = PARTS["rnd"](OBSERVATION, ACTIONS["discrete"], episodic=episodic, gamma=0.5)
    step = rows([FIRST, MID, LAST, FIRST, MID])
    with torch.no_grad():
        errors = part._error(step.observation).squeeze(1).tolist()
        raw = part.reward(transitions_of(step))
    so_far, returns = 0.0, []
    for kind, error in zip(step.step_type.squeeze(1).tolist(), errors):
        begins = episodic and kind == FIRST
        so_far = 0.0 if begins else 0.5 * so_far + error
        returns += [] if begins else [so_far]
    with torch.no_grad():
        part.after_iteration(experience_of(step), num_seen=0)
        part.normalizer = None  # which has changed too
        scaled = part.reward(transitions_of(step))
    assert torch.allclose(scaled, raw / np.std(returns), rtol=1e-4)


def test_icm_learns_features_only_from_the_inverse_model():
    part = ICM(OBSERVATION, ACTIONS["discrete"], layers=(8,), num_features=4, forward_fraction=1.0)
    transitions = transitions_of(rows([FIRST, MID, MID, LAST]))
    features = list(part.model.features.parameters())

    def gradients(part):
        found = torch.autograd.grad(
            part.loss(transitions).loss.sum(), features, allow_unused=True, materialize_grads=True
        )
        return sum(gradient.abs().sum() for gradient in found)

    assert gradients(part) == 0
    part._forward_fraction = 0.0
    assert gradients(part) > 0


def test_a_representation_learns_features_that_the_forward_model_can_predict():
    """Its loss trains the features of a step's beginning, and not its target."""
    part = DynamicsFeatures(OBSERVATION, ACTIONS["discrete"], layers=(8,), num_features=4, forward_fraction=1.0)
    transitions = transitions_of(rows([FIRST, MID, MID, LAST]))
    target = transitions.next_observation.requires_grad_()
    loss = part.loss(transitions._replace(next_observation=target)).loss.sum()
    (of_target,) = torch.autograd.grad(loss, [target], allow_unused=True, materialize_grads=True)
    assert of_target.abs().sum() == 0
    found = torch.autograd.grad(part.loss(transitions).loss.sum(), list(part.model.features.parameters()))
    assert sum(gradient.abs().sum() for gradient in found) > 0


def test_the_loss_of_a_box_action_is_half_its_squared_error():
    part = ICM(OBSERVATION, ACTIONS["box"], layers=(8,), num_features=4)
    transitions = transitions_of(rows([FIRST, MID, MID], ACTIONS["box"]))
    model = part.model
    now, later = model.features(transitions.observation), model.features(transitions.next_observation)
    mean = model.inverse_model(torch.cat([now, later], -1)).mean
    expected = 0.5 * (mean - transitions.action).square().sum(-1) + np.log(2 * np.pi)
    assert torch.allclose(model.inverse_loss(now, later, transitions.action), expected, atol=1e-5)


def test_images_and_masks_are_observations_like_others():
    images = spaces.Dict(camera=spaces.Box(0, 255, (3, 36, 36), np.uint8), mask=ActionMask(4))
    observation = {
        "camera": torch.randint(256, (5, 1, 3, 36, 36), dtype=torch.uint8),
        "mask": torch.ones(5, 1, 4, dtype=torch.int8),
    }
    spec = specs.observation_spec(images)
    step = rows([FIRST, MID, MID, MID, LAST])._replace(observation=observation)
    for name, make in PARTS.items():
        part = make(spec, ACTIONS["discrete"])
        assert torch.isfinite(part.loss(transitions_of(step)).loss).all(), name
        with torch.no_grad():
            part.after_iteration(experience_of(step), 0)
    assert part is not None


def composed(algorithm, action=ACTIONS["discrete"], observation=OBSERVATION, reward=None, **arguments):
    torch.manual_seed(0)
    reward = specs.reward_spec() if reward is None else reward
    return Composed(observation, action, reward, algorithm=algorithm, **arguments)


@pytest.mark.parametrize("algorithm", [PPO, DQN])
def test_no_loss_trains_the_parameters_of_another_part(algorithm):
    on_all_rows = functools.partial(PARTS["rnd"], trained_fraction=1.0)
    made = composed(algorithm, rewards=[on_all_rows, PARTS["icm"]], representation=PARTS["features"])
    names = ["all", "rnd", "icm", "dynamicsfeatures"]
    updates = Updates(made, Adam, None)
    assert list(updates.groups) == names
    step = rows([FIRST, MID, MID, LAST])
    experience = experience_of(step)
    if made.on_policy:
        with torch.no_grad():
            acted = made.rollout_step(step, None)
            experience = made.preprocess_experience(experience._replace(info=acted.info))
        experience = nest.map(lambda leaf: leaf[:3], experience)
    losses = made.calc_loss(experience, made.train_step(experience, None).info).loss
    assert set(losses) == set(names)
    for loss in names:
        for group in names:
            found = torch.autograd.grad(
                losses[loss].sum(), updates.groups[group].parameters, retain_graph=True, allow_unused=True
            )
            touched = any(gradient is not None and gradient.abs().sum() > 0 for gradient in found)
            assert touched == (loss == group), f"the loss of {loss} and the parameters of {group}"


def test_the_algorithm_sees_features_and_the_mask_of_allowed_actions():
    observation = {"mask": ActionMask(4), "place": OBSERVATION}
    made = composed(DQN, observation=observation, representation=PARTS["features"])
    mask = torch.tensor([[0, 0, 1, 0]] * 5, dtype=torch.int8)
    step = nest.at(rows([MID]), 0)
    step = nest.map(lambda leaf: leaf.expand(5, *leaf.shape[1:]), step._replace(observation=torch.randn(1, 3)))
    step = step._replace(observation={"mask": mask, "place": step.observation})
    for hook in (made.rollout_step, made.predict_step):
        assert (hook(step, None).output == 2).all()
    assert (made.random_action(step) == 2).all()


def test_replays_weights_are_for_the_algorithm_only():
    assert composed(DQN, rewards=[PARTS["icm"]]).weighted_losses == ("all",)
    assert composed(DQN).weighted_losses is None


def test_all_algorithms_share_one_progress_tensor():
    made = composed(functools.partial(Composed, algorithm=PPO), rewards=[PARTS["rnd"]])
    for moved in (made, made.to(torch.float32)):  # a cast replaces buffers, as a move to a GPU does
        inner = moved.algorithm
        assert moved.progress is inner.progress is inner.algorithm.progress


class Vector(PPO):
    """Declares no weights of objectives."""

    reward_weights = None


class Sizeless(Representation):
    def forward(self, observation):
        return observation


class Constant(RewardPart):
    """Returns what it is made with."""

    def __init__(self, *specs, reward=None, loss=None):
        super().__init__(*specs)
        self._reward, self._loss = reward, loss

    def reward(self, transitions):
        return torch.ones(transitions.next_discount.shape) if self._reward is None else self._reward

    def loss(self, transitions):
        return self._loss


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ({"reward": torch.ones(4, 1, 1)}, "reward of Constant returned .*; it must return a tensor of shape .4, 1.,"),
        ({"reward": 1.0}, "reward of Constant returned .*; it must return a tensor of shape"),
        ({"loss": torch.ones(4, 1)}, r"loss of Constant returned .*; it must return LossInfo\(loss, ...\), or None"),
        (
            {"loss": LossInfo(torch.ones(4, 1), scalar={})},
            "loss of Constant returned LossInfo.scalar, which only an algorithm",
        ),
    ],
)
def test_what_hooks_of_parts_return_is_checked(returned, words):
    made = composed(DQN, rewards=[functools.partial(Constant, **returned)])
    experience = experience_of(rows([StepType.MID] * 5))
    with pytest.raises(UsageError, match=words):
        made.calc_loss(experience, made.train_step(experience, None).info)


def test_a_vector_reward_without_parts_may_have_separate_values():
    made = composed(PPO, reward=TWO, separate_values=True)
    assert made.reward_weights.tolist() == [1, 1]


@pytest.mark.parametrize("algorithm", [PPO, DQN])
@pytest.mark.parametrize("coef", [0.5, 0.0, Linear(0.5, 0.5)], ids=str)
def test_the_environments_reward_has_its_weight_without_other_rewards_too(algorithm, coef):
    made = composed(algorithm, representation=PARTS["features"], extrinsic_coef=coef)
    experience = experience_of(rows([FIRST, MID, LAST]))
    weight = 0.0 if coef == 0.0 else 0.5
    seen = made._compose(experience)[0].time_step.reward
    assert torch.equal(seen[1:], weight * experience.time_step.reward[1:])


def test_separate_values_without_parts_are_a_vector_of_one():
    made = composed(DQN, separate_values=True)
    experience = experience_of(rows([FIRST, MID, LAST]))
    assert made._compose(experience)[0].time_step.reward.shape == (3, 1, 1)
    assert made.calc_loss(experience, made.train_step(experience, None).info).loss["all"].shape == (1, 1)


def test_rewards_with_coefficient_0_are_not_read():
    made = composed(PPO, rewards=[PARTS["rnd"]], separate_values=True, extrinsic_coef=0.0)
    step = rows([FIRST, MID, LAST])
    experience = experience_of(step._replace(reward=torch.full_like(step.reward, torch.nan)))
    reward = made._compose(experience)[0].time_step.reward
    assert reward.shape == (3, 1, 2) and not reward[..., 0].any() and reward[1:, :, 1].all()


def test_the_state_value_comes_from_the_inner_algorithm():
    made = copy.deepcopy(composed(PPO, rewards=[PARTS["rnd"]], representation=PARTS["features"]))
    made = pickle.loads(pickle.dumps(made))
    step = nest.at(rows([FIRST, MID]), 0)
    assert made.overrides("state_value")
    torch.testing.assert_close(made.state_value(step, None), made.algorithm.state_value(made._seen(step), None))


def test_each_group_of_an_algorithm_needs_a_loss():
    class Both(SAC):
        def calc_loss(self, experience, info):
            return LossInfo(super().calc_loss(experience, info).loss["critic"])

    made = composed(Both, action=ACTIONS["box"])
    experience = experience_of(rows([FIRST, MID, LAST], ACTIONS["box"]))
    with pytest.raises(UsageError, match="must return a dict with one loss for each of the groups"):
        made.calc_loss(experience, made.train_step(experience, None).info)


TWO = spaces.Box(-np.inf, np.inf, (2,), np.float32)
REFUSED = {
    "two of one name": ({"rewards": [PARTS["rnd"], PARTS["rnd"]]}, "two parts of Composed are named 'rnd'"),
    "a vector reward": ({"rewards": [PARTS["rnd"]], "reward": TWO},
                        "environment's reward has 2 entries; set Composed.sep"),
    "a vector's weight": ({"rewards": [PARTS["rnd"]], "reward": TWO, "separate_values": True, "extrinsic_coef": 2.0},
                          "set PPO.reward_weights"),
    "returns without an end": ({"rewards": [functools.partial(RND, episodic=False)]},
                                "requires a separate value; set Composed.separate_values"),
    "no weights": ({"rewards": [PARTS["rnd"]], "algorithm": Vector, "separate_values": True}, "Vector has none"),
    "rewards in each epoch": ({"rewards": [PARTS["rnd"]],
                               "algorithm": functools.partial(PPO, recompute_advantage=True)},
                              "compute the rewards of parts again in each epoch"),
    "the weight of a bonus": ({"algorithm": SAC, "separate_values": True, "extrinsic_coef": 0.5},
                              "extrinsic_coef would scale not only the reward but also the bonus of SAC"),
    "lower bounds": ({"rewards": [PARTS["rnd"]], "algorithm": functools.partial(DQN, values=LowerBounded)},
                     "leave out what reads returns"),
    "a part of another kind": ({"rewards": [PARTS["features"]]}, "Composed.rewards made a DynamicsFeatures"),
    "no hidden layer": ({"rewards": [functools.partial(RND, layers=())]}, "RND.layers is empty"),
    "an encoder made already": ({"rewards": [functools.partial(RND, encoder=torch.nn.Linear(3, 3))]},
                                "RND.encoder cannot be called as .*: it is already a Linear"),
    "an encoder without a size": ({"rewards": [functools.partial(ICM, encoder=lambda spec: torch.nn.Linear(3, 3))]},
                                  "the encoder of a dynamics model made a Linear, which has no output_size"),
    "features without a size": ({"representation": Sizeless}, "Sizeless has no output_size; set it"),
    "a network": ({"representation": lambda *specs: torch.nn.Linear(1, 1)}, "Composed.representation made a Linear"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_parts_that_do_not_fit_are_refused_in_one_sentence(name):
    arguments, message = REFUSED[name]
    with pytest.raises(UsageError, match=message):
        composed(**{"algorithm": PPO, **arguments})


def test_each_reward_part_has_its_own_entry_weight_and_discount():
    made = composed(
        functools.partial(PPO, gamma=(0.9, 0.5)), separate_values=True, extrinsic_coef=2.0,
        rewards=[functools.partial(PARTS["rnd"], coef=lambda progress: 3.0 - progress, episodic=False)],
    )  # fmt: skip
    objectives = made.algorithm.values
    assert objectives.weights.tolist() == [2.0, 3.0] and made.reward_weights is None
    step = rows([FIRST, MID, LAST])
    step.discount[-1] = 0
    acted = made.rollout_step(step, None)
    rewards = []
    made.algorithm.preprocess_experience = lambda experience: (rewards.append(experience.time_step), experience)[1]
    made.preprocess_experience(experience_of(step)._replace(info=acted.info))
    assert torch.equal(rewards[0].reward[1:, :, 0], step.reward[1:])
    assert torch.equal(rewards[0].reward[1:, :, 1], made.rewards["rnd"].reward(transitions_of(step)))
    _, discount = objectives.reward_and_discount(rewards[0])
    assert torch.allclose(discount[:, 0], torch.tensor([[0.9, 0.5], [0.9, 0.5], [0.0, 0.5]]))
    made.progress.fill_(1.0)
    made.after_iteration(experience_of(step))
    assert objectives.weights.tolist() == [2.0, 2.0]


def test_offline_value_weights_follow_their_schedules():
    part = functools.partial(PARTS["icm"], coef=lambda progress: 3.0 - progress)
    made = composed(DQN, rewards=[part], separate_values=True)
    assert made.algorithm.values.weights.tolist() == [1.0, 3.0]
    made.progress.fill_(1.0)
    made.after_update()
    assert made.algorithm.values.weights.tolist() == [1.0, 2.0]
