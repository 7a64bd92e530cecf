"""Auxiliary losses: which features they receive, which group they are added to, and what they compute."""

import copy
import functools
import math
import pickle

import numpy as np
import pytest
import torch
from gymnasium import spaces
from test_composition_parts import ACTIONS, OBSERVATION, composed, rows

from alfish import nest, specs
from alfish.algorithms.bc import BC
from alfish.algorithms.composition import CPCA, AuxiliaryLoss, Composed, FeatureRows, Reconstruction, transitions_of
from alfish.algorithms.ddpg import DDPG
from alfish.algorithms.dqn import DQN
from alfish.algorithms.ppo import PPO
from alfish.algorithms.recurrent_sac import RecurrentSAC
from alfish.algorithms.recurrent_td3 import RecurrentTD3
from alfish.algorithms.sac import SAC
from alfish.data import Experience, LossInfo, StepType, TimeStep
from alfish.errors import UsageError
from alfish.learner.optimizers import Adam
from alfish.learner.updates import Updates
from alfish.networks import GRU, MLP, ActorCritic, QNetwork, Torso
from alfish.parameters.schedules import Linear

FIRST, MID, LAST, PAD = StepType.FIRST, StepType.MID, StepType.LAST, StepType.PAD
IMAGES = spaces.Box(0, 255, (8, 8, 3), np.uint8)
SMALL = functools.partial(MLP, layers=(8,))
TORSO = functools.partial(Torso, mlp=SMALL)
WITH_MEMORY = functools.partial(Torso, mlp=SMALL, memory=functools.partial(GRU, size=5))
NETWORK = functools.partial(ActorCritic, actor_torso=TORSO, critic_torso=TORSO)
REMEMBERING = functools.partial(ActorCritic, actor_torso=WITH_MEMORY, critic_torso=WITH_MEMORY)
BOX, DISCRETE = ACTIONS["box"], ACTIONS["discrete"]
# algorithm, action, observation, features' module, their group, rows that train of a window of 4
KINDS = {
    "ppo": (functools.partial(PPO, network=NETWORK), DISCRETE, OBSERVATION, "network.actor_torso", "all", 3),
    "ppo-memory": (functools.partial(PPO, network=REMEMBERING), DISCRETE, OBSERVATION, "network.actor_torso", "all", 3),
    "dqn": (
        functools.partial(DQN, q_network=functools.partial(QNetwork, torso=TORSO)),
        *(DISCRETE, OBSERVATION, "q_network.torso", "all", 1),
    ),
    "dqn-memory": (
        functools.partial(DQN, q_network=functools.partial(QNetwork, torso=WITH_MEMORY)),
        *(DISCRETE, OBSERVATION, "q_network.torso", "all", 3),
    ),
    "sac": (SAC, BOX, IMAGES, "critic.encoder", "critic", 1),
    "sac-memory": (RecurrentSAC, BOX, OBSERVATION, "critic.memory", "critic", 3),
    "ddpg": (DDPG, BOX, IMAGES, "critic.encoder", "critic", 1),
    "td3-memory": (RecurrentTD3, BOX, OBSERVATION, "critic.memory", "critic", 3),
    "bc": (functools.partial(BC, torso=TORSO), BOX, OBSERVATION, "torso", "all", 1),
}
RECONSTRUCTION = functools.partial(Reconstruction, decoder=SMALL)


def time_steps(observation, action, kinds=(FIRST, MID, MID, MID), num_columns=2):
    torch.manual_seed(3)
    length = len(kinds)

    def sampled(spec):
        return nest.map(lambda leaf: leaf.unflatten(0, (length, -1)), specs.sample(spec, length * num_columns))

    observed = torch.rand(length, num_columns, 3)
    if observation is IMAGES:
        observed = torch.randint(256, (length, num_columns, 8, 8, 3), dtype=torch.uint8)
    kind = torch.tensor(kinds, dtype=torch.int32)[:, None].expand(length, num_columns)
    ones = torch.ones(length, num_columns)
    return TimeStep(kind, ones, ones, observed, sampled(action), torch.zeros(length, num_columns, dtype=torch.int32))


