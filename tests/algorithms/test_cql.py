"""CQL: the penalty against known integrals, its gradients, and data of which plain SAC learns the wrong thing."""

import functools
import math

import pytest
import torch
from gymnasium import spaces
from test_sac import BOX, DISCRETE, NESTED, OBSERVATION, REWARD, learn, make, rows
from torch import nn

from alfish import specs
from alfish.algorithms.cql import CQL, CalQL
from alfish.algorithms.sac import SAC
from alfish.data import Batch
from alfish.errors import UsageError
from alfish.functional.return_distributions import Quantiles
from alfish.learner.batches import Minibatches
from alfish.learner.learner import Learner
from alfish.networks import MLP, CriticEnsemble

ONE = spaces.Box(-1, 1, (1,), "float32")


class Slope(nn.Module):
    """Two critics of one action entry: Q_k(a) = slope_k a + 3."""

    ensemble_size = 2

    def __init__(self, *slopes):
        super().__init__()
        self.slopes = nn.Parameter(torch.tensor(slopes))

    def features(self, time_step, state):
        return time_step.observation, state

    def forward(self, features, action):
        return self.slopes.view(2, *[1] * (action.ndim - 1)) * action.squeeze(-1) + 3


def with_returns(experience, returns):
    return experience._replace(return_to_go=torch.as_tensor(returns).expand(experience.time_step.reward.shape))


def gaps(algorithm, experience, seed=2):
    return learn(algorithm, experience, seed)[0].gap.detach()


def test_the_soft_maximum_is_the_log_of_the_integral_over_all_actions():
    """The integral of exp(k a) from -1 to 1 is 2 sinh(k) / k."""
    cql, experience = make(ONE, kind=CQL, num_samples=4000), rows(ONE)
    cql.critic = Slope(1.5, -0.5)
    nn.init.zeros_(cql.policy_head.box.linear.weight)  # else the policy is narrow, and its weights vary much
    for slope, gap in zip((1.5, -0.5), gaps(cql, experience)[:, 0]):
        q = slope * experience.action[0, :, 0]
        expected = math.log(2 * math.sinh(slope) / slope) - q
        torch.testing.assert_close(gap, expected, atol=0.03, rtol=0)


