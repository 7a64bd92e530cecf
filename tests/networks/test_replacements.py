"""Networks that stand in place of shipped ones: what each needs, and the sentence where it lacks it."""

import functools

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from alfish.__main__ import main
from alfish.algorithms.bc import BC
from alfish.algorithms.dqn import DQN
from alfish.algorithms.flashsac import FlashSAC
from alfish.algorithms.iql import IQL
from alfish.algorithms.ppo import PPO
from alfish.algorithms.recurrent_sac import RecurrentSAC
from alfish.algorithms.recurrent_td3 import RecurrentTD3
from alfish.algorithms.sac import SAC
from alfish.algorithms.td3 import TD3
from alfish.errors import UsageError
from alfish.errors.user_code import CodeError
from alfish.networks import GRU, LSTM, MLP, ActorCritic, CriticEnsemble, Encoder, PolicyHead, QNetwork, Torso
from alfish.networks.hybrid import HeldNoise

OBSERVATION = spaces.Box(-1, 1, (3,), np.float32)
REWARD = spaces.Box(-np.inf, np.inf, (), np.float32)
CHOICE, BOX = spaces.Discrete(2), spaces.Box(-1, 1, (2,), np.float32)


class Sizeless(nn.Module):
    """Has no `output_size`."""

    def __init__(self, input_size):
        super().__init__()

    def forward(self, features):
        return features


class Sized(Sizeless):
    """All that an encoder or an MLP needs."""

    def __init__(self, spec):
        super().__init__(spec)
        self.output_size = spec if isinstance(spec, int) else spec.shape[0]


class Critic(nn.Module):
    """Has the interface of one critic; `num_members` only if it is told."""

    def __init__(self, observation_spec, action_size, takes_members=True):
        super().__init__()
        self.linear = nn.Linear(3 + action_size, 1)
        self.forward = self.with_members if takes_members else self.without_members

    def features(self, time_step, state):
        return time_step.observation, state

    def with_members(self, features, action, num_members=None):
        return self.linear(torch.cat([features, action], -1)).squeeze(-1)[None]

    def without_members(self, features, action):
        return self.with_members(features, action)


def torso(**settings):
    return lambda: Torso(OBSERVATION, **settings)


def algorithm(kind, action=CHOICE, **settings):
    return lambda: kind(OBSERVATION, action, REWARD, **settings)


