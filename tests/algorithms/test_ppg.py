from functools import partial
from typing import NamedTuple

import pytest
import torch
from test_learning_toys import PPO_SETTINGS, _evaluate, _network, _trainer
from test_ppo import _ppo, _unroll
from toys import Bandit

from alfish import nest
from alfish.algorithms.composition import Composed
from alfish.algorithms.ppg import PPG, AuxiliaryTarget
from alfish.algorithms.ppo import PPOTarget
from alfish.data import LossInfo
from alfish.errors import UsageError
from alfish.learner.batches import EpochBatches, PhasicBatches, take
from alfish.learner.kl_adaptive import KLAdaptive
from alfish.learner.learner import Learner
from alfish.networks import ActorCritic
from alfish.transforms import Transforms


def phasic(action="discrete", num_rewards=None, kind=PPG, **settings):
    plain = _ppo(action, num_rewards)
    torch.manual_seed(0)
    return kind(plain.observation_spec, plain.action_spec, plain.reward_spec, **settings)


def source_of(algorithm, **settings):
    source = PhasicBatches(**{"num_epochs": 1, "num_unrolls": 2, "num_auxiliary_epochs": 1, **settings})
    source.bind(algorithm, Transforms([], algorithm.observation_spec, algorithm.reward_spec), 16, 4)
    return source


def batches_of(algorithm):
    """One minibatch of the policy phase and one of the auxiliary phase, which has two unrolls."""
    source = source_of(algorithm)
    for seed in (0, 1):
        source.add(_unroll(algorithm, seed=seed))
        chunks = list(source.chunks(0))
    return [take(chunk.source, chunk.index[0]) for chunk in chunks]


def moved(algorithm, size=0.3):
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in algorithm.parameters():
            weight.add_(size * torch.randn_like(weight))


class TestLoss:
    def test_of_the_policy_phase_it_is_that_of_ppo(self):
        algorithm = phasic()
        batch, _ = batches_of(algorithm)
        plain = _ppo()
        plain.network.load_state_dict(algorithm.network.state_dict())
        info = algorithm.train_step(batch.experience, None).info
        found = algorithm.calc_loss(batch.experience, info)
        assert isinstance(batch.experience.info, PPOTarget) and found.loss.keys() == {"all"}
        assert torch.equal(found.loss["all"], plain.calc_loss(batch.experience, info).loss)

    @pytest.mark.parametrize(("action", "num_rewards"), [("discrete", None), ("box", 2)])
    def test_of_the_auxiliary_phase_it_is_that_by_hand(self, action, num_rewards):
        algorithm = phasic(action, num_rewards, clone_coef=0.7)
        _, batch = batches_of(algorithm)
        stored = batch.experience.info
        moved(algorithm)
        info = algorithm.train_step(batch.experience, None).info
        found = algorithm.calc_loss(batch.experience, info).loss
        auxiliary = info.features @ algorithm.auxiliary_head.weight.T + algorithm.auxiliary_head.bias
        value = info.value if num_rewards else info.value.unsqueeze(-1)
        target = stored.target if num_rewards else stored.target.unsqueeze(-1)
        of_head, of_value = (0.5 * ((one - target) ** 2).sum(-1) for one in (auxiliary, value))
        kl = stored.policy.kl(info.policy)
        assert isinstance(stored, AuxiliaryTarget) and kl.mean() > 1e-3
        torch.testing.assert_close(found["auxiliary"], of_head)
        torch.testing.assert_close(found["all"], of_head + 0.7 * kl + of_value)

    def test_targets_and_policy_are_those_of_the_beginning_of_the_phase(self):
        algorithm = phasic()
        source = source_of(algorithm)
        unrolls = [_unroll(algorithm, seed=seed) for seed in (0, 1)]
        source.add(unrolls[0])
        list(source.chunks(0))
        source.add(unrolls[1])
        chunks = source.chunks(0)
        next(chunks)
        moved(algorithm)  # by the updates of the policy phase
        batch = next(chunks).source
        with torch.no_grad():
            expected = [algorithm.preprocess_auxiliary(unroll).info for unroll in unrolls]
        assert torch.equal(batch.experience.info.target, torch.cat([one.target.reshape(1, -1) for one in expected], 1))
        now = algorithm.train_step(batch.experience, None).info.policy
        assert batch.experience.info.policy.kl(now).abs().max() < 1e-5
        behaviour = nest.map(lambda leaf: leaf[:-1].flatten(0, 1).unsqueeze(0), unrolls[0].info.policy)
        assert behaviour.kl(nest.map(lambda leaf: leaf[:, :64], batch.experience.info.policy)).mean() > 1e-3

    def test_only_the_auxiliary_phase_trains_the_head_and_the_torso_of_the_policy_by_values(self):
        algorithm = phasic(clone_coef=0.0)
        of_policy, of_phase = batches_of(algorithm)
        torso = list(algorithm.network.actor_torso.parameters())
        losses = []
        for batch in (of_policy, of_phase):
            info = algorithm.train_step(batch.experience, None).info
            losses.append(algorithm.calc_loss(batch.experience, info).loss)
        gradients = torch.autograd.grad(losses[1]["all"].sum(), torso, retain_graph=True)
        assert all(gradient.abs().sum() > 0 for gradient in gradients)
        head = list(algorithm.auxiliary_head.parameters())
        assert torch.autograd.grad(losses[0]["all"].sum(), head, allow_unused=True) == (None, None)
        before = algorithm.auxiliary_head.weight.clone()
        learner = Learner(algorithm, learning_rate=1e-2)
        source = source_of(algorithm, minibatch_size=8)
        source.add(_unroll(algorithm))
        learner.train(source.chunks(0))
        assert torch.equal(algorithm.auxiliary_head.weight, before)
        source.add(_unroll(algorithm))
        learner.train(source.chunks(0))
        assert not torch.equal(algorithm.auxiliary_head.weight, before)

    def test_the_auxiliary_phase_keeps_the_policy_and_learns_values(self):
        algorithm = phasic()
        learner = Learner(algorithm, learning_rate=3e-3)
        source = source_of(algorithm, num_auxiliary_epochs=60)
        source.add(_unroll(algorithm))
        list(source.chunks(0))
        source.add(_unroll(algorithm, seed=1))
        *_, chunk = list(source.chunks(0))
        first, last = (learner.train([chunk._replace(index=chunk.index.repeat(n, 1))]) for n in (1, 100))
        end = learner.train([chunk])
        assert end["auxiliary_loss"] < 0.5 * first["auxiliary_loss"]
        assert end["auxiliary_value_loss"] < 0.5 * first["auxiliary_value_loss"]
        assert end["auxiliary_kl"] < 0.02 and last["auxiliary_kl"] > 0


