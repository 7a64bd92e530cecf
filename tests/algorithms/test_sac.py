"""SAC against values put together by hand: soft targets, densities, expectations, and who moves whose parameters."""

import functools
import itertools
import math

import gin
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn
from toys import Bandit

from alfish import nest, specs
from alfish.algorithms.redq import REDQ
from alfish.algorithms.retrace import RetraceSAC
from alfish.algorithms.sac import SAC
from alfish.data import Batch, Experience, StepType, TimeStep, trainable
from alfish.environments import make_environment
from alfish.errors import UsageError
from alfish.functional.distributions import SquashedNormal
from alfish.functional.targets import retrace
from alfish.functional.values import LowerBounded
from alfish.learner.batches import Minibatches, ReplayBatches, take
from alfish.learner.learner import Learner
from alfish.networks import MLP, CriticEnsemble
from alfish.transforms import Transforms
from alfish.unrollers import SyncUnroller

FIRST, MID, LAST = StepType.FIRST, StepType.MID, StepType.LAST
OBSERVATION = spaces.Box(-1, 1, (3,), np.float32)
REWARD = spaces.Box(-np.inf, np.inf, (), np.float32)
BOX = spaces.Box(-1, 1, (2,), np.float32)
DISCRETE = spaces.Discrete(3)
NESTED = {"arm": spaces.Box(-1, 1, (2,), np.float32), "hand": (DISCRETE, spaces.Box(-1, 1, (1,), np.float32))}
ACTIONS = {"box": BOX, "discrete": DISCRETE, "nested": NESTED}


def make(action=BOX, ensemble_size=2, seed=0, kind=SAC, **settings):
    torch.manual_seed(seed)
    critic = functools.partial(CriticEnsemble, layers=(8,), ensemble_size=ensemble_size)
    mlp = functools.partial(MLP, layers=(8,))
    sac = kind(OBSERVATION, action, REWARD, **{"critic": critic, "actor_mlp": mlp, "gamma": 0.5, **settings})
    with torch.no_grad():  # the last layer of a policy starts close to zero, where mistakes hide
        for parameter in sac.policy_head.parameters():
            if parameter.ndim == 2:
                parameter.mul_(100)
        for name, parameter in sac.named_parameters():
            if name.startswith("target_critic."):
                parameter.add_(0.1 * torch.randn_like(parameter))
    return sac


def rows(action, num_windows=6, step_type=(FIRST, MID), discount=(1.0, 1.0), seed=1):
    torch.manual_seed(seed)
    shape = (len(step_type), num_windows)
    kinds = torch.tensor(step_type, dtype=torch.int32)[:, None].expand(shape)
    actions = nest.map(lambda leaf: leaf.reshape(*shape, *leaf.shape[1:]), specs.sample(action, shape[0] * shape[1]))
    time_step = TimeStep(
        kinds, torch.randn(shape), torch.tensor(discount)[:, None].expand(shape), torch.randn(*shape, 3), actions, kinds
    )
    return Experience(time_step, actions, None, None)


def learn(sac, experience, seed=2):
    torch.manual_seed(seed)
    info = sac.train_step(experience, None).info
    return info, sac.calc_loss(experience, info)


def targets(sac, experience):
    """What the critics are drawn to, `[N]`, read off the gradient of the critics' loss: q - target."""
    info, loss_info = learn(sac, experience)
    [gradient] = torch.autograd.grad(loss_info.loss["critic"].sum(), [info.q])
    target = (info.q - gradient).detach()
    torch.testing.assert_close(target[0], target[-1])  # the same for every critic
    return target[0, 0]


@pytest.mark.parametrize("kind", ACTIONS)
def test_state_value_is_the_smallest_critic_of_the_likeliest_action(kind):
    sac = make(ACTIONS[kind], ensemble_size=3)
    step = nest.at(rows(ACTIONS[kind], num_windows=20).time_step, 0)
    action = sac.action_space.split(sac.predict_step(step, None).output)
    q = sac.critic(step.observation, action.box)
    each = [one if action.discrete is None else one[torch.arange(20), action.discrete] for one in q]
    assert len({torch.stack(each).argmin(0)[k].item() for k in range(20)}) > 1, "the least critic differs"
    torch.testing.assert_close(sac.state_value(step, None), torch.stack(each).min(0).values)


