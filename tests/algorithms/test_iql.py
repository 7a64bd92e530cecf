"""IQL: losses put together by hand, expectiles that are known, and data of which cloning learns the wrong thing."""

import functools

import numpy as np
import pytest
import torch
from gymnasium import spaces

from alfish import nest, specs
from alfish.algorithms.bc import BC
from alfish.algorithms.iql import IQL, expectile_loss
from alfish.data import Batch, Experience, StepType, TimeStep, trainable
from alfish.errors import UsageError
from alfish.functional import returns
from alfish.learner.batches import Minibatches
from alfish.learner.learner import Learner
from alfish.networks import MLP, CriticEnsemble, PolicyHead, Torso

FIRST, MID, LAST = StepType.FIRST, StepType.MID, StepType.LAST
OBSERVATION = spaces.Box(-1, 1, (3,), np.float32)
REWARD = spaces.Box(-np.inf, np.inf, (), np.float32)
BOX = spaces.Box(-1, 1, (2,), np.float32)
ACTIONS = {
    "box": BOX,
    "discrete": spaces.Discrete(3),
    "nested": {"arm": BOX, "rest": (spaces.Discrete(3), spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(2))},
}
GROUPS = {"critic": ("critic.",), "value": ("value.",), "actor": ("actor_", "policy_head.")}
SMALL = functools.partial(MLP, layers=(32,), activation="relu")
CRITIC = functools.partial(CriticEnsemble, layers=(32,))
VALUE = functools.partial(CRITIC, ensemble_size=1)


def make(action=BOX, observation=OBSERVATION, seed=0, **settings):
    torch.manual_seed(seed)
    defaults = {"actor_mlp": SMALL, "critic": CRITIC, "value": VALUE, "gamma": 0.5}
    algorithm = IQL(observation, action, REWARD, **{**defaults, **settings})
    with torch.no_grad():
        for parameter in algorithm.target_critic.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return algorithm


def rows(action, num_windows=6, step_type=(FIRST, MID), discount=(1.0, 1.0), seed=1):
    torch.manual_seed(seed)
    shape = (len(step_type), num_windows)
    kinds = torch.tensor(step_type, dtype=torch.int32)[:, None].expand(shape)
    actions = nest.map(lambda leaf: leaf.reshape(*shape, *leaf.shape[1:]), specs.sample(action, shape[0] * shape[1]))
    discounts = torch.tensor(discount)[:, None].expand(shape)
    return Experience(
        TimeStep(kinds, torch.randn(shape), discounts, torch.randn(*shape, 3), actions, kinds), actions, None, None
    )


def losses_of(algorithm, experience):
    return algorithm.calc_loss(experience, algorithm.train_step(experience, None).info)


def chunk_of(experience, num_updates):
    size = experience.time_step.reward.shape[1]
    batch = Batch(experience, trainable(experience.time_step.step_type))
    return Minibatches(batch, torch.randint(size, (num_updates, min(size, 256))))


# Losses.


def test_an_expectile_loss_weighs_positive_errors_more():
    loss = expectile_loss(torch.tensor([2.0, -2.0, 0.0]), 0.7)
    torch.testing.assert_close(loss, torch.tensor([0.7 * 2, 0.3 * 2, 0.0]))


@pytest.mark.parametrize("expectile", [0.5, 0.7, 0.9])
def test_the_loss_minimum_is_the_expectile_of_a_fair_coin(expectile):
    value = torch.tensor(0.5, requires_grad=True)
    for _ in range(300):
        (slope,) = torch.autograd.grad(expectile_loss(torch.tensor([0.0, 1.0]) - value, expectile).sum(), value)
        value = (value.detach() - 0.2 * slope).requires_grad_()
    assert float(value.detach()) == pytest.approx(expectile, abs=1e-4)


def one_hot_code(action):
    """What critics see of the nested action."""
    one_hot = torch.nn.functional.one_hot
    choice, digits, bits = action["rest"]
    parts = action["arm"], one_hot(choice, 3), one_hot(digits[..., 0], 2), one_hot(digits[..., 1], 3), bits
    return torch.cat([part.float() for part in parts], -1)


CODES = {"box": lambda a: a, "discrete": lambda a: torch.nn.functional.one_hot(a, 3).float(), "nested": one_hot_code}


