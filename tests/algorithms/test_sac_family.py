"""DroQ, REDQ and TQC as confs of SAC: networks, targets and the order of updates are those of the papers."""

import gin
import pytest
import torch
from test_sac import BOX, OBSERVATION, REWARD, rows
from torch import nn

from alfish.algorithms.acting import in_eval_mode
from alfish.algorithms.redq import REDQ, TQC
from alfish.algorithms.sac import SAC
from alfish.configuration import reading
from alfish.data import Batch
from alfish.functional.return_distributions import Quantiles
from alfish.learner.batches import Minibatches
from alfish.learner.learner import Learner
from alfish.networks.bodies.residual import EnsembleLayerNorm, EnsembleLinear

HIDDEN = {
    "sac": [EnsembleLinear, nn.ReLU],
    "droq": [EnsembleLinear, nn.Dropout, EnsembleLayerNorm, nn.ReLU],
    "redq": [EnsembleLinear, nn.ReLU],
    "tqc": [EnsembleLinear, nn.ReLU],
}


def configured(name, *bindings):
    """The algorithm of a conf on small spaces."""
    reading.read([f"{name}_pendulum.gin"], bindings)
    torch.manual_seed(0)
    return {"droq": REDQ, "redq": REDQ, "tqc": TQC}.get(name, SAC)(OBSERVATION, BOX, REWARD)


def update(learner, seed=1):
    batch = Batch(rows(BOX, seed=seed), torch.ones(1, 6, dtype=torch.bool))
    learner.train([Minibatches(batch, torch.arange(6)[None])])


@pytest.fixture
def dropouts(monkeypatch):
    """Masks that dropout has drawn, one for each call: True where a feature was dropped."""
    masks, dropout = [], nn.functional.dropout

    def spy(x, p, training, inplace):
        out = dropout(x, p, training, inplace)
        if training:
            masks.append((out == 0) & (x != 0))
        return out

    monkeypatch.setattr(nn.functional, "dropout", spy)
    return masks


@pytest.mark.parametrize("name", HIDDEN)
def test_a_conf_makes_the_critics_of_its_paper(name):
    sac = configured(name)
    assert [type(layer) for layer in sac.critic.body] == [*HIDDEN[name] * 2, EnsembleLinear]
    assert sac.critic.ensemble_size == (10 if name == "redq" else 2)
    assert {layer.p for layer in sac.critic.body if isinstance(layer, nn.Dropout)} <= {0.01}
    widths = [layer.weight.shape[-1] for layer in sac.critic.body if isinstance(layer, EnsembleLinear)]
    assert widths == ([256, 256, 25] if name == "tqc" else [64, 64, 1])
    assert isinstance(sac.values, Quantiles) == (name == "tqc")


@pytest.mark.parametrize("name", ["droq", "redq"])
def test_twenty_critic_updates_per_step_and_one_actor_update(name):
    sac = configured(name)
    assert gin.query_parameter("ReplayBatches.updates_per_env_step") == 20
    turns = []
    for _ in range(40):
        turns.append(sac.trains("actor"))
        sac.num_updates += 1
    assert turns == ([False] * 19 + [True]) * 2


def test_temperatures_are_shown_in_each_update_and_entropies_where_the_actor_trains():
    sac, experience, shown = configured("droq"), rows(BOX), []
    for _ in range(20):
        shown.append(sac.calc_loss(experience, sac.train_step(experience, None).info).extra)
        sac.num_updates += 1
    assert ["entropy_box" in extra for extra in shown] == [False] * 19 + [True]
    assert all(extra["alpha_box"].item() == pytest.approx(1.0) for extra in shown)


@pytest.mark.parametrize("name", ["droq", "redq", "tqc"])
def test_the_actor_maximises_the_mean_of_the_critics(name):
    sac = configured(name, "SAC.actor_period = 1", "SAC.initial_alpha = 1e-9", "CriticEnsemble.dropout = 0.0")
    experience = rows(BOX)
    torch.manual_seed(3)
    value = sac.train_step(experience, None).info.value
    torch.manual_seed(3)
    sac.policy(experience.time_step.observation[1:], None).choose()
    if name == "redq":
        torch.randperm(10)  # the target's critics
    choice = sac.policy(experience.time_step.observation[:1], None).choose()
    q = sac.critic(experience.time_step.observation[:1], choice.box)
    torch.testing.assert_close(value, (q.mean(-1) if name == "tqc" else q).mean(0))


def test_redq_takes_the_least_of_the_two_critics_that_torchs_generator_draws():
    sac, experience = configured("redq", "SAC.initial_alpha = 1e-9"), rows(BOX)
    pairs = set()
    for seed in range(8):
        torch.manual_seed(seed)
        value = sac.train_step(experience, None).info.following.value
        torch.manual_seed(seed)
        drawn = sac.policy(experience.time_step.observation[1:], None).choose()
        members = torch.randperm(10)[:2]
        q = sac.target_critic(experience.time_step.observation[1:], drawn.box)
        torch.testing.assert_close(value, q[members].amin(0))
        pairs.add(tuple(members.tolist()))
    assert len(pairs) > 1


def test_droq_draws_new_dropout_for_critics_and_targets(dropouts):
    sac = configured("droq", "SAC.actor_period = 2", "CriticEnsemble.dropout = 0.5")
    learner = Learner(sac, compile=False)
    update(learner)
    assert len(dropouts) == 4, "two hidden layers of the critics, and of their targets"
    update(learner)
    assert len(dropouts) == 4 + 6, "and of the actor's critics"
    assert all(mask.float().mean() > 0.1 for mask in dropouts)
    for mask, other in zip(dropouts[::2], dropouts[2::2]):  # first layers
        assert not torch.equal(mask, other)
    assert not torch.equal(dropouts[0][0], dropouts[0][1]), "each critic has masks of its own"


def test_droq_has_no_dropout_in_acting_and_evaluation(dropouts):
    sac = configured("droq", "SAC.actor_period = 1", "CriticEnsemble.dropout = 0.5")
    experience = rows(BOX)
    step = experience.time_step._replace(observation=experience.time_step.observation[0])
    with in_eval_mode(sac):
        assert torch.equal(sac.state_value(step, None), sac.state_value(step, None))
        sac.rollout_step(step, None)
    batch = Batch(experience, torch.ones(1, 6, dtype=torch.bool))
    learner = Learner(sac, compile=False)
    assert learner.evaluate(batch) == learner.evaluate(batch)
    assert dropouts == [] and sac.training


def test_quantiles_of_tqc_lose_the_two_largest_of_each_critic():
    sac, experience = configured("tqc", "SAC.initial_alpha = 1e-9"), rows(BOX)
    torch.manual_seed(3)
    value = sac.train_step(experience, None).info.following.value
    torch.manual_seed(3)
    drawn = sac.policy(experience.time_step.observation[1:], None).choose()
    q = sac.target_critic(experience.time_step.observation[1:], drawn.box)  # [2, 1, 6, 25]
    together = torch.cat([q[0], q[1]], -1).sort(-1).values
    torch.testing.assert_close(value, together[..., :46])