def experience(algorithm, observation, action):
    """Rows as an update receives them; on-policy with the info of `preprocess_experience`."""
    step = time_steps(observation, action)
    state = algorithm.initial_state(2) if algorithm.has_state else None
    given = Experience(step, step.prev_action, None, state)
    if not algorithm.on_policy:
        return given
    with torch.no_grad():
        acted = [algorithm.rollout_step(nest.at(step, t), state) for t in range(4)]
        info = nest.map(lambda *each: torch.stack(each), *[each.info for each in acted])
        prepared = algorithm.preprocess_experience(given._replace(info=info))
    return nest.at(prepared._replace(state=None), slice(0, 3))._replace(state=state)


def made(kind, **arguments):
    algorithm, action, observation, *_ = KINDS[kind]
    arguments = {"auxiliary_losses": [RECONSTRUCTION], **arguments}
    whole = composed(algorithm, action, observation, **arguments)
    return whole, experience(whole, observation, action)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_added_with_its_weight_to_the_group_of_the_features(kind):
    whole, given = made(kind, auxiliary_losses=[functools.partial(RECONSTRUCTION, coef=0.5)])
    *_, module, group, num_rows = KINDS[kind]
    inner = whole.algorithm
    torch.manual_seed(1)
    step = whole.train_step(given, given.state)
    torch.manual_seed(2)
    found = whole.calc_loss(given, step.info)
    torch.manual_seed(2)
    alone = inner.calc_loss(step.info.experience, step.info.algorithm)
    losses = alone.loss if isinstance(alone.loss, dict) else {"all": alone.loss}
    own = found.extra["reconstruction/loss"]
    assert own.shape == losses[group].shape == (num_rows, 2)
    assert found.loss.keys() == losses.keys()
    for name, loss in losses.items():
        torch.testing.assert_close(found.loss[name], loss + 0.5 * own if name == group else loss)
    assert whole.auxiliary.path == module and whole.auxiliary.group == group


@pytest.mark.parametrize("kind", KINDS)
def test_auxiliary_loss_trains_only_features_and_its_own_networks(kind):
    whole, given = made(kind)
    *_, module, group, _ = KINDS[kind]
    found = whole.calc_loss(given, whole.train_step(given, given.state).info)
    named = {name: each for name, each in whole.named_parameters() if each.requires_grad}
    gradients = torch.autograd.grad(found.extra["reconstruction/loss"].sum(), list(named.values()), allow_unused=True)
    trained = {name for name, gradient in zip(named, gradients) if gradient is not None}
    below = {"critic.memory": ("critic.encoder", "critic.memory")}.get(module, (module,))
    expected = {n for n in named if n.startswith(("auxiliary.", *(f"algorithm.{each}." for each in below)))}
    assert trained == expected and any(name.startswith("algorithm.") for name in trained)
    members = {id(each) for each in whole.parameter_groups()[group]}
    assert {id(named[name]) for name in trained} <= members


@pytest.mark.parametrize("kind", KINDS)
def test_features_of_training_rows_are_computed_once(kind):
    whole, given = made(kind)
    module = whole.algorithm.get_submodule(KINDS[kind][3])
    outputs = []

    def keep(module, arguments, output):
        if torch.is_grad_enabled():
            outputs.append(output[0] if isinstance(output, tuple) else output)

    handle = module.register_forward_hook(keep)
    found = whole.calc_loss(given, whole.train_step(given, given.state).info)
    handle.remove()
    assert len(outputs) == 1
    part, num_rows = whole.auxiliary["reconstruction"], KINDS[kind][5]
    step = nest.at(given.time_step, slice(0, num_rows))
    expected = part.feature_loss(FeatureRows(outputs[0][:num_rows], step.step_type, transitions_of_row(step)))
    torch.testing.assert_close(found.extra["reconstruction/loss"], expected.loss)
    assert not module._forward_hooks, "a hook that stays would travel to workers"


def transitions_of_row(step):
    return transitions_of(nest.map(lambda leaf: torch.cat([leaf, leaf[-1:]]), step))


def test_an_update_trains_the_decoder_with_the_optimizer_of_the_features_group():
    whole, given = made("sac")
    before = copy.deepcopy(whole.auxiliary.state_dict())
    updates = Updates(whole, Adam, max_grad_norm=None)
    assert set(updates.groups) == {"critic", "actor", "alpha"}
    owned = {id(each) for each in updates.groups["critic"].parameters}
    assert {id(each) for each in whole.auxiliary.parameters()} <= owned
    assert before.keys() == whole.auxiliary.state_dict().keys()


