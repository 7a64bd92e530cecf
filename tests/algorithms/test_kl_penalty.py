import pytest
import torch
from test_ppo import _batch, _chunks, _ppo, _unroll

from alfish.algorithms.kl_penalty import KLPenaltyPPO
from alfish.learner.learner import Learner
from alfish.parameters.schedules import Linear


def penalized(action="discrete", **settings):
    plain = _ppo(action)
    torch.manual_seed(0)
    return KLPenaltyPPO(plain.observation_spec, plain.action_spec, plain.reward_spec, **settings)


@pytest.mark.parametrize("action", ["discrete", "box"])
def test_the_loss_is_that_of_ppo_with_the_weighted_kl_and_its_gradient(action):
    plain, algorithm = _ppo(action), penalized(action, kl_coef=Linear(0.5, 0.0))
    algorithm.progress.fill_(0.2)
    batch = _batch(algorithm, _unroll(algorithm))
    with torch.no_grad():
        for weight in algorithm.network.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    plain.load_state_dict(algorithm.state_dict())
    info = algorithm.train_step(batch.experience, None).info
    kl = batch.experience.info.policy.kl(info.policy)
    assert kl.mean() > 1e-3
    expected = plain.calc_loss(batch.experience, info).loss + 0.4 * kl
    found = algorithm.calc_loss(batch.experience, info).loss
    assert torch.allclose(found, expected)
    weights = [p for p in algorithm.network.parameters() if p.requires_grad]
    gradients = [torch.autograd.grad(x.sum(), weights, retain_graph=True, allow_unused=True) for x in (found, expected)]
    for a, b in zip(*gradients):
        assert (a is None and b is None) or torch.allclose(a, b)


def test_a_larger_weight_keeps_the_policy_closer_to_the_rollout_policy():
    moved = []
    for algorithm in (penalized(kl_coef=0.0), penalized(kl_coef=30.0)):
        batch = _batch(algorithm, _unroll(algorithm))
        Learner(algorithm, learning_rate=3e-3).train(_chunks(algorithm, _unroll(algorithm), 4, 16))
        after = algorithm.train_step(batch.experience, None).info.policy
        moved.append(batch.experience.info.policy.kl(after).mean().item())
    assert moved[1] < 0.3 * moved[0]