def test_the_soft_maximum_is_exact_for_choices_and_reads_allowed_ones_only():
    cql, experience = make(DISCRETE, kind=CQL), rows(DISCRETE)
    q = cql.critic(experience.time_step.observation[:1])
    taken = q.gather(-1, experience.action[:1].expand(2, 1, -1).unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(gaps(cql, experience), (q.logsumexp(-1) - taken).detach())
    mask = torch.tensor([True, False, True])
    cql.discrete_mask = lambda time_step: mask.expand(*time_step.reward.shape, 3)
    torch.testing.assert_close(gaps(cql, experience), (q[..., [0, 2]].logsumexp(-1) - taken).detach())


@pytest.mark.parametrize("action", [BOX, DISCRETE, {"a": BOX, "b": ONE}])
def test_the_penalty_is_added_to_the_critics_loss_and_nothing_else(action):
    experience = rows(action)
    plain, weighted = (make(action, kind=CQL, conservatism=weight) for weight in (0.0, 2.0))
    (_, one), (info, other) = learn(plain, experience), learn(weighted, experience)
    torch.testing.assert_close(other.loss["critic"], one.loss["critic"] + 2 * info.gap.sum(0))
    torch.testing.assert_close(other.extra["conservative_gap"], info.gap.mean(0))
    assert info.gap.abs().min() > 0
    for name in ("actor", "alpha"):
        torch.testing.assert_close(other.loss[name], one.loss[name])


@pytest.mark.parametrize("action", [BOX, DISCRETE])
def test_the_penalty_trains_critics_only(action):
    cql = make(action, kind=CQL)
    info, _ = learn(cql, rows(action))
    groups = {name: list(parameters) for name, parameters in cql.parameter_groups().items()}
    for name, parameters in groups.items():
        gradients = torch.autograd.grad(info.gap.sum(), parameters, allow_unused=True, retain_graph=True)
        assert any(each is not None and each.any() for each in gradients) == (name == "critic")


@pytest.mark.parametrize("action", [BOX, DISCRETE])
def test_the_target_has_no_entropy_bonus(action):
    """SAC's grows with the temperature; CQL's does not depend on it."""
    following = {
        kind: [learn(make(action, kind=kind, initial_alpha=alpha), rows(action))[0] for alpha in (1.0, 10.0)]
        for kind in (SAC, CQL)
    }
    one, other = (info.following.value for info in following[SAC])
    assert (one - other).abs().min() > 0
    one, other = (info.sac.following.value for info in following[CQL])
    assert torch.equal(one, other)


def test_cal_ql_lowers_the_policys_values_to_the_observed_return_only():
    cql, calql = (make(ONE, kind=kind, num_samples=50) for kind in (CQL, CalQL))
    for algorithm in (cql, calql):
        algorithm.critic = Slope(1.5, -0.5)
    experience = rows(ONE)
    for known in (float("nan"), -100.0):  # unknown, and below all values
        assert torch.equal(gaps(calql, with_returns(experience, known)), gaps(cql, experience))
    info, _ = learn(calql, with_returns(experience, 50.0))
    assert (info.gap > gaps(cql, experience) + 30).all()
    [slope] = torch.autograd.grad(info.gap.sum(), [calql.critic.slopes])
    # Samples of the policy are not lowered, and uniform ones have next to no weight beside a return of 50.
    torch.testing.assert_close(slope, -experience.action[0].sum().expand(2))


def test_cal_ql_asks_replay_for_returns_and_refuses_batches_without_them():
    assert make(kind=CalQL, gamma=0.9).replay_needs.return_gamma == 0.9
    with pytest.raises(UsageError, match="Experience.return_to_go"):
        learn(make(kind=CalQL), rows(BOX))


@pytest.mark.parametrize("kind, action", [(CQL, NESTED), (CalQL, DISCRETE)])
def test_actions_that_have_no_penalty_are_refused(kind, action):
    with pytest.raises(UsageError, match=f"{kind.__name__} requires bounded Box actions"):
        kind.check_specs(OBSERVATION, action, REWARD)


def test_distributions_of_the_return_and_vector_rewards_are_refused():
    with pytest.raises(UsageError, match="CQL.values is a distribution"):
        make(kind=CQL, values=Quantiles)
    with pytest.raises(UsageError, match="CQL"):
        CQL.check_specs(OBSERVATION, BOX, specs.reward_spec(2))


def learned_action(kind, **settings):
    """Trains on actions below 0.2, each rewarded by its value; returns the mean action of the policy."""
    torch.manual_seed(0)
    mlp = functools.partial(MLP, layers=(32,), activation="relu")
    critic = functools.partial(CriticEnsemble, layers=(32, 32))
    algorithm = kind(OBSERVATION, ONE, REWARD, gamma=0.0, actor_mlp=mlp, critic=critic, initial_alpha=0.01, **settings)
    learner = Learner(algorithm, learning_rate=3e-3, compile=False)
    experience = rows(ONE, num_windows=512)
    experience.action[:] = 1.2 * torch.rand_like(experience.action) - 1
    experience.time_step.reward[1] = experience.action[0, :, 0]
    batch = Batch(experience, torch.ones(1, 512, dtype=torch.bool))
    for _ in range(3):
        learner.train([Minibatches(batch, torch.randint(512, (100, 64)))])
    with torch.no_grad():
        return float(algorithm.predict_step(experience.time_step, None).output.mean())


def test_the_policy_stays_within_the_data_where_sac_leaves_them():
    assert learned_action(SAC, learn_alpha=False) > 0.5
    assert -0.4 < learned_action(CQL, learn_alpha=False, conservatism=1.0) < 0.25