def test_compiled_updates_are_those_of_the_plain_learner(interpreted):
    found = []
    for compile in (False, True):
        algorithm = phasic()
        learner = Learner(algorithm, learning_rate=1e-3, compile=compile)
        source = source_of(algorithm, minibatch_size=16, auxiliary_minibatch_size=16)
        torch.manual_seed(3)
        for seed in range(4):
            source.add(_unroll(algorithm, seed=seed))
            learner.train(source.chunks(0))
        found.append(torch.cat([parameter.reshape(-1) for parameter in algorithm.parameters()]))
    assert not learner.is_plain and len(learner._compiled._made) == 2
    assert torch.allclose(*found, atol=1e-4)


class OneLayout(NamedTuple):
    target: torch.Tensor


class OtherLayout(NamedTuple):
    target: torch.Tensor


class TwoPhases(PPG):
    """Two losses whose rows have the same leaves."""

    def preprocess_experience(self, experience):
        return experience._replace(info=OneLayout(experience.time_step.reward))

    def preprocess_auxiliary(self, experience):
        return experience._replace(info=OtherLayout(experience.time_step.reward))

    def calc_loss(self, experience, info):
        sign = 1.0 if isinstance(experience.info, OneLayout) else -1.0
        return LossInfo({"all": (info.value - sign * experience.info.target).square()})


def test_graphs_are_made_for_each_structure_of_rows(interpreted):
    found = []
    for compile in (False, True):
        algorithm = phasic(kind=TwoPhases)
        learner = Learner(algorithm, learning_rate=1e-3, compile=compile)
        source = source_of(algorithm, num_unrolls=1, minibatch_size=16)
        torch.manual_seed(3)
        for seed in range(3):
            source.add(_unroll(algorithm, seed=seed))
            learner.train(source.chunks(0))
        found.append(torch.cat([parameter.reshape(-1) for parameter in algorithm.parameters()]))
    assert not learner.is_plain
    assert torch.allclose(*found, atol=1e-4)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: phasic(target_kl=0.01), "PPG.target_kl would end an iteration"),
        (lambda: phasic(network=partial(ActorCritic, shared_torso=True)), "set ActorCritic.shared_torso = False"),
    ],
)
def test_settings_that_do_not_fit_are_refused(make, words):
    with pytest.raises(UsageError, match=words):
        make()


def test_a_rate_that_follows_the_kl_is_refused():
    algorithm = phasic()
    learner = Learner(algorithm, learning_rate={"all": KLAdaptive(), "auxiliary": 1e-3})
    source = source_of(algorithm)
    source.add(_unroll(algorithm))
    with pytest.raises(UsageError, match="a learning rate that follows the KL would grow without limit"):
        learner.train(source.chunks(0))


def test_other_sources_and_composed_refuse_the_phase(tmp_path):
    plain = _ppo()
    specs = plain.observation_spec, plain.action_spec, plain.reward_spec
    transforms = Transforms([], plain.observation_spec, plain.reward_spec)
    with pytest.raises(UsageError, match="PPG has an auxiliary phase, for which EpochBatches has no minibatches"):
        EpochBatches().bind(phasic(), transforms, 16, 4)
    composed = Composed(*specs, algorithm=PPG)
    with pytest.raises(UsageError, match="Composed has no preprocess_auxiliary"):
        PhasicBatches().bind(composed, transforms, 16, 4)


def test_it_learns_a_bandit(tmp_path):
    settings = PPO_SETTINGS | {
        "algorithm": partial(PPG, network=_network(), gamma=0.5, lambda_=0.5),
        "batches": partial(PhasicBatches, num_epochs=4, minibatch_size=64, num_unrolls=4, num_auxiliary_epochs=2),
    }
    trainer = _trainer(tmp_path, partial(Bandit, "discrete"), 0, 24, **settings)
    trainer.train()
    assert _evaluate(trainer) == 4