REFUSED = [
    (
        algorithm(PPO, network=DQN),
        "PPO.network made a DQN, which has no forward and no policy and no value; it needs forward, policy, value",
    ),
    (torso(mlp=Sizeless), "Torso.mlp made a Sizeless, which has no output_size; it needs forward, output_size"),
    (
        torso(mlp=LSTM),
        r"Torso.mlp made an LSTM, whose forward takes \(features, state, step_type\); it is called with one argument",
    ),
    (
        torso(memory=MLP),
        "Torso.memory made an MLP, which has no initial_state; it needs forward, output_size, initial_state",
    ),
    (torso(mlp=PolicyHead), "Torso.mlp cannot be called as the shipped network is: .*'action_spec'"),
    (torso(encoder=Torso), r"Torso.encoder made a Torso, whose forward takes \(time_step, state\)"),
    (lambda: ActorCritic(OBSERVATION, CHOICE, REWARD, actor_torso=Encoder), "ActorCritic.actor_torso made an Encoder"),
    (lambda: ActorCritic(OBSERVATION, CHOICE, REWARD, critic_torso=Encoder), "ActorCritic.critic_torso made an Enc"),
    (lambda: ActorCritic(OBSERVATION, CHOICE, REWARD, policy_head=Sized), "ActorCritic.policy_head cannot be called"),
    (lambda: QNetwork(OBSERVATION, 2, torso=Encoder), "QNetwork.torso made an Encoder"),
    (lambda: CriticEnsemble(OBSERVATION, 2, memory=Sized), "CriticEnsemble.memory made a Sized, which has no initial"),
    (algorithm(DQN, q_network=PPO), "DQN.q_network"),
    (algorithm(BC, torso=Encoder), "BC.torso made an Encoder"),
    (algorithm(SAC, BOX, critic=lambda *_: MLP(3)), "SAC.critic made an MLP, which has no features and no ensemble"),
    (algorithm(SAC, BOX, actor_mlp=GRU), "SAC.actor_mlp made a GRU"),
    (
        algorithm(RecurrentSAC, BOX, critic=QNetwork),
        "RecurrentSAC.critic cannot be called as the shipped network is: .*'memory'",
    ),
    (
        algorithm(SAC, BOX, actor_mlp=MLP(3)),
        "SAC.actor_mlp cannot be called as .*: it is already an MLP; give its class",
    ),
    (
        algorithm(FlashSAC, BOX, noise=HeldNoise(2)),
        "FlashSAC.noise cannot be called as .*: it is already a HeldNoise; give its",
    ),
    (
        algorithm(FlashSAC, BOX, noise=MLP),
        "FlashSAC.noise made an MLP, which has no initial_state and no sample; it needs initial",
    ),
    (
        algorithm(FlashSAC, BOX, noise=lambda size: None),
        "FlashSAC.noise made None, which has no initial_state and no sample",
    ),
    (
        lambda: CriticEnsemble(OBSERVATION, 2, body=nn.Linear),
        "CriticEnsemble.body made a Linear, which has no output_si",
    ),
    (lambda: CriticEnsemble(OBSERVATION, 2, body=lambda size: None), "CriticEnsemble.body cannot be called as"),
    (algorithm(TD3, BOX, actor=lambda *_: GRU(3)), "TD3.actor made a GRU"),
    (algorithm(TD3, BOX, critic=QNetwork), "TD3.critic"),
    (
        algorithm(TD3, BOX, critic=functools.partial(Critic, takes_members=False)),
        r"TD3.critic made a Critic, whose forward takes \(features, action\); it is called with 2 arguments and num",
    ),
    (algorithm(RecurrentTD3, BOX, critic=QNetwork), "RecurrentTD3.critic cannot be called"),
    (algorithm(IQL, BOX, value=lambda *_: MLP(3)), "IQL.value made an MLP, which has no features"),
]


def test_a_wrong_kind_of_network_is_refused_with_missing_methods():
    for make, words in REFUSED:
        with pytest.raises(UsageError, match=f"^{words}"):
            make()


@pytest.mark.parametrize("kind", [TD3, IQL])
def test_custom_critics_receive_the_action_as_second_argument(kind):
    assert isinstance(algorithm(kind, BOX, critic=Critic)().critic, Critic)


def test_networks_of_any_class_with_the_required_methods_are_accepted():
    features, _ = Torso(OBSERVATION, encoder=Sized, mlp=Sized)(type("Row", (), {"observation": torch.ones(5, 3)}), None)
    assert features.shape == (5, 3)


def test_a_wrong_class_in_gin_is_reported_in_one_sentence(tmp_path, capsys):
    conf = tmp_path / "mine.gin"
    conf.write_text("include 'ppo_cartpole.gin'\nimport alfish.algorithms.dqn\nPPO.network = @DQN\n")
    assert main(["train", f"--gin_file={conf}", f"--root_dir={tmp_path / 'run'}"]) == 2
    assert "PPO.network made a DQN, which has no forward and no policy and no value" in capsys.readouterr().err


def test_an_unbound_schedule_value_is_reported_in_one_sentence(tmp_path, capsys):
    schedule = "Learner.learning_rate = @Linear()"
    command = ["train", "--gin_file=ppo_cartpole.gin", f"--root_dir={tmp_path / 'run'}", f"--gin_param={schedule}"]
    assert main(command) == 2
    assert "alfish train: @Linear() requires a value for Linear.start; bind Linear.start\n" in capsys.readouterr().err


def test_errors_inside_custom_networks_are_not_changed():
    def broken(input_size):
        return None + input_size

    with pytest.raises(CodeError, match=r"^Torso.mlp raised TypeError: unsupported operand.* in broken\)"):
        Torso(OBSERVATION, mlp=broken)


def test_a_network_without_a_forward_is_named():
    class Headless(nn.Module):
        output_size = 4

        def __init__(self, input_size):
            super().__init__()

    with pytest.raises(
        UsageError, match="Torso.mlp made a Headless, which has no forward; it needs forward, output_si"
    ):
        Torso(OBSERVATION, mlp=Headless)