def test_the_value_of_a_state_weighs_the_entries_of_a_vector_reward():
    critic = functools.partial(CriticEnsemble, layers=(8,))
    reward = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    sac = SAC(OBSERVATION, BOX, reward, critic=critic, reward_weights=[1.0, -2.0])
    step = nest.at(rows(BOX, num_windows=20).time_step, 0)
    q = sac.critic(step.observation, sac.predict_step(step, None).output) @ torch.tensor(
        [1.0, -2.0, 1.0]
    )  # and entropy
    torch.testing.assert_close(sac.state_value(step, None), q.min(0).values)


def policy_of(sac, observation):
    """Mean and log-deviation of all Box entries, and probabilities of the Discrete leaf, in float64."""
    with torch.no_grad():
        features = sac.actor_mlp(observation)
        policy = sac.policy_head(features)
        box, discrete = policy.box, policy.discrete and policy.discrete.log_p.double().exp()
    return box, discrete


# Densities.


def log_density(action, mean, log_std):
    """Of tanh(normal), by the change of variables in float64."""
    action, mean, log_std = action.double(), mean.double(), log_std.double()
    normal = torch.distributions.Normal(mean, log_std.exp())
    return (normal.log_prob(torch.atanh(action)) - torch.log1p(-action.square())).sum(-1)


def test_the_log_prob_is_the_density_of_the_squashed_sample():
    torch.manual_seed(0)
    distribution = SquashedNormal(0.5 * torch.randn(1000, 3), -0.5 + 0.3 * torch.randn(1000, 3))
    action, log_prob = distribution.sample_with_log_prob()
    expected = log_density(action, distribution.mean, distribution.log_std)
    torch.testing.assert_close(log_prob.double(), expected, atol=2e-3, rtol=1e-4)


def test_the_density_is_what_samples_fall_with():
    torch.manual_seed(0)
    mean, log_std = torch.full((200_000, 1), 0.4), torch.full((200_000, 1), -0.2)
    action, log_prob = SquashedNormal(mean, log_std).sample_with_log_prob()
    edges = torch.linspace(-0.95, 0.95, 20)
    shares = torch.histogram(action[:, 0], edges).hist / len(action)
    middle = ((edges[1:] + edges[:-1]) / 2)[:, None]
    density = log_density(middle, mean[: len(middle)], log_std[: len(middle)]).exp()
    torch.testing.assert_close(shares.double(), density * float(edges[1] - edges[0]), atol=0.004, rtol=0.03)
    # 1 / density averages to the length of the interval, (-1, 1).
    assert abs(float((-log_prob.double()).exp().mean()) - 2) < 0.05


def test_log_prob_is_exact_where_tanh_saturates():
    mean, log_std = torch.tensor([[12.0], [-30.0]]), torch.full((2, 1), -3.0)
    action, log_prob = SquashedNormal(mean, log_std).sample_with_log_prob()
    assert action.tolist() == [[1.0], [-1.0]]  # an atanh of these is infinite
    # log(1 - tanh(u)^2) -> log 4 - 2 |u|, so the density grows with |u|.
    assert torch.isfinite(log_prob).all()
    torch.testing.assert_close(log_prob, 2 * mean.abs()[:, 0] - math.log(4) + 2, atol=3.0, rtol=0)


# Targets.


def box_target_by_hand(sac, experience, bonus=True, seed=2):
    """One-step targets, from the noise that the seed gives the first draw."""
    step = experience.time_step
    box, _ = policy_of(sac, step.observation[1:])
    torch.manual_seed(seed)
    before = box.mean + box.log_std.exp() * torch.randn_like(box.mean)
    action = torch.tanh(before)
    with torch.no_grad():
        q = sac.target_critic(step.observation[1:], action).amin(0)[0]
    alpha = sac.temperatures.log_alpha["box"].detach().exp()
    entropy = -log_density(action, box.mean, box.log_std)[0].float() if bonus else 0
    return step.reward[1] + 0.5 * step.discount[1] * (q + alpha * entropy)


