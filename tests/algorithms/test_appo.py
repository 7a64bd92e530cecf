"""What APPO makes of its own rows, which is what PPO makes of them, and of rows that an older policy made."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from gymnasium import spaces

from alfish import nest, specs
from alfish.algorithms.a2c import A2C
from alfish.algorithms.appo import APPO
from alfish.algorithms.ppo import PPO
from alfish.data import Experience, StepType, TimeStep, trainable
from alfish.errors import UsageError
from alfish.functional import losses, targets
from alfish.learner.batches import EpochBatches
from alfish.learner.learner import Learner
from alfish.learner.optimizers import Adam, TorchOptimizer
from alfish.learner.updates import Updates
from alfish.networks import MLP, ActorCritic, Torso
from alfish.parameters.schedules import Linear
from alfish.transforms import Transforms

FIRST, MID, LAST, PAD = StepType.FIRST, StepType.MID, StepType.LAST, StepType.PAD
OBSERVATION = spaces.Box(-1, 1, (4,), np.float32)
ACTIONS = {"discrete": spaces.Discrete(3), "box": spaces.Box(-1, 1, (2,), np.float32)}
SGD = partial(TorchOptimizer, optimizer=torch.optim.SGD)


def _make(cls=APPO, action="discrete", num_rewards=None, **settings):
    torch.manual_seed(0)
    return cls(OBSERVATION, specs.action_spec(ACTIONS[action]), specs.reward_spec(num_rewards), **settings)


def _unroll(algorithm, length=16, num_envs=4, seed=0):
    """`[T+1, B]` rows that the policy acts in, one row at a time as an unroller does; an episode ends among them."""
    torch.manual_seed(seed)
    leading = (length + 1, num_envs)
    step_type = torch.full(leading, MID, dtype=torch.int32)
    if length > 4:
        step_type[3, 0], step_type[4, 0] = LAST, FIRST
    reward = torch.randn(*leading, *algorithm.reward_spec.shape)
    none = torch.zeros(leading)
    time_step = TimeStep(step_type, reward, torch.ones(leading), torch.randn(*leading, 4), none, none)
    with torch.no_grad():
        steps = [algorithm.rollout_step(nest.at(time_step, t), None) for t in range(length + 1)]
        action, info = nest.stack([(step.output, step.info) for step in steps])
    return Experience(time_step, action, info, None, None)


def _chunks(algorithm, experience, *settings):
    """What `EpochBatches(*settings)` makes of an unroll for this algorithm, without transforms."""
    source = EpochBatches(*settings)
    length, num_envs = trainable(experience.time_step.step_type).shape
    source.bind(algorithm, Transforms([], algorithm.observation_spec, algorithm.reward_spec), length, num_envs)
    source.add(experience)
    return source.chunks(0)


def _prepared(algorithm, experience):
    with torch.no_grad():
        return algorithm.preprocess_experience(experience)


def _lagged(algorithm, num_updates=8, **unroll):
    """Rows that the policy made before so many updates on others, which move it well beyond the clip range."""
    experience = _unroll(algorithm, **unroll)
    for seed in range(num_updates):
        Learner(algorithm, learning_rate=2e-2).train(_chunks(algorithm, _unroll(algorithm, seed=seed + 1), 1))
    return experience


def _ratio(algorithm, experience):
    with torch.no_grad():
        policy = algorithm.network.policy(experience.time_step, experience.state)[0]
        return (policy.log_prob(experience.action) - experience.info.policy.log_prob(experience.action)).exp()


def _batch(algorithm, experience):
    """The whole unroll as one minibatch, not shuffled."""
    (chunk,) = _chunks(algorithm, experience, 1)
    return chunk.source


def _loss(algorithm, batch):
    info = algorithm.train_step(batch.experience, None).info
    return info, algorithm.calc_loss(batch.experience, info)


def _after_one_update(algorithm, experience, *settings):
    """Parameters after a step of 1 down the gradient of the first minibatch."""
    chunk = next(_chunks(algorithm, experience, *settings))
    Learner(algorithm, optimizer=SGD, learning_rate=1.0).train([chunk._replace(index=chunk.index[:1])])
    return {name: value.detach() for name, value in algorithm.named_parameters()}


class TestWithoutLag:
    @pytest.mark.parametrize("action", ACTIONS)
    def test_the_ratio_is_exactly_one(self, action):
        appo = _make(action=action)
        experience = _batch(appo, _unroll(appo, length=1, num_envs=8)).experience
        with torch.no_grad():
            log_prob = appo.train_step(experience, None).info.policy.log_prob(experience.action)
        assert torch.equal(log_prob, experience.info.log_prob)

    @pytest.mark.parametrize("num_rewards", [None, 1, 4])  # 4 is also the number of environments
    @pytest.mark.parametrize("action", ACTIONS)
    def test_the_first_gradient_is_ppos(self, action, num_rewards):
        settings = {"gamma": 0.9, "lambda_": 0.8, "entropy_coef": 0.1, "value_coef": 0.7}
        stepped = []
        for cls in (PPO, APPO):
            algorithm = _make(cls, action, num_rewards, **settings)
            experience = _unroll(algorithm)
            torch.manual_seed(1)
            stepped.append(_after_one_update(algorithm, experience, 1, 16))
        before = dict(_make(PPO, action, num_rewards).named_parameters())
        for name, value in stepped[0].items():
            torch.testing.assert_close(stepped[1][name] - before[name], value - before[name], atol=1e-6, rtol=1e-4)

    def test_first_impala_gradient_equals_actor_critic(self):
        stepped = []
        for algorithm in (_make(A2C), _make(loss="impala", lambda_=1.0, entropy_coef=0.01, normalize_advantage=False)):
            experience = _unroll(_make())  # A2C keeps no distribution
            stepped.append(_after_one_update(algorithm, experience, 1))
        torch.testing.assert_close(*stepped, atol=1e-6, rtol=1e-4)

    @pytest.mark.parametrize("action", ACTIONS)
    @pytest.mark.parametrize("loss", ["clipped", "impala"])
    def test_clipping_starts_with_the_second_update(self, loss, action):
        """Of a policy with an opinion, whose probabilities differ a little between one row and many."""
        appo = _make(action=action, loss=loss)
        _lagged(appo)
        experience, learner = _unroll(appo, length=64), Learner(appo, learning_rate=3e-2)
        assert (_ratio(appo, experience) != 1).any()
        first, second = (learner.train(_chunks(appo, experience, 1)) for _ in range(2))
        assert first["rho_clipped"] == 0
        assert first["kl"] == pytest.approx(0, abs=1e-6)
        assert 0.1 < second["rho_clipped"] < 0.9
        assert second["kl"] > 1e-4
        if loss == "clipped":
            assert first["clip_fraction"] == 0
            assert 0 < second["clip_fraction"] < 1
        assert {"policy_loss", "value_loss", "entropy"} <= second.keys()


class TestWithLag:
    @pytest.mark.parametrize("num_rewards", [None, 4])
    @pytest.mark.parametrize("action", ACTIONS)
    def test_targets_are_vtraces_with_the_present_policy_over_the_behaviour(self, action, num_rewards):
        appo = _make(
            APPO, action, num_rewards, gamma=0.9, lambda_=0.8, rho_bar=1.5, c_bar=0.9, normalize_advantage=False
        )
        experience = _lagged(appo)
        step, ratio = experience.time_step, _ratio(appo, experience)
        assert ((ratio - 1).abs() > 0.2).float().mean() > 0.3, "it has hardly moved"
        with torch.no_grad():
            value = appo.network.value(step, experience.state)
        expected = targets.vtrace(step.reward, 0.9 * step.discount, value, step.step_type, ratio, 0.8, 1.5, 0.9)
        info = _prepared(appo, experience).info
        torch.testing.assert_close(info.target, expected.target)
        advantage = expected.advantage if num_rewards is None else expected.advantage.sum(-1)
        torch.testing.assert_close(info.advantage, advantage)
        assert torch.equal(info.log_prob, experience.info.policy.log_prob(experience.action))

    def test_advantages_are_normalized_over_trained_rows_only(self):
        appo = _make()
        experience = _lagged(appo)
        advantage = _prepared(appo, experience).info.advantage[trainable(experience.time_step.step_type)]
        assert advantage.mean().item() == pytest.approx(0, abs=1e-5)
        assert advantage.std(correction=0).item() == pytest.approx(1, abs=1e-4)

    @pytest.mark.parametrize("num_rewards", [None, 4])
    @pytest.mark.parametrize("entropy_coef", [0.0, Linear(0.2, 0.0)])
    @pytest.mark.parametrize("loss", ["clipped", "impala"])
    def test_the_loss_is_policy_value_and_entropy(self, loss, entropy_coef, num_rewards):
        appo = _make(
            num_rewards=num_rewards, loss=loss, entropy_coef=entropy_coef, value_coef=0.7, clip_range=Linear(0.2, 0.0),
            rho_bar=1.2,
        )  # fmt: skip
        batch = _batch(appo, _lagged(appo))
        appo.progress.fill_(0.5)
        info, loss_info = _loss(appo, batch)
        rollout, log_prob = batch.experience.info, info.policy.log_prob(batch.experience.action)
        policy_loss, ratio = losses.clipped_surrogate(log_prob, rollout.log_prob, rollout.advantage, 0.9, 1.1)
        if loss == "impala":
            policy_loss = -ratio.clamp(max=1.2) * log_prob * rollout.advantage
        value_loss = 0.5 * (info.value - rollout.target) ** 2
        value_loss = value_loss if num_rewards is None else value_loss.sum(-1)
        expected = policy_loss + 0.7 * value_loss - (0.0 if entropy_coef == 0.0 else 0.1) * info.policy.entropy()
        torch.testing.assert_close(loss_info.loss, expected)
        assert loss_info.stop is None

    def test_impala_has_no_gradient_through_importance_weights(self):
        appo = _make(loss="impala", value_coef=0.0)
        batch = _batch(appo, _lagged(appo))
        rollout = batch.experience.info
        info, loss_info = _loss(appo, batch)
        log_prob = info.policy.log_prob(batch.experience.action)
        rho = (log_prob - rollout.log_prob).exp().clamp(max=1.0).detach()
        bias = appo.network.policy_head.heads[0].linear.bias
        (slope,) = torch.autograd.grad(loss_info.loss.sum(), bias, retain_graph=True)
        (expected,) = torch.autograd.grad(-(rho * rollout.advantage * log_prob).sum(), bias)
        torch.testing.assert_close(slope, expected)

    def test_clip_fraction_covers_trained_rows(self):
        appo = _make(rho_bar=1.2)
        experience = _lagged(appo)
        trains = trainable(experience.time_step.step_type)
        share = (_ratio(appo, experience)[:-1] > 1.2)[trains].float().mean().item()
        assert 0.05 < share < 0.95
        summary = Learner(appo, learning_rate=3e-2).train(_chunks(appo, experience, 3))
        assert summary["rho_clipped"] == pytest.approx(share)

    def test_rows_beyond_the_clip_range_train_only_the_value(self):
        appo = _make()
        batch = _batch(appo, _lagged(appo))
        info, loss_info = _loss(appo, batch)
        slope, of_value = torch.autograd.grad(loss_info.loss.sum(), [info.policy.log_p, info.value])
        rollout = batch.experience.info
        log_ratio = (info.policy.log_prob(batch.experience.action) - rollout.log_prob).detach()
        beyond = (log_ratio.exp() - 1) * rollout.advantage.sign() > 0.2
        assert 0 < beyond.sum() < beyond.numel()
        assert (slope[beyond] == 0).all() and (of_value[beyond] != 0).all()
        assert (slope[~beyond & batch.mask].abs().sum(-1) > 0).all()

    def test_recomputing_renews_values_and_ratios_and_never_the_behaviour(self, monkeypatch):
        appo = _make(recompute_advantage=True, target_kl=100.0)
        assert appo.unroll_use.preprocess_each_epoch and not _make().unroll_use.preprocess_each_epoch
        experience, infos = _lagged(appo), []
        preprocess = appo.preprocess_experience

        def watched(rows):
            infos.append(preprocess(rows).info)
            return rows._replace(info=infos[-1])

        monkeypatch.setattr(appo, "preprocess_experience", watched)
        Learner(appo, learning_rate=3e-2).train(_chunks(appo, experience, 3))
        assert len(infos) == 3
        for later in infos[1:]:
            assert torch.equal(later.log_prob, infos[0].log_prob)
            assert torch.equal(later.policy.log_p, infos[0].policy.log_p)
            assert not torch.equal(later.target, infos[0].target)
            assert not torch.equal(later.advantage, infos[0].advantage)
            assert not torch.equal(later.extra["rho_clipped"], infos[0].extra["rho_clipped"])

    def test_rows_that_are_too_old_are_left_out_whole(self):
        appo = _make(target_kl=0.01)
        learner = Learner(appo, learning_rate=1e-3)
        learner.train(_chunks(appo, _unroll(appo), 2))
        assert learner.updates == 2
        experience = _lagged(_make())  # of the same beginning
        moved = _make(target_kl=0.01)
        _lagged(moved)
        learner = Learner(moved)
        learner.train(_chunks(moved, experience, 2))
        assert learner.updates == 0

    @pytest.mark.parametrize("kind", [LAST, PAD])
    def test_kl_from_older_policies_is_measured_over_trained_rows_only(self, kind):
        appo = _make(target_kl=0.01)
        experience = _unroll(appo, 4, 2)
        experience.time_step.step_type[2:, 1] = kind
        experience.info.policy.log_p[2:, 1] = 0.0  # no distribution at all
        batch = _batch(appo, experience)
        assert Updates(appo, Adam, None).means(batch)[0].stop < 0


class TestValuesOfOldRows:
    """Two states, and the action is the next one: what the value becomes when an older policy acts."""

    REWARD = torch.tensor([[0.0, 1.0], [1.0, 3.0]])  # [state, action]
    GAMMA = 0.9

    def _make(self, cls, **settings):
        torch.manual_seed(0)
        torso = partial(Torso, mlp=partial(MLP, layers=()))  # linear in a one-hot code: a table
        network = partial(ActorCritic, actor_torso=torso, critic_torso=torso)
        observation = spaces.Box(0, 1, (2,), np.float32)
        action = spaces.Discrete(2)
        return cls(observation, action, specs.reward_spec(), network=network, gamma=self.GAMMA, **settings)

    @torch.no_grad()
    def _unroll(self, algorithm, length=32, num_envs=128):
        state, rows = torch.randint(2, (num_envs,)), []
        reward, one = torch.zeros(num_envs), torch.ones(num_envs)
        for _ in range(length + 1):
            step = TimeStep((one * MID).int(), reward, one, torch.eye(2)[state], one, one)
            acted = algorithm.rollout_step(step, None)
            rows.append((step, acted.output, acted.info))
            reward, state = self.REWARD[state, acted.output], acted.output
        return Experience(*nest.stack(rows), None, None)

    def _both_states(self):
        one = torch.ones(2)
        return TimeStep((one * MID).int(), one, one, torch.eye(2), one, one)

    def _value(self, algorithm):
        """`[2]` of the algorithm's policy, by the Bellman equation."""
        with torch.no_grad():
            policy = algorithm.network.policy(self._both_states(), None)[0].log_p.exp()
        return torch.linalg.solve(torch.eye(2) - self.GAMMA * policy, (policy * self.REWARD).sum(1))

    def _fitted(self, cls, **settings):
        """What a value becomes that regresses to the targets of rows of a policy 20 updates old, and what it should."""
        algorithm = self._make(cls, lambda_=0.9, **settings)
        old = copy.deepcopy(algorithm)
        learner = Learner(algorithm, learning_rate=3e-2)
        for _ in range(5):
            learner.train(_chunks(algorithm, self._unroll(algorithm), 4))
        algorithm.network.policy_head.requires_grad_(False)
        learner = Learner(algorithm, optimizer=SGD, learning_rate=Linear(1.0, 0.0))
        for iteration in range(40):
            algorithm.progress.fill_(iteration / 40)
            learner.train(_chunks(algorithm, self._unroll(old), 1))
        with torch.no_grad():
            value = algorithm.network.value(self._both_states(), None)
        return value, self._value(algorithm), self._value(old)

    def test_targets_use_the_present_policy(self):
        value, expected, old = self._fitted(APPO, rho_bar=10.0, c_bar=10.0)
        assert (expected - old > 4).all(), "the policy has hardly moved"
        torch.testing.assert_close(value, expected, atol=0.3, rtol=0)

    def test_clipped_values_lie_between_old_and_current_policy_values(self):
        value, expected, old = self._fitted(APPO)
        assert ((old + 1 < value) & (value < expected - 0.5)).all()

    def test_uncorrected_targets_use_the_older_policy(self):
        value, expected, old = self._fitted(PPO)
        assert (expected - old > 4).all()
        torch.testing.assert_close(value, old, atol=0.3, rtol=0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"loss": "vtrace"}, "APPO.loss is 'vtrace'"),
        ({"rho_bar": 0.5}, "APPO.c_bar is 1.0, which is larger than APPO.rho_bar = 0.5"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, words):
    with pytest.raises(UsageError, match=words):
        _make(**settings)