@pytest.mark.parametrize("name", ACTIONS)
@pytest.mark.parametrize(("step_type", "discount"), [((FIRST, MID), 1.0), ((MID, LAST), 1.0), ((MID, LAST), 0.0)])
def test_the_three_losses_by_hand(name, step_type, discount):
    algorithm = make(ACTIONS[name], beta=2.0, max_weight=1.1)
    experience = rows(ACTIONS[name], step_type=step_type, discount=(1.0, discount))
    with torch.no_grad():  # so that some advantages are positive
        algorithm.value.body[-1].bias.sub_(0.4)
    step, action = experience.time_step, nest.at(experience.action, 0)
    here, after = step.observation
    with torch.no_grad():
        q = algorithm.critic(here, CODES[name](action))
        advantage = algorithm.target_critic(here, CODES[name](action)).amin(0) - algorithm.value(here)[0]
        target = step.reward[1] + 0.5 * discount * algorithm.value(after)[0]
        log_prob = algorithm.policy_head(algorithm.actor_mlp(here)).log_prob(action)
    weight = (2 * advantage).exp().clamp(max=1.1)
    assert (weight == 1.1).any() and (weight < 1.1).any() and (advantage > 0).any() and (advantage < 0).any()
    found = losses_of(algorithm, experience)
    expected = {
        "critic": 0.5 * (target - q).square().sum(0),
        "value": torch.where(advantage > 0, 0.7, 0.3) * 0.5 * advantage.square(),
        "actor": -weight * log_prob,
    }
    assert set(found.loss) == set(expected)
    for group, loss in expected.items():
        assert found.loss[group].shape == (1, 6)
        torch.testing.assert_close(found.loss[group].detach()[0], loss, msg=group)
    torch.testing.assert_close(found.priority[0], (target - q).abs().mean(0))


def test_longer_windows_give_n_step_targets():
    algorithm = make(lambda_=0.6)
    experience = rows(BOX, step_type=(MID, MID, LAST, FIRST), discount=(1.0, 1.0, 1.0, 1.0))
    step, info = experience.time_step, algorithm.train_step(experience, None).info
    with torch.no_grad():
        value = algorithm.value(step.observation)[0]
    torch.testing.assert_close(info.next_value, value[1:])
    target = returns.lambda_return(step.reward, 0.5 * step.discount, value[1:], step.step_type, 0.6)[:1]
    loss = algorithm.calc_loss(experience, info).loss["critic"]
    torch.testing.assert_close(loss.detach(), 0.5 * (target - info.q.detach()).square().sum(0))


@pytest.mark.parametrize("name", ACTIONS)
@pytest.mark.parametrize("group", GROUPS)
def test_a_groups_loss_moves_its_parameters_and_no_others(name, group):
    algorithm = make(ACTIONS[name], target_rate=1e-9)
    learner = Learner(algorithm, learning_rate={other: 0.1 if other == group else 0.0 for other in GROUPS})
    before = {key: parameter.detach().clone() for key, parameter in algorithm.named_parameters()}
    learner.train([chunk_of(rows(ACTIONS[name]), 1)])
    for key, parameter in algorithm.named_parameters():
        if not key.startswith("target_"):
            assert torch.equal(parameter, before[key]) != key.startswith(GROUPS[group]), key


def test_targets_have_no_gradient_and_losses_train_only_their_group():
    algorithm = make()
    found = losses_of(algorithm, rows(BOX))
    groups = {name: list(parameters) for name, parameters in algorithm.parameter_groups().items()}
    for loss in found.loss:
        for group in groups:
            gradients = torch.autograd.grad(
                found.loss[loss].sum(), groups[group], allow_unused=True, retain_graph=True
            )  # fmt: skip
            assert all((gradient is None) == (loss != group) for gradient in gradients), (loss, group)
    assert not any(parameter.requires_grad for parameter in algorithm.target_critic.parameters())


def test_target_critics_follow_by_their_rate():
    algorithm = make(target_rate=0.25)
    with torch.no_grad():
        algorithm.target_critic.network.body[-1].bias.zero_()
        algorithm.critic.body[-1].bias.fill_(1.0)
    for share in (0.25, 0.4375, 0.578125):
        algorithm.after_update()
        assert float(algorithm.target_critic.network.body[-1].bias[0]) == share


# What it learns.


def bandit(action, reward_of, num_windows=1000, seed=0):
    """One action an episode, drawn by `action(num_windows)`, in the one state there is."""
    torch.manual_seed(seed)
    taken = action(num_windows)
    shape = (2, num_windows)
    kinds = torch.tensor([[FIRST], [LAST]], dtype=torch.int32).expand(shape)
    reward = torch.stack([torch.zeros(num_windows), reward_of(taken)])
    discount = torch.tensor([[1.0], [0.0]]).expand(shape)
    actions = torch.stack([taken, torch.zeros_like(taken)])
    return Experience(TimeStep(kinds, reward, discount, torch.ones(*shape, 3), actions, kinds), actions, None, None)


ONE_ROW = TimeStep(None, None, None, torch.ones(1, 3), None, None)


def trained(algorithm, experience, num_updates, learning_rate=3e-3):
    torch.manual_seed(0)
    Learner(algorithm, learning_rate=learning_rate).train([chunk_of(experience, num_updates)])
    return algorithm


def cloned(action, experience):
    return trained(BC(OBSERVATION, action, REWARD, torso=functools.partial(Torso, mlp=SMALL)), experience, 200, 1e-2)


def test_it_prefers_the_better_action_that_most_of_the_data_do_not_take():
    action = spaces.Discrete(3)
    experience = bandit(
        lambda n: torch.multinomial(torch.tensor([0.7, 0.25, 0.05]), n, True), lambda a: (a == 1).float()
    )
    assert cloned(action, experience).predict_step(ONE_ROW, None).output.item() == 0
    algorithm = trained(make(action, target_rate=0.05, beta=10.0), experience, 250)
    assert algorithm.predict_step(ONE_ROW, None).output.item() == 1