def test_the_entropy_bonus_enters_the_target_times_gamma_and_discount():
    for discount in (1.0, 0.25):
        sac, experience = make(initial_alpha=0.7), rows(BOX, discount=(1.0, discount))
        expected = box_target_by_hand(sac, experience)
        torch.testing.assert_close(targets(sac, experience), expected, atol=1e-3, rtol=1e-3)
        assert not torch.allclose(expected, box_target_by_hand(sac, experience, bonus=False), atol=0.01)


@pytest.mark.parametrize("name", ACTIONS)
def test_a_terminated_row_has_no_bonus_and_no_value(name):
    experience = rows(ACTIONS[name], step_type=(FIRST, LAST), discount=(1.0, 0.0))
    torch.testing.assert_close(targets(make(ACTIONS[name]), experience), experience.time_step.reward[1])


def test_a_truncated_row_has_both():
    sac, experience = make(), rows(BOX, step_type=(MID, LAST))
    expected = box_target_by_hand(sac, experience)
    torch.testing.assert_close(targets(sac, experience), expected, atol=1e-3, rtol=1e-3)


def test_discrete_targets_are_exact_expectations():
    sac, experience = make(DISCRETE, ensemble_size=3, initial_alpha=0.3), rows(DISCRETE)
    step = experience.time_step
    _, p = policy_of(sac, step.observation[1])
    with torch.no_grad():
        q = sac.target_critic(step.observation[1]).double()  # [E, N, n]
    expected = []
    for n in range(6):
        value = 0.0
        for a in range(3):
            smallest = min(float(q[e, n, a]) for e in range(3))
            value += float(p[n, a]) * (smallest - 0.3 * math.log(float(p[n, a])))
        expected.append(float(step.reward[1, n]) + 0.5 * value)
    torch.testing.assert_close(targets(sac, experience), torch.tensor(expected), atol=1e-5, rtol=1e-5)


def test_the_discrete_actors_loss_is_an_exact_expectation():
    sac, experience = make(DISCRETE, ensemble_size=3, initial_alpha=0.3), rows(DISCRETE)
    _, loss_info = learn(sac, experience)
    _, p = policy_of(sac, experience.time_step.observation[0])
    with torch.no_grad():
        q = sac.critic(experience.time_step.observation[0]).double().amin(0)
    expected = (p * (0.3 * p.log() - q)).sum(-1)
    torch.testing.assert_close(loss_info.loss["actor"][0].double(), expected, atol=1e-5, rtol=1e-5)
    # Nothing is drawn: another seed gives the same losses.
    for name, loss in learn(sac, experience, seed=77)[1].loss.items():
        assert torch.equal(loss, loss_info.loss[name])


def test_mixed_actions_value_each_choice_at_the_sampled_box():
    sac, experience = make(NESTED, initial_alpha=0.4), rows(NESTED)
    with torch.no_grad():
        sac.temperatures.log_alpha["discrete"].fill_(math.log(0.9))
    step = experience.time_step
    box, p = policy_of(sac, step.observation[1])
    torch.manual_seed(2)
    action = torch.tanh(box.mean + box.log_std.exp() * torch.randn_like(box.mean))
    with torch.no_grad():
        q = sac.target_critic(step.observation[1], action).amin(0).double()
    bonus = -0.4 * log_density(action, box.mean, box.log_std) - 0.9 * (p * p.log()).sum(-1)
    expected = step.reward[1] + 0.5 * ((p * q).sum(-1) + bonus)
    torch.testing.assert_close(targets(sac, experience).double(), expected, atol=1e-3, rtol=1e-3)


def test_the_critics_are_asked_about_the_action_that_was_taken():
    sac, experience = make(NESTED), rows(NESTED)
    info, _ = learn(sac, experience)
    assert info.q.shape == (2, 1, 6)
    action = nest.at(experience.action, 0)
    box = torch.cat([action["arm"], action["hand"][1]], -1)
    for e, n in itertools.product(range(2), range(6)):
        q = sac.critic(experience.time_step.observation[0, n], box[n])[e, action["hand"][0][n]]
        torch.testing.assert_close(info.q[e, 0, n], q)


# Which loss moves what.

