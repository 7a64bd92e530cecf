"""Parts of an algorithm that are frozen, or train with a learning rate of their own."""

import functools
import pickle

import pytest
import torch
from gymnasium import spaces
from test_compiled import ADAM, assert_alike, assert_close, both, chunks_of, make, train
from torch import nn

from alfish import specs
from alfish.algorithms.acting import ModeSwitch
from alfish.algorithms.dqn import DQN
from alfish.errors import UsageError
from alfish.learner.learner import Learner
from alfish.networks import MLP, QNetwork, Torso
from alfish.networks.bodies.batch_norm import Moments
from alfish.parameters.schedules import Linear

PART = "network.actor_torso"


def trained(name, **settings):
    """The algorithm, its learner and the summaries of three iterations."""
    algorithm = make(name)
    learner = Learner(algorithm, **{"optimizer": ADAM, "learning_rate": 1e-2, **settings})
    torch.manual_seed(7)
    return algorithm, learner, train(algorithm, learner, [chunks_of(name, 4, seed=k) for k in range(3)])


def moved(name, algorithm):
    before = dict(make(name).named_parameters())
    return {key for key, value in algorithm.named_parameters() if not torch.equal(value, before[key])}


def test_frozen_parts_are_unchanged_and_not_in_an_optimizer():
    algorithm, learner, _ = trained("ppo", frozen_parts=[PART])
    names = {name for name, _ in algorithm.named_parameters()}
    assert moved("ppo", algorithm) == {name for name in names if not name.startswith(PART)}
    size = sum(p.numel() for name, p in algorithm.named_parameters() if not name.startswith(PART))
    assert [len(moments) for moments in learner.state_dict()["optimizers"]["all"]["first"]] == [size]


def test_target_network_copies_of_frozen_parts_compute_equally():
    torso = functools.partial(Torso, mlp=functools.partial(MLP, layers=(8,), noisy=True))
    box, reward = spaces.Box(-1, 1, (3,)), specs.reward_spec()
    dqn = DQN(box, spaces.Discrete(2), reward, q_network=functools.partial(QNetwork, torso=torso))
    learner = Learner(dqn, frozen_parts=["q_network.torso"])
    observation, networks = torch.randn(5, 3), (dqn.q_network.torso, dqn.target.network.torso)
    ModeSwitch(dqn, learner.frozen.modules).switch(training=True)
    found = [network.mlp(observation) for network in (*networks, *networks)]
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize(
    "change, words",
    [
        (lambda p: setattr(p, "data", 0.9 * p.data), "bias was given other memory during training"),
        (lambda p: p.requires_grad_(False), r"bias was frozen by requires_grad_\(False\) during training"),
    ],
    ids=["memory", "frozen"],
)
def test_a_parameter_that_updates_do_not_reach_is_named(interpreted, compile, change, words):
    algorithm, learner, _ = trained("ppo", compile=compile)
    change(algorithm.network.value_head.bias)
    with pytest.raises(UsageError, match=words):
        train(algorithm, learner, [chunks_of("ppo", 4)])


def test_parameters_that_are_written_in_place_train(interpreted):
    algorithm, learner, _ = trained("ppo", compile=True)
    with torch.no_grad():
        algorithm.network.value_head.bias.copy_(torch.tensor([3.0]))
    train(algorithm, learner, [chunks_of("ppo", 4)])
    assert algorithm.network.value_head.bias.item() not in (3.0, 0.0)


def test_a_part_with_rate_0_does_not_train_or_affect_the_rest():
    rates = {"all": 1e-2, PART: 0.0}
    algorithm, learner, summaries = trained("ppo", learning_rate=rates)
    assert not any(name.startswith(PART) for name in moved("ppo", algorithm))
    frozen, _, _ = trained("ppo", frozen_parts=[PART])
    assert_close(algorithm.state_dict(), frozen.state_dict())
    assert list(learner.state_dict()["optimizers"]) == ["all", f"all/{PART}"]
    assert summaries[-1]["learning_rate/all"] == 1e-2 and summaries[-1][f"learning_rate/all/{PART}"] == 0
    assert "loss" in summaries[-1] and "grad_norm" in summaries[-1]


@pytest.mark.parametrize("name, groups", [("ppo", ["all"]), ("sac box", ["critic", "actor", "alpha"])])
def test_part_rates_equal_to_the_group_rate_change_nothing(name, groups):
    """One gradient norm of the whole group clips all of its parts."""
    part = {"ppo": "network.critic_torso", "sac box": "critic.body.0"}[name]
    plain, _, before = trained(name, learning_rate=dict.fromkeys(groups, 1e-2), max_grad_norm=0.1)
    parted, _, after = trained(name, learning_rate=dict.fromkeys([*groups, part], 1e-2), max_grad_norm=0.1)
    assert_close(parted.state_dict(), plain.state_dict(), 1e-6)
    names = [name for name in before[-1] if name.startswith(("loss", "grad_norm"))]
    assert {name: after[-1][name] for name in names} == pytest.approx({name: before[-1][name] for name in names})


def test_a_parameter_belongs_to_the_part_with_the_longest_name():
    algorithm, _, _ = trained("ppo", learning_rate={"all": 0.0, "network": 1e-2, PART: 0.0})
    assert moved("ppo", algorithm) == {n for n, _ in algorithm.named_parameters() if not n.startswith(PART)}