@pytest.mark.slow
def test_it_moves_to_the_better_side_of_continuous_actions():
    action = spaces.Box(-1, 1, (1,), np.float32)
    experience = bandit(lambda n: torch.rand(n, 1) * 1.8 - 0.9, lambda a: 1 - (a[:, 0] - 0.6).abs())
    assert abs(cloned(action, experience).predict_step(ONE_ROW, None).output.item()) < 0.1
    algorithm = trained(make(action, target_rate=0.05, beta=10.0), experience, 500)
    assert 0.4 < algorithm.predict_step(ONE_ROW, None).output.item() < 0.75


def chain(num_windows=1000, seed=0):
    """In state 0, action 1 ends with 0.5, and action 0 leads to state 1, where action 1 earns 1, and few data do so."""
    torch.manual_seed(seed)
    begins = torch.rand(num_windows) < 0.5
    action = torch.where(begins, torch.rand(num_windows) < 0.5, torch.rand(num_windows) < 0.2).long()
    goes_on = begins & (action == 0)
    reward = torch.where(begins, 0.5 * action, action.float())
    observation = torch.eye(3)[torch.stack([torch.where(begins, 0, 1), torch.where(goes_on, 1, 2)])]
    kinds = torch.stack([torch.where(begins, FIRST, MID), torch.where(goes_on, MID, LAST)]).int()
    discount = torch.stack([torch.ones(num_windows), goes_on.float()])
    actions = torch.stack([action, torch.zeros_like(action)])
    rewards = torch.stack([torch.zeros(num_windows), reward])
    return Experience(TimeStep(kinds, rewards, discount, observation, actions, kinds), actions, None, None)


@pytest.mark.parametrize(("expectile", "best"), [(0.95, 0), (0.5, 1)])
def test_an_upper_expectile_stitches_trajectories_unlike_the_mean(expectile, best):
    """Of state 1, the data's mean is 0.2, less than 0.5; its best is 1."""
    settings = {"gamma": 0.9, "expectile": expectile, "beta": 20.0, "target_rate": 0.05}
    algorithm = trained(make(spaces.Discrete(2), **settings), chain(), 300, 5e-3)
    row = TimeStep(None, None, None, torch.eye(3)[:2], None, None)
    value = algorithm.value(row.observation)[0, 1].item()
    assert value > 0.7 if expectile > 0.9 else abs(value - 0.2) < 0.1
    assert algorithm.predict_step(row, None).output.tolist() == [best, 1]


# Acting.


def test_executed_actions_are_bounded_samples_or_modes():
    algorithm = make(ACTIONS["nested"], policy_head=functools.partial(PolicyHead, gain=30.0, initial_log_std=1.0))
    row = TimeStep(None, None, None, torch.randn(50, 3), None, None)
    with torch.no_grad():
        sample, other = (algorithm.rollout_step(row, None).output for _ in range(2))
        best, again = (algorithm.predict_step(row, None).output for _ in range(2))
        mode = algorithm.policy_head(algorithm.actor_mlp(row.observation)).mode()
    for output in (sample, best):
        assert output["arm"].abs().max() == 1 and (output["arm"].abs() < 1).any()
    assert not torch.equal(sample["arm"], other["arm"])
    assert torch.equal(best["arm"], mode["arm"].clamp(-1, 1))
    assert all(torch.equal(a, b) for a, b in zip(nest.leaves(best), nest.leaves(again)))
    assert all(torch.equal(a, b) for a, b in zip(nest.leaves(best["rest"]), nest.leaves(mode["rest"])))


# What is refused.


def test_unbounded_actions_and_vector_rewards_are_refused():
    with pytest.raises(UsageError, match="the action.arm has no bounds"):
        IQL(OBSERVATION, {"arm": spaces.Box(-np.inf, np.inf, (1,))}, REWARD)
    with pytest.raises(UsageError, match="IQL requires a scalar reward, but the environment's reward is a vector of 2"):
        IQL(OBSERVATION, BOX, spaces.Box(-1, 1, (2,)))


@pytest.mark.parametrize(("settings", "message"), [
    ({"expectile": 1.0}, "IQL.expectile is 1.0; it must be a number in .0, 1."),
    ({"expectile": 0.0}, "IQL.expectile is 0.0"),
    ({"beta": -1.0}, "IQL.beta is -1.0"),
    ({"max_weight": 0.0}, "IQL.max_weight is 0.0"),
])  # fmt: skip
def test_meaningless_settings_are_refused(settings, message):
    with pytest.raises(UsageError, match=message):
        make(**settings)


def test_a_great_advantage_has_a_finite_weight():
    algorithm = make(beta=1e6)
    found = losses_of(algorithm, rows(BOX, 40))
    assert found.extra["weight"].max() == 100
    assert all(torch.isfinite(loss).all() for loss in found.loss.values())