GROUPS = {"critic": ("critic.",), "actor": ("actor_", "policy_head"), "alpha": ("temperatures",)}


@pytest.mark.parametrize("name", ACTIONS)
@pytest.mark.parametrize("group", GROUPS)
def test_a_groups_loss_moves_its_parameters_and_no_others(name, group):
    sac = make(ACTIONS[name], target_period=100)
    learner = Learner(sac, learning_rate={other: 0.1 if other == group else 0.0 for other in GROUPS})
    before = {key: parameter.detach().clone() for key, parameter in sac.named_parameters()}
    experience = rows(ACTIONS[name])
    learner.train([Minibatches(Batch(experience, trainable(experience.time_step.step_type)), torch.arange(6)[None])])
    for key, parameter in sac.named_parameters():
        assert torch.equal(parameter, before[key]) != key.startswith(GROUPS[group]), key


@pytest.mark.parametrize("name", ACTIONS)
def test_each_groups_gradient_comes_from_its_own_loss(name):
    """Every group together moves as it would with all other losses away."""
    moved = []
    for groups in (list(GROUPS), *([group] for group in GROUPS)):
        sac = make(ACTIONS[name], target_period=100)
        learner = Learner(sac, learning_rate={group: 1e-2 if group in groups else 0.0 for group in GROUPS})
        experience = rows(ACTIONS[name])
        torch.manual_seed(5)
        learner.train(
            [Minibatches(Batch(experience, trainable(experience.time_step.step_type)), torch.arange(6)[None])]
        )
        moved.append(dict(sac.named_parameters()))
    for index, group in enumerate(GROUPS):
        for key in moved[0]:
            if key.startswith(GROUPS[group]):
                assert torch.equal(moved[0][key], moved[1 + index][key])


@pytest.mark.parametrize("linear_in, slope", [("log_alpha", 1.0), ("alpha", 0.2)])
@pytest.mark.parametrize("name", ACTIONS)
def test_temperature_loss_is_detached_and_pulls_to_the_target_entropy(name, linear_in, slope):
    gin.bind_parameter("Temperatures.linear_in", linear_in)
    sac, experience = make(ACTIONS[name], initial_alpha=0.2), rows(ACTIONS[name])
    info, loss_info = learn(sac, experience)
    groups = {group: list(parameters) for group, parameters in sac.parameter_groups().items()}

    def gradients(loss, group):
        return torch.autograd.grad(
            loss_info.loss[loss].sum(), groups[group], allow_unused=True, retain_graph=True
        )  # fmt: skip

    assert all(gradient is None for gradient in gradients("alpha", "actor"))
    assert all(gradient is None for gradient in gradients("alpha", "critic"))
    assert all(gradient is None for gradient in gradients("actor", "alpha"))  # alpha is a constant to the actor
    assert all(gradient is None for gradient in gradients("critic", "actor"))
    assert all(gradient is None for gradient in gradients("critic", "alpha"))
    target_entropy = {"box": {"box": -2.0, "nested": -3.0}.get(name), "discrete": 0.5 * math.log(3)}
    assert set(sac.temperatures.log_alpha) == set(info.entropies) == {"nested": {"box", "discrete"}}.get(name, {name})
    for kind, gradient in zip(sac.temperatures.log_alpha, gradients("alpha", "alpha")):
        expected = slope * (info.entropies[kind] - target_entropy[kind]).sum().detach()
        torch.testing.assert_close(gradient, expected)


def test_targets_take_no_gradient():
    sac, experience = make(), rows(BOX)
    info, loss_info = learn(sac, experience)
    assert not info.following.value.requires_grad
    sum(loss.sum() for loss in loss_info.loss.values()).backward()
    assert all(parameter.grad is None for parameter in sac.target_critic.parameters())


def test_a_fixed_temperature_has_no_loss_and_no_group_to_train():
    sac, experience = make(learn_alpha=False, initial_alpha=0.2), rows(BOX)
    learner = Learner(sac, learning_rate={"critic": 0.1, "actor": 0.1})
    learner.train([Minibatches(Batch(experience, trainable(experience.time_step.step_type)), torch.arange(6)[None])])
    assert float(sac.temperatures.log_alpha["box"]) == pytest.approx(math.log(0.2))


