import copy
import math
from functools import partial

import pytest
import torch
from test_imitation import BOX, MEMORY, VECTOR, trained
from test_ppo import ACTIONS, OBSERVATION, _batch, _chunks, _ppo, _unroll

from alfish import nest, specs
from alfish.algorithms.composition import Composed
from alfish.algorithms.imitation.expert import AbsentExpert, Expert, PolicyExpert
from alfish.algorithms.imitation.external import opened_to_act
from alfish.algorithms.ppo import PPO
from alfish.algorithms.prior_kl import PriorKLPPO, PriorTarget
from alfish.algorithms.sac import SAC
from alfish.errors import UsageError
from alfish.functional.distributions import Categorical
from alfish.learner.learner import Learner
from alfish.networks import ActorCritic, BetaHead, PolicyHead
from alfish.parameters.schedules import Linear
from alfish.transforms import FrameStack, ObservationNormalizer, PreviousStep, RewardNormalizer, Transforms


class Always(Expert):
    """Takes the first of three actions with probability 0.5, and the others with 0.25 each."""

    name = "always"

    def forward(self, time_step, state):
        return torch.zeros_like(time_step.step_type, dtype=torch.int64), state

    def distribution(self, time_step):
        log_probs = torch.tensor([0.5, 0.25, 0.25]).log()
        return Categorical.of(log_probs.expand(*time_step.step_type.shape, 3).clone())


def near(prior=Always, action="discrete", **settings):
    plain = _ppo(action)
    torch.manual_seed(0)
    return PriorKLPPO(plain.observation_spec, plain.action_spec, plain.reward_spec, prior=prior, **settings)


def saved(action="discrete", algorithm=PPO, factories=(), seed=1):
    """Returns an expert with the policy of an earlier run."""
    torch.manual_seed(seed)
    plain = _ppo(action)
    chain = Transforms(factories, plain.observation_spec, plain.reward_spec, plain.action_spec)
    networks = algorithm(chain.observation_spec, plain.action_spec, chain.reward_spec)
    for parameter in networks.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)

    return PolicyExpert(networks, chain, ACTIONS[action], "runs/earlier")


class TestLoss:
    def test_it_is_that_of_ppo_with_the_weighted_forward_kl_by_hand(self):
        plain, algorithm = _ppo(), near(prior_kl_coef=Linear(0.5, 0.0))
        algorithm.progress.fill_(0.2)
        experience = _unroll(plain)
        batch, expected = _batch(algorithm, experience), _batch(plain, experience)
        info = algorithm.train_step(batch.experience, None).info
        probabilities = [info.policy.log_prob(torch.full((1, 64), k)).exp() for k in range(3)]
        prior = (0.5, 0.25, 0.25)
        by_hand = sum(p * (math.log(p) - q.log()) for p, q in zip(prior, probabilities))
        found = algorithm.calc_loss(batch.experience, info)
        without = plain.calc_loss(expected.experience, info)
        torch.testing.assert_close(found.loss, without.loss + 0.4 * by_hand)
        torch.testing.assert_close(found.extra["prior_kl"], by_hand)
        assert isinstance(batch.experience.info, PriorTarget) and by_hand.min() > 1e-3

    @pytest.mark.parametrize("action", ["discrete", "box"])
    def test_the_prior_policy_is_the_saved_one_and_takes_no_gradient(self, action):
        algorithm = near(partial(saved, action), action)
        rows = _batch(algorithm, _unroll(algorithm)).experience
        with torch.no_grad():
            expected, _ = saved(action)._algorithm.network.policy(rows.time_step, None)
        for a, b in zip(nest.leaves(rows.info.prior), nest.leaves(expected)):
            torch.testing.assert_close(a, b)
        assert not [name for name, _ in algorithm.named_parameters() if name.startswith("prior")]
        assert not any(leaf.requires_grad for leaf in nest.leaves(rows.info.prior))

    def test_a_saved_policy_applies_the_transforms_of_its_own_run(self):
        networks = trained(PPO, [ObservationNormalizer], VECTOR, BOX)
        expert = PolicyExpert(*copy.deepcopy(networks), BOX, "runs/x")
        algorithm, chain = networks
        plain = PPO(specs.observation_spec(VECTOR), specs.action_spec(BOX), specs.reward_spec())
        step = _unroll(plain, 5, 3).time_step
        with torch.no_grad():
            expected, _ = algorithm.network.policy(chain.transform(step, (None,)), None)
        for a, b in zip(nest.leaves(expert.distribution(step)), nest.leaves(expected)):
            torch.testing.assert_close(a, b)