def test_the_weight_may_follow_progress():
    whole, given = made("ppo", auxiliary_losses=[functools.partial(RECONSTRUCTION, coef=Linear(1.0, 0.0))])
    whole.progress.fill_(1.0)
    step = whole.train_step(given, given.state)
    found, alone = whole.calc_loss(given, step.info), whole.algorithm.calc_loss(step.info.experience, step.info[1])
    torch.testing.assert_close(found.loss["all"], alone.loss)


def test_without_a_loss_of_the_group_in_an_update_nothing_is_added():
    whole, given = made("ddpg", feature_module="critic.encoder")
    whole.auxiliary.group = "absent"
    found = whole.calc_loss(given, whole.train_step(given, given.state).info)
    assert "reconstruction/loss" not in found.extra


def test_reconstruction_is_half_the_mean_squared_error_of_vectors_pixels_and_codes():
    spec = spaces.Dict(code=spaces.Discrete(3), pixels=IMAGES, vector=OBSERVATION)
    part = Reconstruction(specs.observation_spec(spec), DISCRETE, 4, decoder=SMALL)
    torch.nn.init.zeros_(part.linear.weight)  # decodes zeros
    observation = {
        "code": torch.tensor([[2]]),
        "pixels": torch.full((1, 1, 8, 8, 3), 51, dtype=torch.uint8),
        "vector": torch.tensor([[[1.0, 2.0, 0.0]]]),
    }
    step = rows([FIRST, MID])._replace(observation=nest.map(lambda leaf: torch.cat([leaf, leaf]), observation))
    loss = part.feature_loss(FeatureRows(torch.ones(1, 1, 4), step.step_type[:1], transitions_of(step))).loss
    assert loss.shape == (1, 1)
    assert math.isclose(float(loss.detach()), (1 + 192 * 0.2**2 + 5) / (3 + 192 + 3) / 2, rel_tol=1e-5)


def cpca(**settings):
    torch.manual_seed(0)
    return CPCA(OBSERVATION, DISCRETE, 4, **settings)


def sequences(kinds, **settings):
    step = rows(kinds)
    return FeatureRows(torch.randn(len(kinds) - 1, 1, 4), step.step_type[:-1], transitions_of(step))


def test_cpca_predicts_rows_of_the_same_episode_only():
    step_type = torch.tensor([MID, LAST, FIRST, MID, PAD]).unsqueeze(1)
    pairs = {(s, f) for s in range(5) for f in range(s + 1, 7)}
    start, future = (torch.tensor(each).unsqueeze(1) for each in zip(*sorted(pairs)))
    valid = CPCA.is_valid(step_type, start, future)
    assert {pair for pair, is_valid in zip(sorted(pairs), valid[:, 0]) if is_valid} == {(0, 1), (2, 3)}


def test_cpca_predicts_from_features_and_the_actions_between():
    part, found = cpca(horizon=3), sequences([FIRST, MID, MID, MID, MID])
    start = torch.tensor([[1], [0]])
    predicted = part.predictions(found, start, 3)
    assert predicted.shape == (3, 2, 1, 4)
    state = found.features[1]
    for k in range(3):
        action = torch.nn.functional.one_hot(found.transitions.action[1 + k, 0], 4).float()
        output, state = part.model.step(action.unsqueeze(0), state)
        torch.testing.assert_close(predicted[k, 0], output)


def test_cpca_of_an_undecided_classifier_is_twice_log_two():
    part = cpca(horizon=2)
    torch.nn.init.zeros_(part.classifier[-1].weight)
    found = part.feature_loss(sequences([FIRST, *[MID] * 8]))
    assert found.loss.shape == () and math.isclose(float(found.loss.detach()), 2 * math.log(2), rel_tol=1e-5)


def test_cpca_has_no_loss_where_no_row_can_be_predicted():
    part = cpca()
    found = part.feature_loss(sequences([LAST, FIRST, PAD, PAD]))
    assert float(found.loss.detach()) == 0
    assert all(torch.isfinite(each).all() for each in torch.autograd.grad(found.loss, list(part.parameters())))


