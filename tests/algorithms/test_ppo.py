import math
from functools import partial

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from alfish import nest, specs
from alfish.algorithms.appo import APPO
from alfish.algorithms.ppo import PPO, PPOTarget
from alfish.data import Experience, StepType, TimeStep, trainable
from alfish.errors import UsageError
from alfish.functional import losses, returns
from alfish.functional.distributions import Categorical, uniform_kl
from alfish.learner.batches import EpochBatches, take
from alfish.learner.learner import Learner
from alfish.learner.optimizers import Adam, TorchOptimizer
from alfish.learner.updates import Updates
from alfish.networks import ActorCritic, PolicyHead
from alfish.parameters.schedules import Linear
from alfish.transforms import Transforms

FIRST, MID, LAST, PAD = StepType.FIRST, StepType.MID, StepType.LAST, StepType.PAD
OBSERVATION = spaces.Box(-1, 1, (4,), np.float32)
ACTIONS = {"discrete": spaces.Discrete(3), "box": spaces.Box(-1, 1, (2,), np.float32)}


def _ppo(action="discrete", num_rewards=None, seed=0, **settings):
    torch.manual_seed(seed)
    return PPO(OBSERVATION, specs.action_spec(ACTIONS[action]), specs.reward_spec(num_rewards), **settings)


def _unroll(ppo, length=16, num_envs=4, step_type=None, seed=0):
    """`[T+1, B]` rows that the policy acts in, one row at a time as an unroller does."""
    torch.manual_seed(seed)
    leading = (length + 1, num_envs)
    if step_type is None:
        step_type = torch.full(leading, MID, dtype=torch.int32)
        if length > 4:
            step_type[3, 0], step_type[4, 0] = LAST, FIRST
    observation = torch.randn(*leading, 4)
    reward = torch.randn(*leading, *ppo.reward_spec.shape)
    time_step = TimeStep(
        step_type, reward, torch.ones(leading), observation, torch.zeros(leading), torch.zeros(leading)
    )
    with torch.no_grad():
        steps = [ppo.rollout_step(nest.map(lambda leaf, t=t: leaf[t], time_step), None) for t in range(length + 1)]
        action, info = nest.stack([(step.output, step.info) for step in steps])
    return Experience(time_step, action, info, None, None)


def _prepare(ppo):
    @torch.no_grad()
    def prepare(experience):
        return ppo.preprocess_experience(experience)

    return prepare


def _chunks(ppo, experience, *settings):
    """What `EpochBatches(*settings)` makes of an unroll for this algorithm, without transforms."""
    source = EpochBatches(*settings)
    length, num_envs = trainable(experience.time_step.step_type).shape
    source.bind(ppo, Transforms([], ppo.observation_spec, ppo.reward_spec), length, num_envs)
    source.add(experience)
    return source.chunks(0)


def _batch(ppo, experience):
    """The whole unroll as one minibatch, not shuffled."""
    (chunk,) = _chunks(ppo, experience, 1)
    return chunk.source


def _ratio(ppo, batch):
    with torch.no_grad():
        info = ppo.train_step(batch.experience, None).info
        return (info.policy.log_prob(batch.experience.action) - batch.experience.info.log_prob).exp()


class TestRatio:
    @pytest.mark.parametrize("action", ACTIONS)
    def test_ratio_of_the_rollout_batch_is_exactly_1(self, action):
        ppo = _ppo(action)
        batch = _batch(ppo, _unroll(ppo, length=1, num_envs=8))
        assert torch.equal(_ratio(ppo, batch), torch.ones(1, 8))

    @pytest.mark.parametrize("action", ACTIONS)
    @pytest.mark.parametrize("trained", [False, True])
    def test_ratios_are_1_only_in_the_first_minibatch(self, action, trained):
        ppo = _ppo(action)
        learner = Learner(ppo, learning_rate=1e-2)
        if trained:  # a policy with an opinion
            learner.train(_chunks(ppo, _unroll(ppo, 64), 10, 64))
        (chunk,) = _chunks(ppo, _unroll(ppo, 64), 1, 64)
        first, second = (take(chunk.source, columns) for columns in chunk.index[:2])
        assert (_ratio(ppo, first) - 1).abs().max() < 1e-6
        learner.train([chunk._replace(index=chunk.index[:1])])
        assert (_ratio(ppo, second) - 1).abs().max() > 1e-3

    def test_log_prob_belongs_to_the_sample_not_to_the_executed_action(self):
        ppo = _ppo("box")
        experience = _unroll(ppo)
        assert (experience.action.abs() > 1).any(), "nothing would be clipped here"
        batch = _batch(ppo, experience)
        assert torch.equal(batch.experience.action, nest.merge_leading(experience.action[:-1]))
        assert (_ratio(ppo, batch) - 1).abs().max() < 1e-6

    def test_kl_and_clip_fraction_of_the_first_update_are_zero(self):
        ppo = _ppo()
        chunks = list(_chunks(ppo, _unroll(ppo), 1))
        learner = Learner(ppo, learning_rate=3e-2)
        first = learner.train(chunks)
        assert first["kl"] == pytest.approx(0, abs=1e-6)
        assert first["clip_fraction"] == 0
        second = learner.train(chunks)
        assert second["kl"] > 1e-4
        assert second["clip_fraction"] > 0


