"""SAC with residual bodies, one pass of the actor over both rows, and noise that is kept."""

import copy
import functools

import pytest
import torch
from test_crossq import chunk, learner_of
from test_sac import BOX, DISCRETE, make, rows

from alfish import nest
from alfish.algorithms.flashsac import FlashSAC
from alfish.errors import UsageError
from alfish.networks import CriticEnsemble
from alfish.networks.bodies.batch_norm import Moments
from alfish.networks.bodies.residual import Residual
from alfish.networks.layers import Projected, UnitRows

BODY = functools.partial(Residual, width=8, blocks=1, expansion=2)
FLASH = {
    "critic": functools.partial(CriticEnsemble, body=BODY, unit_rows=True),
    "actor_mlp": BODY,
    "kind": functools.partial(FlashSAC, noise=None),
}


def test_the_actor_trains_by_statistics_of_both_rows():
    sac, experience = make(**FLASH), rows(BOX)
    observation, moments = experience.time_step.observation, Moments()
    torch.manual_seed(4)
    sac.policy(observation[1:], None).choose()
    both = sac.policy_with_moments(observation, None, moments)
    choice = nest.at(both, slice(1)).choose()
    torch.manual_seed(4)
    info = sac.train_step(experience, None).info
    q = sac.critic(observation[:1], choice.box).amin(0)
    alpha = sac.temperatures.log_alpha["box"].exp()
    torch.testing.assert_close(info.value, q - alpha * choice.log_density)
    mean = info.moments[sac.actor_mlp.input_norm.mean]
    torch.testing.assert_close(mean, 0.01 * observation.reshape(-1, 3).mean(0))


def test_norms_are_kept_over_20_updates():
    sac = make(**FLASH)
    learner, before = learner_of(sac, learning_rate=0.01), copy.deepcopy(sac.state_dict())
    for k in range(20):
        learner.train(chunk(rows(BOX, seed=k)))
    layers = {name: each for name, each in sac.named_modules() if isinstance(each, Projected) and "target" not in name}
    assert len(layers) == 2 * (3 + 4) + 1  # linear layers and norms of both bodies, and the head of the critics
    for name, layer in layers.items():
        assert not torch.equal(layer.weight, before[f"{name}.weight"]), name
        if isinstance(layer, UnitRows):
            norms = layer.weight.norm(dim=layer.input_dim)
            torch.testing.assert_close(norms, torch.ones_like(norms))
        else:
            square = sum(parameter.square().sum(-1) for parameter in layer.parameters())
            torch.testing.assert_close(square, torch.full_like(square, layer.weight.shape[-1]))


def test_held_noise_is_policy_state_that_evaluation_does_not_change():
    sac = make(kind=FlashSAC)
    step = nest.at(rows(BOX).time_step, 0)
    state = sac.initial_state(6)
    acted = sac.rollout_step(step, state)
    held = {"noise": acted.state["noise"], "left": torch.ones(6, dtype=torch.int64)}
    again = sac.rollout_step(step, held)
    assert torch.equal(again.output, acted.output) and not again.state["left"].any()
    best = sac.predict_step(step, held)
    assert best.state is held and torch.equal(best.output, make().predict_step(step, None).output)


def test_noise_is_refused_without_a_box_leaf():
    with pytest.raises(UsageError, match="requires an action with a Box leaf"):
        make(DISCRETE, kind=FlashSAC)