def test_a_larger_weight_keeps_the_policy_nearer_to_the_prior_policy():
    kept = []
    for coef in (0.0, 30.0):
        algorithm = near(partial(saved, "discrete"), prior_kl_coef=coef)
        algorithm.network.load_state_dict(_with_parameters(saved()))
        batch = _batch(algorithm, _unroll(algorithm))
        Learner(algorithm, learning_rate=3e-3).train(_chunks(algorithm, _unroll(algorithm), 8, 16))
        after = algorithm.train_step(batch.experience, None).info.policy
        kept.append(batch.experience.info.prior.kl(after).mean().item())
    assert 0 < kept[1] < 0.3 * kept[0]


def _with_parameters(expert):
    return dict(expert._algorithm.network.named_buffers())


def test_compiled_updates_are_those_of_the_plain_learner(interpreted):
    found = []
    for compile in (False, True):
        algorithm = near(partial(saved, "box"), "box")
        learner = Learner(algorithm, learning_rate=1e-3, compile=compile)
        learner.train(_chunks(algorithm, _unroll(algorithm), 2, 16))
        found.append(torch.cat([parameter.reshape(-1) for parameter in algorithm.parameters()]))
    assert not learner.is_plain
    assert torch.allclose(*found, atol=1e-4)


def test_a_policy_that_is_opened_to_act_needs_no_prior():
    with opened_to_act():
        algorithm = near(AbsentExpert)
    assert algorithm.predict_step(_unroll(_ppo(), 1).time_step, None).output.shape == (2, 4)


class Labels(Expert):
    """Has labels, but no distributions."""

    def forward(self, time_step, state):
        return torch.zeros_like(time_step.step_type), state


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: near(Labels), "Labels has no method `distribution`, so it cannot be a prior policy"),
        (
            lambda: near(partial(saved, "box", SAC), "box"),
            "was trained by SAC, whose distribution of actions has no KL",
        ),
        (
            lambda: near(
                partial(saved, algorithm=partial(PPO, network=partial(ActorCritic, actor_torso=MEMORY))),
            ),
            "has a memory or stacks frames",
        ),
        (lambda: near(partial(saved, factories=[FrameStack])), "has a memory or stacks frames"),
        (
            lambda: near(
                partial(saved, "box"),
                "box",
                network=partial(ActorCritic, policy_head=partial(PolicyHead, box=BetaHead)),
            ),
            "actions of the distribution DiagonalNormal, but this policy has Beta",
        ),
        (lambda: near(partial(saved, "box"), "discrete"), "the expert runs/earlier was trained on other actions"),
    ],
)
def test_a_prior_policy_that_does_not_fit_is_refused(make, words):
    with pytest.raises(UsageError, match=words):
        algorithm = make()
        _batch(algorithm, _unroll(algorithm))


def test_transforms_of_observations_are_refused():
    chain = Transforms([ObservationNormalizer, RewardNormalizer], OBSERVATION, specs.reward_spec())
    plain = _ppo()
    with pytest.raises(UsageError, match="leave out transforms of observations here"):
        PriorKLPPO(chain.observation_spec, plain.action_spec, chain.reward_spec, prior=saved)


class TestAPriorPolicyThatReadsThePreviousReward:
    """A prior policy trained with `PreviousStep`."""

    prior = staticmethod(partial(saved, factories=[PreviousStep]))

    def test_composed_rewards_are_refused(self):
        compose = partial(Composed, *_specs(), algorithm=partial(PriorKLPPO, prior=self.prior))
        compose()
        with pytest.raises(UsageError, match=r"runs/earlier reads the previous reward .* Composed changes the rewards"):
            compose(extrinsic_coef=0.5)

    def test_rewards_of_another_shape_are_refused(self):
        with pytest.raises(UsageError, match=r"rewards are Box.* in its run and VectorReward"):
            self.prior().check_rewards(specs.reward_spec(2), "Trainer.transforms")

    def test_without_the_reward_it_suits_all_rewards(self):
        saved(factories=[partial(PreviousStep, reward=False)]).check_rewards(None, "Trainer.transforms")


def _specs():
    plain = _ppo()
    return plain.observation_spec, plain.action_spec, plain.reward_spec