# Ensembles and targets.


def constant_critics(sac, values):
    """Critic e says values[e], whatever it is asked."""
    with torch.no_grad():
        for critic in (sac.critic, sac.target_critic.network):
            for parameter in critic.parameters():
                parameter.zero_()
            critic.body[-1].bias.copy_(torch.tensor(values)[:, None, None].expand_as(critic.body[-1].bias))


def test_targets_take_the_minimum_of_a_random_subset_drawn_again_each_update():
    experience = rows(DISCRETE)
    seen = []
    sac = make(DISCRETE, ensemble_size=5, kind=REDQ, target_subset=2, initial_alpha=1e-9)
    constant_critics(sac, [4.0, 1.0, 3.0, 5.0, 2.0])
    for seed in range(500):
        value = learn(sac, experience, seed=seed)[0].following.value[0]
        assert (value - value[0]).abs().max() < 1e-5  # one subset for the update
        seen.append(round(float(value[0])))
    # Pairs of 5 whose smaller one is k: 4, 3, 2, 1 of 10.
    assert [seen.count(k) for k in range(1, 6)] == [pytest.approx(50 * n, abs=45) for n in (4, 3, 2, 1, 0)]
    sac = make(DISCRETE, ensemble_size=5, initial_alpha=1e-9)
    constant_critics(sac, [4.0, 3.0, 3.0, 5.0, 2.0])
    torch.testing.assert_close(learn(sac, experience)[0].following.value[0], torch.full((6,), 2.0))


@pytest.mark.parametrize(("kind", "expected"), [(SAC, 1.0), (REDQ, 3.0)])
def test_the_actor_maximises_the_minimum_or_the_mean_of_all_critics(kind, expected):
    sac = make(DISCRETE, ensemble_size=3, kind=kind, initial_alpha=1e-9)
    constant_critics(sac, [1.0, 3.0, 5.0])
    torch.testing.assert_close(learn(sac, rows(DISCRETE))[0].value[0], torch.full((6,), expected))


@pytest.mark.parametrize(("settings", "shares"), [
    ({"target_rate": 0.25}, [0.25, 0.4375, 0.578125]),
    ({"target_rate": 1.0, "target_period": 2}, [0.0, 1.0, 1.0]),
])  # fmt: skip
def test_target_critics_follow_by_rate_and_period(settings, shares):
    sac = make(**settings)
    constant_critics(sac, [0.0, 0.0])
    with torch.no_grad():
        sac.critic.body[-1].bias.fill_(1.0)
    for share in shares:
        sac.after_update()
        assert float(sac.target_critic.network.body[-1].bias[0]) == share


# Retrace and lower bounds.


def log_prob_by_hand(sac, observation, action):
    """Of the action's leaves together, in float64."""
    box, p = policy_of(sac, observation)
    box_action, choice = sac.action_space.split(action)
    total = 0.0
    if box is not None:
        total = log_density(box_action.clamp(-(1 - 1e-6), 1 - 1e-6), box.mean, box.log_std)
    if p is not None:
        total = total + p.log().gather(-1, choice.unsqueeze(-1)).squeeze(-1)
    return total


def acted(sac, action, num_windows=40):
    """Windows of four rows by a policy under which actions were up to ten times as likely, or as unlikely."""
    experience = rows(action, num_windows, step_type=(FIRST, MID, MID, MID), discount=(1.0,) * 4)
    log_pi = log_prob_by_hand(sac, experience.time_step.observation, experience.action)
    log_mu = (log_pi + torch.empty(log_pi.shape).uniform_(-2.3, 2.3)).float()
    return experience._replace(info={"log_prob": log_mu, "action": nest.map(torch.clone, experience.action)})