class TestAdvantage:
    def test_advantage_is_gae_with_gamma_of_the_arrival(self):
        ppo = _ppo(gamma=0.9, lambda_=0.8, normalize_advantage=False, value_clip_range=0.2)
        experience = _unroll(ppo)
        step = experience.time_step
        with torch.no_grad():
            value = ppo.network.value(step, None)
        expected = returns.gae(step.reward, 0.9 * step.discount, value, step.step_type, 0.8)
        info = _prepare(ppo)(experience).info
        torch.testing.assert_close(info.advantage, expected)
        torch.testing.assert_close(info.target, expected + value[:-1])
        torch.testing.assert_close(info.value[: len(expected)], value[: len(expected)])

    def test_advantage_is_normalized_over_trained_rows_only(self):
        ppo = _ppo()
        experience = _unroll(ppo)
        mask = trainable(experience.time_step.step_type)
        advantage = _prepare(ppo)(experience).info.advantage[mask]
        assert advantage.mean().item() == pytest.approx(0, abs=1e-5)
        assert advantage.std(correction=0).item() == pytest.approx(1, abs=1e-4)

    @pytest.mark.parametrize("num_rewards", [1, 3, 4])  # 4 is also the number of environments
    def test_advantage_of_vector_rewards_is_the_sum_over_entries(self, num_rewards):
        ppo = _ppo(num_rewards=num_rewards, normalize_advantage=False)
        experience = _unroll(ppo)
        step, info = experience.time_step, _prepare(ppo)(experience).info
        with torch.no_grad():
            value = ppo.network.value(step, None)
        assert value.shape == (17, 4, num_rewards)
        each = [
            returns.gae(step.reward[..., r], 0.99 * step.discount, value[..., r], step.step_type, 0.95)
            for r in range(num_rewards)
        ]
        torch.testing.assert_close(info.advantage, torch.stack(each).sum(0), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(info.target, torch.stack(each, -1) + value[:-1], atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize(("discount", "bootstraps"), [(1.0, True), (0.0, False)])
    def test_bootstraps_where_truncated_and_not_where_terminated(self, discount, bootstraps):
        ppo = _ppo(gamma=0.9, normalize_advantage=False)
        experience = _unroll(ppo, 1, 1, step_type=torch.tensor([[FIRST], [LAST]], dtype=torch.int32))
        experience.time_step.discount[1] = discount
        with torch.no_grad():
            ppo.network.value_head.bias.fill_(5.0)
            value = ppo.network.value(experience.time_step, None)
        expected = experience.time_step.reward[1] + (0.9 * value[1] if bootstraps else 0)
        torch.testing.assert_close(_prepare(ppo)(experience).info.target[0], expected)

    def test_recomputing_renews_values_and_never_log_probs(self, monkeypatch):
        ppo = _ppo(recompute_advantage=True, value_clip_range=0.2, target_kl=100.0)
        assert ppo.unroll_use.preprocess_each_epoch
        assert not _ppo().unroll_use.preprocess_each_epoch
        learner, infos = Learner(ppo, learning_rate=1e-2), []
        experience = _unroll(ppo)

        preprocess = ppo.preprocess_experience

        def watched(rows):
            infos.append(preprocess(rows).info)
            return rows._replace(info=infos[-1])

        monkeypatch.setattr(ppo, "preprocess_experience", watched)
        learner.train(_chunks(ppo, experience, 3))
        assert len(infos) == 3
        for later in infos[1:]:
            assert torch.equal(later.log_prob, infos[0].log_prob)
            assert torch.equal(later.policy.log_p, infos[0].policy.log_p)
            assert not torch.equal(later.value, infos[0].value)
            assert not torch.equal(later.target, infos[0].target)
            assert not torch.equal(later.advantage, infos[0].advantage)


class TestLoss:
    def _loss(self, ppo, batch):
        info = ppo.train_step(batch.experience, None).info
        return info, ppo.calc_loss(batch.experience, info)

    @pytest.mark.parametrize("entropy_coef", [0.0, 0.1, Linear(0.2, 0.0)])
    def test_loss_sums_surrogate_value_loss_and_entropy(self, entropy_coef):
        ppo = _ppo(entropy_coef=entropy_coef, value_coef=0.7, clip_range=0.1)
        ppo.progress.fill_(0.5)
        batch = _batch(ppo, _unroll(ppo))
        Learner(ppo, learning_rate=1e-2).train(_chunks(ppo, _unroll(ppo), 5))
        info, loss_info = self._loss(ppo, batch)
        rollout = batch.experience.info
        log_prob = info.policy.log_prob(batch.experience.action)
        surrogate, _ = losses.clipped_surrogate(log_prob, rollout.log_prob, rollout.advantage, 0.9, 1.1)
        coefficient = 0.0 if entropy_coef == 0 else 0.1
        expected = surrogate + 0.7 * 0.5 * (info.value - rollout.target) ** 2 - coefficient * info.policy.entropy()
        torch.testing.assert_close(loss_info.loss, expected)
        for key in ("policy_loss", "value_loss", "entropy", "kl", "clip_fraction"):
            assert loss_info.extra[key].shape == (1, 64)

    def test_vector_rewards_sum_their_value_losses(self):
        ppo = _ppo(num_rewards=4)
        batch = _batch(ppo, _unroll(ppo))
        info, loss_info = self._loss(ppo, batch)
        expected = 0.5 * (info.value - batch.experience.info.target).square().sum(-1)
        torch.testing.assert_close(loss_info.extra["value_loss"], expected.detach())

    def test_clip_range_follows_its_schedule(self):
        ppo = _ppo(clip_range=Linear(0.2, 0.0), normalize_advantage=False)
        batch = _batch(ppo, _unroll(ppo))
        Learner(ppo, learning_rate=3e-2).train(_chunks(ppo, _unroll(ppo), 5))
        fractions = []
        for progress in (0.0, 0.5, 0.999):
            ppo.progress.fill_(progress)
            fractions.append(self._loss(ppo, batch)[1].extra["clip_fraction"].mean().item())
        assert fractions == sorted(fractions)
        assert fractions[0] < fractions[-1]

    def test_values_may_be_clipped(self):
        ppo = _ppo(value_clip_range=0.05)
        batch = _batch(ppo, _unroll(ppo))
        with torch.no_grad():
            ppo.network.value_head.bias.add_(1.0)
        info, loss_info = self._loss(ppo, batch)
        rollout = batch.experience.info
        expected = losses.clipped_value_loss(info.value, rollout.value, rollout.target, 0.05)
        torch.testing.assert_close(loss_info.extra["value_loss"], expected.detach())
        assert not torch.allclose(expected, losses.half_squared(info.value - rollout.target))


class TestTargetKL:
    def _moved(self, ppo, batch, by):
        with torch.no_grad():
            ppo.network.policy_head.heads[0].linear.bias.copy_(torch.tensor([by, 0.0, 0.0]))
        stop = Updates(ppo, Adam, None).means(batch)[0].stop
        return None if stop is None else stop > 0

    def test_stops_beyond_one_and_a_half_times_the_target(self):
        ppo = _ppo(target_kl=0.1)
        batch = _batch(ppo, _unroll(ppo))
        even, log_p = torch.full((3,), 1 / 3).log(), torch.tensor([1.0, 0.0, 0.0]).log_softmax(-1)
        kl = Categorical(even).kl(Categorical(log_p)).item()
        ppo._target_kl = kl / 1.5 * 1.1
        assert not self._moved(ppo, batch, 1.0)
        ppo._target_kl = kl / 1.5 / 1.1
        assert self._moved(ppo, batch, 1.0)

    def test_never_stops_without_one(self):
        ppo = _ppo()
        assert self._moved(ppo, _batch(ppo, _unroll(ppo)), 50.0) is None

    @pytest.mark.parametrize("kind", [LAST, PAD])
    def test_kl_is_measured_over_trained_rows_only(self, kind):
        """An uneven column's padding holds no distribution at all: log-probabilities of 0."""
        ppo = _ppo(target_kl=0.01)
        step_type = torch.full((5, 2), MID, dtype=torch.int32)
        step_type[2:, 1] = kind
        experience = _unroll(ppo, 4, 2, step_type)
        experience.info.policy.log_p[2:, 1] = 0.0
        batch = _batch(ppo, experience)
        assert not self._moved(ppo, batch, 0.0)
        assert self._moved(ppo, batch, 1.0)

    def test_ends_the_iteration_early(self):
        ppo = _ppo(target_kl=0.005)
        learner = Learner(ppo, learning_rate=1e-2)
        learner.train(_chunks(ppo, _unroll(ppo), 50))
        assert 1 <= learner.updates < 50


def test_the_policy_moves_towards_what_did_well():
    ppo = _ppo(normalize_advantage=False, entropy_coef=0.0, value_coef=0.0, gamma=0.0)
    experience = _unroll(ppo)
    reward = torch.zeros(17, 4)
    reward[1:] = (experience.action[:-1] == 2).float()  # arrival side: the reward of action t is in row t + 1
    experience = experience._replace(time_step=experience.time_step._replace(reward=reward))
    before = ppo.network.policy(experience.time_step, None)[0].log_p[..., 2].mean().item()
    Learner(ppo, learning_rate=1e-2).train(_chunks(ppo, experience, 5))
    assert ppo.network.policy(experience.time_step, None)[0].log_p[..., 2].mean().item() > before + 0.1


def test_training_depends_only_on_its_seed():
    weights = []
    for _ in range(2):
        ppo = _ppo()
        Learner(ppo).train(_chunks(ppo, _unroll(ppo), 2, 8))
        weights.append(torch.cat([value.detach().flatten() for value in ppo.parameters()]))
    assert torch.equal(*weights)


def test_one_gradient_step_is_the_formula():
    """The whole way from rows to a parameter, against a sum written out."""
    ppo = _ppo(normalize_advantage=False, gamma=0.5, lambda_=0.0, value_coef=1.0)
    step_type = torch.tensor([[FIRST], [MID], [LAST], [FIRST], [MID]], dtype=torch.int32)
    experience = _unroll(ppo, 4, 1, step_type)
    bias = ppo.network.value_head.bias
    with torch.no_grad():
        value = ppo.network.value(experience.time_step, None)[:, 0]
    reward = experience.time_step.reward[:, 0]
    slopes = [value[t] - (reward[t + 1] + 0.5 * value[t + 1]) for t in (0, 1, 3)]
    before = bias.item()
    sgd = partial(TorchOptimizer, optimizer=torch.optim.SGD)
    learner = Learner(ppo, optimizer=sgd, learning_rate=1.0)
    learner.train(_chunks(ppo, experience, 1))
    assert before - bias.item() == pytest.approx(float(sum(slopes) / 3), abs=1e-5)
    assert math.isfinite(bias.item())
    assert isinstance(bias, nn.Parameter)


class TestExploration:
    @pytest.mark.parametrize("algorithm", [PPO, APPO])
    def test_the_symmetric_kl_is_added_with_its_scheduled_weight(self, algorithm):
        def made(**settings):
            torch.manual_seed(0)
            head = partial(PolicyHead, gain=2.0)  # far from uniform
            network = partial(ActorCritic, policy_head=head)
            arguments = OBSERVATION, specs.action_spec(ACTIONS["discrete"]), specs.reward_spec()
            return algorithm(*arguments, network=network, **settings)

        plain, exploring = made(), made(uniform_kl_coef=Linear(0.8))
        exploring.progress.fill_(0.25)
        (chunk,) = _chunks(plain, _unroll(plain), 1)
        batch = chunk.source.experience
        info = plain.train_step(batch, None).info
        found, without = (one.calc_loss(batch, info) for one in (exploring, plain))
        kl = uniform_kl(info.policy)
        assert kl.mean() > 0.1
        torch.testing.assert_close(found.loss, without.loss + 0.6 * kl)
        torch.testing.assert_close(found.extra["uniform_kl"], kl)
        assert "uniform_kl" not in without.extra

    def test_a_box_has_no_uniform_distribution(self):
        with pytest.raises(UsageError, match=r"PPO.uniform_kl_coef is set, but the action is a Box.*set entropy_coef"):
            _ppo("box", uniform_kl_coef=0.1)

    @pytest.mark.parametrize(
        ("reciprocal", "ratio", "advantage", "loss", "is_clipped"),
        [
            (False, 0.5, -2.0, 1.5, True),
            (True, 0.5, -2.0, 1.6, True),
            (True, 0.78, -2.0, 1.6, True),
            (False, 0.78, -2.0, 1.56, False),
            (True, 2.0, 2.0, -2.5, True),
            (True, 1.2, 2.0, -2.4, False),
        ],
    )
    def test_lower_ratio_bound_may_be_the_inverse_of_the_upper_bound(
        self, reciprocal, ratio, advantage, loss, is_clipped
    ):
        ppo = _ppo(clip_range=0.25, reciprocal_clip=reciprocal)
        zero = torch.zeros(1, 1)
        rollout = PPOTarget(zero, zero + advantage, zero, None, None, {})
        found, extra = ppo.policy_loss(zero + math.log(ratio), rollout)
        assert found.item() == pytest.approx(loss) and extra["clip_fraction"].item() == is_clipped