def test_cpca_learns_which_observation_follows():
    """Observations alternate, and features say which is shown: the best loss is 0.95, that of guesses 1.39."""
    part = cpca(horizon=1)
    step = rows([FIRST, *[MID] * 16])
    sign = (-1.0) ** torch.arange(17.0)[:, None, None]
    transitions = transitions_of(step._replace(observation=2 * sign.expand(17, 1, 3)))
    found = FeatureRows(sign[:-1].expand(16, 1, 4), step.step_type[:-1], transitions)
    optimizer, losses = torch.optim.Adam(part.parameters(), 3e-2), []
    for _ in range(60):
        loss = part.feature_loss(found).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert np.mean(losses[-10:]) < 1.15


def test_a_mean_loss_is_a_scalar_loss_of_the_group():
    whole, given = made("ppo-memory", auxiliary_losses=[functools.partial(CPCA, horizon=2), RECONSTRUCTION])
    found = whole.calc_loss(given, whole.train_step(given, given.state).info)
    torch.testing.assert_close(found.scalar["all"], 0.1 * found.extra["cpca/loss"])
    assert {"cpca/true_accuracy", "reconstruction/loss"} < found.extra.keys()


def test_a_composition_of_a_composition_names_the_features_inside():
    inner = functools.partial(Composed, algorithm=KINDS["ppo"][0], auxiliary_losses=[RECONSTRUCTION])
    whole = composed(inner, auxiliary_losses=[functools.partial(Second, decoder=SMALL)])
    given = experience(whole, OBSERVATION, DISCRETE)
    found = whole.calc_loss(given, whole.train_step(given, None).info)
    assert {"reconstruction/loss", "second/loss"} < found.extra.keys()
    assert pickle.loads(pickle.dumps(whole)).auxiliary.path == "algorithm.network.actor_torso"


class Second(Reconstruction):
    name = "second"


class Wrong(AuxiliaryLoss):
    def feature_loss(self, rows):
        return LossInfo(rows.features)


class Greedy(AuxiliaryLoss):
    def feature_loss(self, rows):
        return LossInfo(rows.features.sum(-1), priority=rows.features.sum(-1))


@pytest.mark.parametrize(
    "kind, arguments, sentence",
    [
        ("ppo", {"auxiliary_losses": [CPCA]}, "CPCA compares time steps of a sequence, but PPO trains on single time"),
        (
            "ppo",
            {"auxiliary_losses": [RECONSTRUCTION] * 2},
            "two entries of Composed.auxiliary_losses are named 'recon",
        ),
        ("ppo", {"feature_module": "network.torso"}, "'network.torso' is not a module of it; .*network.actor_torso"),
        ("ppo", {"feature_module": "network.value_head"}, "'network.value_head' has no output_size"),
        ("ppo", {"feature_module": "network.actor_torso.encoder"}, "this module has no parameters that train"),
    ],
)
def test_what_does_not_fit_is_refused_when_it_is_built(kind, arguments, sentence):
    with pytest.raises(UsageError, match=sentence):
        made(kind, **arguments)


def test_features_of_a_vector_that_no_encoder_changes_are_refused():
    with pytest.raises(UsageError, match="features of 'critic.encoder' in SAC, but this module has no parameters"):
        composed(SAC, BOX, OBSERVATION, auxiliary_losses=[RECONSTRUCTION])


@pytest.mark.parametrize(
    "part, sentence",
    [
        (
            Wrong,
            r"feature_loss of Wrong returned a tensor of shape \[3, 2, 8\].*it must return LossInfo\(loss, extra\)",
        ),
        (Greedy, "feature_loss of Greedy returned LossInfo.priority, which only an algorithm may return"),
    ],
)
def test_a_wrong_result_is_named(part, sentence):
    whole, given = made("ppo", auxiliary_losses=[part])
    with pytest.raises(UsageError, match=sentence):
        whole.calc_loss(given, whole.train_step(given, None).info)


def test_a_module_that_the_update_does_not_call_is_named():
    whole, given = made("ppo-memory", feature_module="network.critic_torso")
    whole.auxiliary.path = "network.policy_head"
    whole.algorithm.network.policy_head.forward = lambda *arguments: None
    whole.algorithm.train_step = lambda *arguments: None
    with pytest.raises(UsageError, match="train_step of PPO does not call 'network.policy_head' with gradients"):
        whole.train_step(given, given.state)