@pytest.mark.parametrize("name", ACTIONS)
def test_retrace_targets_use_policy_ratios_and_target_critics(name):
    sac = make(ACTIONS[name], ensemble_size=3, kind=RetraceSAC)
    experience = acted(sac, ACTIONS[name])
    step, info = experience.time_step, learn(sac, experience)[0]
    ratio = (log_prob_by_hand(sac, step.observation, experience.action) - experience.info["log_prob"]).exp().float()
    assert (ratio[1:] > 1).any() and (ratio[1:] < 1).any()
    torch.testing.assert_close(info.following.trace, ratio[1:].clamp(max=1), atol=2e-3, rtol=2e-3)
    box, choice = sac.action_space.split(experience.action)
    with torch.no_grad():
        q = sac.target_critic(step.observation, box).amin(0)
    q = q if choice is None else q.gather(-1, choice.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(info.following.q, q[1:])
    plain = make(ACTIONS[name], ensemble_size=3, lambda_=0.5)  # values each row too
    torch.testing.assert_close(info.following.value, learn(plain, experience)[0].following.value)
    rows_of = step.reward, 0.5 * step.discount, q[1:], info.following.value, step.step_type, ratio[1:].clamp(max=1)
    torch.testing.assert_close(targets(sac, experience), retrace(*rows_of, 1.0)[0], atol=5e-3, rtol=1e-3)
    assert not torch.allclose(targets(sac, experience), targets(plain, experience), atol=0.05)
    assert not any(leaf.requires_grad for leaf in (info.following.value, info.following.q, info.following.trace))


@pytest.mark.parametrize("name", ACTIONS)
def test_retrace_ends_at_unknown_action_probabilities(name):
    sac = make(ACTIONS[name], kind=RetraceSAC)
    experience = acted(sac, ACTIONS[name])
    before = learn(sac, experience)[0].following.trace
    assert (before > 0).all()
    for leaf in nest.leaves(experience.action):  # not the policy's own
        leaf[1, 0] = (leaf[1, 0] + 1) % 3 if leaf.dtype == torch.int64 else leaf[1, 0] / 2
        break
    experience.info["log_prob"][2, 3] = math.nan
    after = learn(sac, experience)[0].following.trace
    changed = torch.zeros_like(before, dtype=torch.bool)
    changed[0, 0] = changed[1, 3] = True  # of rows 1 to L-1
    assert torch.equal(after, torch.where(changed, 0, before))


@pytest.mark.parametrize("name", ACTIONS)
def test_retrace_policies_return_action_probabilities(name):
    step = TimeStep(None, None, None, torch.randn(50, 3), None, None)
    results = []
    for kind in (SAC, RetraceSAC):
        sac = make(ACTIONS[name], kind=kind)
        torch.manual_seed(3)
        results.append(sac.rollout_step(step, None))
        assert sac.replay_needs.info == (("log_prob", "action") if kind is RetraceSAC else ())
    plain, told = results
    assert plain.info is None
    for leaves in zip(*map(nest.leaves, (plain.output, told.output, told.info.action))):
        assert all(torch.equal(leaves[0], leaf) for leaf in leaves)
    expected = log_prob_by_hand(sac, step.observation, told.output)
    torch.testing.assert_close(told.info.log_prob.double(), expected, atol=5e-3, rtol=1e-3)


@pytest.mark.parametrize("action", ["box", "discrete"])
def test_replay_keeps_action_probabilities_for_retrace(action):
    environment = make_environment(Bandit, 3, env_kwargs={"action": action, "length": 5})
    kinds = environment.observation_spec, environment.action_spec, environment.reward_spec
    torch.manual_seed(0)
    sac = RetraceSAC(*kinds, critic=functools.partial(CriticEnsemble, layers=(8,)))
    transforms = Transforms([], kinds[0], kinds[2])
    unroller = SyncUnroller(environment, sac, transforms, numpy_policy=3)
    source = ReplayBatches(capacity=600, batch_size=200, window_length=4, warmup_env_steps=200)
    source.bind(sac, transforms, 30, 3)
    source.add(unroller.unroll(30, at_random=True))
    source.add(unroller.unroll(30))
    assert unroller._actor._program is not None, "it acts through torch"
    (chunk,) = source.chunks(201)
    [batch] = [take(chunk.source, index) for index in chunk.minibatches()]
    trace = sac.train_step(batch.experience, None).info.following.trace
    own = (batch.position + torch.arange(1, 4)[:, None]) >= 30
    assert own.any() and not own.all()
    torch.testing.assert_close(trace[own], torch.ones(int(own.sum())), atol=0.01, rtol=0)  # nothing was learned yet
    if action == "box":
        assert (trace[~own] == 0).all()
    else:  # now and then chance does what the policy would have done
        assert 0.6 < (trace[~own] == 0).float().mean() < 0.9


def test_retrace_of_recorded_data_is_refused():
    with pytest.raises(UsageError, match="recorded data lack it; use an algorithm without Retrace"):
        learn(make(kind=RetraceSAC), rows(BOX))


def test_a_target_is_at_least_the_observed_return():
    sac, experience = make(values=LowerBounded), rows(BOX)
    assert sac.replay_needs.return_gamma == 0.5 and make().replay_needs.return_gamma is None
    expected = targets(make(), experience)
    known = torch.stack([expected + torch.tensor([1.0, -1.0, math.nan] * 2), torch.full((6,), 1e6)])
    found = targets(sac, experience._replace(return_to_go=known))
    torch.testing.assert_close(found, torch.where(known[0] > expected, known[0], expected))
    assert (found > expected).tolist() == [True, False, False] * 2


# Acting.


@pytest.mark.parametrize("name", ACTIONS)
def test_actions_match_the_spec_and_the_mode_is_deterministic(name):
    sac = make(ACTIONS[name])
    step = TimeStep(None, None, None, torch.randn(5, 3), None, None)
    for output in (sac.rollout_step(step, None).output, sac.predict_step(step, None).output):
        expected = specs.zeros(ACTIONS[name], (5,))
        assert nest.paths(output) == nest.paths(expected)
        for leaf, zeros in zip(nest.leaves(output), nest.leaves(expected)):
            assert leaf.shape == zeros.shape and leaf.dtype == zeros.dtype
            assert leaf.abs().max() < 1 if leaf.is_floating_point() else leaf.max() < 3
    first, second = (nest.leaves(sac.predict_step(step, None).output) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    samples = [torch.cat([leaf.float().flatten() for leaf in nest.leaves(sac.rollout_step(step, None).output)])
               for _ in range(20)]  # fmt: skip
    assert torch.stack(samples).std(0).max() > 0


# Specs.


def test_an_unbounded_box_is_refused_by_its_leaf():
    for action, name in ((spaces.Box(-np.inf, 1, (2,)), "the action has no lower bound"),
                         ({"a": BOX, "b": spaces.Box(0, np.inf, (1,))}, "the action.b has no upper")):  # fmt: skip
        with pytest.raises(UsageError, match=f"SAC squashes its actions into bounds, but {name}"):
            SAC(OBSERVATION, action, REWARD)


@pytest.mark.parametrize("leaf", [spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(2)])
def test_other_spaces_are_refused_by_their_leaf(leaf):
    with pytest.raises(UsageError, match=r"SAC requires Box or Discrete actions, but the action\.parts\.1 is Multi"):
        SAC(OBSERVATION, {"arm": BOX, "parts": (DISCRETE, leaf)}, REWARD)


def test_a_discrete_leaf_of_one_choice_is_refused():
    with pytest.raises(UsageError, match=r"action\.gear is Discrete\(1\), which has a single value"):
        SAC(OBSERVATION, {"arm": BOX, "gear": spaces.Discrete(1)}, REWARD)


@pytest.mark.parametrize("subset", [0, 3])
def test_a_subset_that_the_ensemble_does_not_have_is_refused(subset):
    with pytest.raises(UsageError, match=f"REDQ.target_subset is {subset}; it must be (at most 2|an integer)"):
        REDQ(OBSERVATION, BOX, REWARD, target_subset=subset)


def test_a_second_discrete_leaf_is_refused():
    with pytest.raises(UsageError, match="SAC requires at most one Discrete action leaf, but the action space has 2"):
        SAC(OBSERVATION, (DISCRETE, DISCRETE), REWARD)


def test_no_parameter_is_left_to_no_group():
    for action in ACTIONS.values():
        sac = make(action)
        claimed = {id(parameter) for group in sac.parameter_groups().values() for parameter in group}
        assert claimed == {id(parameter) for parameter in sac.parameters() if parameter.requires_grad}
        assert isinstance(sac, nn.Module)