def test_compiled_updates_with_parts_equal_the_plain_learner(interpreted):
    iterations = [chunks_of("sac discrete", 4, weighted=True)]
    rates = {"critic": 1e-2, "actor": 3e-3, "alpha": 1e-2, "critic.body.0": Linear(1e-3, 0.0), "actor_mlp": 0.0}
    settings = {"learning_rate": rates, "max_grad_norm": 0.5, "optimizer": ADAM}
    plain, made = both("sac discrete", iterations, **settings, frozen_parts=["critic.body.0.bias"])
    assert_alike(plain, made)
    still = {name for name, _ in plain[0].named_parameters()} - moved("sac discrete", made[0])
    assert {
        "critic.body.0.bias",
        "actor_mlp.0.weight",
        "actor_mlp.0.bias",
    } <= still and "critic.body.0.weight" not in still
    assert list(made[1].state_dict()["optimizers"]) == [
        "critic",
        "critic/critic.body.0",
        "actor",
        "actor/actor_mlp",
        "alpha",
    ]


def test_a_resumed_learner_with_parts_continues_with_equal_bits():
    settings = {"learning_rate": {"all": 1e-2, PART: 1e-3}, "optimizer": ADAM}
    iterations = [chunks_of("ppo", 4, seed=k) for k in range(4)]
    algorithm = make("ppo")
    learner = Learner(algorithm, **settings)
    train(algorithm, learner, iterations[:2])
    state = algorithm.state_dict(), learner.state_dict()
    again = make("ppo")
    resumed = Learner(again, **settings)
    again.load_state_dict(state[0])
    resumed.load_state_dict(state[1])
    for one, trainer in ((algorithm, learner), (again, resumed)):
        train(one, trainer, iterations[2:])
    assert all(torch.equal(a, b) for a, b in zip(algorithm.parameters(), again.parameters()))


@pytest.mark.parametrize(
    "other, words",
    [
        ({"learning_rate": 1e-2}, r"optimizers of \['all', 'all/network.actor_torso'\].* but this run has \['all'\]"),
        (
            {"learning_rate": {"all": 1e-2, PART: 1e-3}, "frozen_parts": ["network.policy_head"]},
            r"frozen parts \[\], but",
        ),
    ],
)
def test_the_state_of_other_parts_is_refused(other, words):
    learner = Learner(make("ppo"), learning_rate={"all": 1e-2, PART: 1e-3})
    with pytest.raises(UsageError, match=words):
        Learner(make("ppo"), **other).load_state_dict(learner.state_dict())


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"frozen_parts": ["actor_torso"]}, "frozen_parts: PPO has no part 'actor_torso'; close ones are network.act"),
        ({"frozen_parts": ["network"]}, "nothing to train in the group 'all' of PPO"),
        ({"learning_rate": {"all": 1.0, "torso": 1.0}}, r"groups \['all'\], and has no part 'torso'"),
        ({"learning_rate": {"all": 1.0, PART: 1.0}, "frozen_parts": [PART]}, f"'{PART}', which is frozen"),
        ({"learning_rate": {"all": 1.0, PART: 1.0, f"{PART}.mlp": 0.0}}, f"'{PART}', but all of its parameters belong"),
    ],
)
def test_mistakes_are_reported_in_one_sentence(settings, words):
    with pytest.raises(UsageError, match=words):
        Learner(make("ppo"), **settings)


def test_statistics_of_a_frozen_part_stay():
    """BatchNorm's running means would otherwise follow the rows."""
    algorithm = make("dqn")
    algorithm.q_network.torso.encoder = nn.Sequential(algorithm.q_network.torso.encoder, nn.BatchNorm1d(4))
    learner = Learner(algorithm, frozen_parts=["q_network.torso.encoder"])
    modes = ModeSwitch(algorithm, learner.frozen.modules)
    for training in (True, False, True):
        modes.switch(training)
        assert algorithm.q_network.torso.mlp.training == training
        assert not algorithm.q_network.torso.encoder[1].training


def test_frozen_batch_norms_keep_their_running_statistics():
    before = dict(make("crossq").named_buffers())
    algorithm, _, _ = trained("crossq", frozen_parts=["actor_mlp", "critic.body.0"])
    x = torch.randn(5, algorithm.actor_mlp[0].mean.numel())
    assert torch.equal(algorithm.actor_mlp(x, Moments()), algorithm.actor_mlp(x))
    changed = {name for name, buffer in algorithm.named_buffers() if not torch.equal(buffer, before[name])}
    in_body = {name for name in before if name.startswith("critic.body") and "mean" in name}
    assert len(in_body) > 1 and {name for name in changed if "mean" in name} == in_body - {"critic.body.0.mean"}


def test_noise_of_a_frozen_part_is_off_wherever_it_acts():
    algorithm = make("dqn")
    algorithm.q_network.torso.mlp = MLP(4, (8,), noisy=True)
    Learner(algorithm, frozen_parts=["q_network.torso"])
    of_worker = pickle.loads(pickle.dumps(algorithm))  # workers act with a copy
    ModeSwitch(of_worker).switch(training=False)
    assert not any(module.training for module in of_worker.q_network.torso.modules())


def test_targets_of_a_frozen_network_stay_equal_to_it():
    torch.manual_seed(0)
    algorithm = make("dqn")
    learner = Learner(algorithm, optimizer=ADAM, frozen_parts=["q_network.torso"])
    train(algorithm, learner, [chunks_of("dqn", 8)])
    online, target = algorithm.q_network.torso, algorithm.target.network.torso
    assert all(torch.equal(a, b) for a, b in zip(online.parameters(), target.parameters()))
