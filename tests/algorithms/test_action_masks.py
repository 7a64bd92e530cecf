"""Action masks: no hook takes a forbidden action, and losses and targets are those of the allowed ones."""

import functools
import itertools

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from alfish import nest, specs
from alfish.algorithms.a2c import A2C
from alfish.algorithms.appo import APPO
from alfish.algorithms.bc import BC
from alfish.algorithms.dqn import DQN
from alfish.algorithms.iql import IQL
from alfish.algorithms.ppo import PPO
from alfish.algorithms.recurrent_sac import RecurrentSAC
from alfish.algorithms.sac import SAC
from alfish.data import Experience, StepType, TimeStep
from alfish.errors import UsageError
from alfish.networks import GRU, ActorCritic, Encoder, PolicyHead, QNetwork, Torso
from alfish.specs import ActionMask

X = spaces.Box(-1, 1, (3,), np.float32)
REWARD = specs.reward_spec()
NESTED = spaces.Dict(
    choice=spaces.Discrete(3, start=1),
    parts=spaces.Tuple([spaces.Box(-3, 1, (2,), np.float32), spaces.MultiBinary(2), spaces.MultiDiscrete([2, 3])]),
)
ACTIONS = {
    "discrete": spaces.Discrete(5),
    "multi_discrete": spaces.MultiDiscrete([2, 3]),
    "multi_binary": spaces.MultiBinary(4),
    "nested": NESTED,
    "hybrid": spaces.Dict(a=spaces.Box(-1, 1, (2,), np.float32), b=spaces.Discrete(4)),
}
RECURRENT = functools.partial(Torso, memory=GRU)
MAKERS = {
    "PPO": PPO,
    "A2C": A2C,
    "APPO": APPO,
    "PPO with memory": functools.partial(PPO, network=functools.partial(ActorCritic, actor_torso=RECURRENT)),
    "DQN": DQN,
    "DQN with memory": functools.partial(DQN, q_network=functools.partial(QNetwork, torso=RECURRENT)),
    "BC": BC,
    "BC with memory": functools.partial(BC, torso=RECURRENT),
    "IQL": IQL,
    "SAC": SAC,
    "RecurrentSAC": RecurrentSAC,
}
TAKES = {  # others take all
    "DQN": {"discrete"},
    "DQN with memory": {"discrete"},
    "SAC": {"discrete", "hybrid"},
    "RecurrentSAC": {"discrete", "hybrid"},
}
CASES = [(name, kind) for name in MAKERS for kind in ACTIONS if kind in TAKES.get(name, ACTIONS)]


def spec_of(action, size=None):
    action_spec = specs.action_spec(action)
    mask = ActionMask(size or specs.num_choices(action_spec))
    return specs.observation_spec(spaces.Dict(x=X, mask=mask)), action_spec


def drawn(action_spec, leading, seed=0):
    """Masks that allow about a third of the choices, and one of each entry at least."""
    generator = np.random.default_rng(seed)
    layout = specs.MaskLayout(action_spec, specs.num_choices(action_spec), "m")
    count = int(np.prod(leading))
    mask = (generator.random((count, layout.size)) < 1 / 3).astype(np.int8)
    while (empty := layout.is_empty(mask)).any():
        mask[empty] = generator.random((int(empty.sum()), layout.size)) < 1 / 2
    return torch.from_numpy(mask).reshape(*leading, layout.size), layout


def rows(algorithm, leading, seed=0):
    mask, layout = drawn(algorithm.action_spec, leading, seed)
    generator = torch.Generator().manual_seed(seed)
    observation = {"x": torch.randn(*leading, 3, generator=generator), "mask": mask}
    step_type = torch.full(leading, StepType.MID, dtype=torch.int32)
    one = torch.ones(leading)
    prev_action = specs.zeros(algorithm.action_spec, leading)
    return TimeStep(step_type, one, one, observation, prev_action, step_type), layout


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_no_hook_takes_an_action_that_its_mask_forbids(name, kind):
    torch.manual_seed(0)
    algorithm = MAKERS[name](*spec_of(ACTIONS[kind]), REWARD)
    for parameter in algorithm.parameters():  # a policy that is certain of what is often forbidden
        parameter.data.mul_(10)
    batch, layout = rows(algorithm, (400,))
    state = algorithm.initial_state(400)
    mask = batch.observation["mask"].numpy()
    with torch.no_grad():
        for action in (
            algorithm.rollout_step(batch, state).output,
            algorithm.predict_step(batch, state).output,
            algorithm.random_action(batch),
        ):
            assert not layout.forbids(mask, nest.arrays(action)).any()


@pytest.mark.parametrize("kind", ACTIONS)
def test_encoders_leave_the_mask_out_by_default(kind):
    observation_spec, action_spec = spec_of(ACTIONS[kind])
    blind, seeing = Encoder(observation_spec), Encoder(observation_spec, sees_mask=True)
    assert blind.output_size == 3 and seeing.output_size == 3 + specs.num_choices(action_spec)
    named = Encoder(observation_spec, leaves={"mask": lambda spec: _Ones(2)})
    assert named.output_size == 5
    x = torch.randn(2, 3)
    one, other = ({"x": x, "mask": drawn(action_spec, (2,), seed)[0]} for seed in (0, 1))
    assert torch.equal(blind(one), x) and torch.equal(blind(one), blind(other))
    assert not torch.equal(seeing(one), seeing(other))


class _Ones(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.output_size = size

    def forward(self, leaf):
        return torch.ones(*leaf.shape[:-1], self.output_size)


def test_an_observation_that_is_only_a_mask_is_refused_or_visible():
    spec = {"mask": ActionMask(3)}
    with pytest.raises(UsageError, match="consists of an action mask only; set Encoder.sees_mask = True"):
        Encoder(spec)
    assert Encoder(spec, sees_mask=True).output_size == 3


def test_a_head_that_takes_no_masks_is_refused():
    class Head(nn.Module):
        def __init__(self, input_size, action_spec):
            super().__init__()
            self.inner = PolicyHead(input_size, action_spec)

        def forward(self, features):
            return self.inner(features)

    with pytest.raises(UsageError, match="has an action mask, but Head.forward takes features only"):
        ActorCritic(*spec_of(spaces.Discrete(3)), REWARD, policy_head=Head)
    ActorCritic(X, spaces.Discrete(3), REWARD, policy_head=Head)


@pytest.mark.parametrize("name", ["PPO", "A2C", "APPO", "BC"])
def test_the_gradient_equals_that_of_a_policy_with_only_allowed_choices(name):
    """The same choices are forbidden at all rows; the other policy's last layer has the allowed ones only."""
    torch.manual_seed(0)
    kept = torch.tensor([0, 2, 3])
    observation_spec, action_spec = spec_of(spaces.Discrete(5))
    masked = MAKERS[name](observation_spec, action_spec, REWARD)
    alone = MAKERS[name](X, spaces.Discrete(3), REWARD)
    state = masked.state_dict()
    for key in state:
        if "policy_head" in key:
            state[key] = 30 * state[key][kept]
    alone.load_state_dict(state)
    state = masked.state_dict()
    masked.load_state_dict({key: 30 * value if "policy_head" in key else value for key, value in state.items()})
    step, _ = rows(masked, (6, 8))
    mask = torch.zeros(6, 8, 5, dtype=torch.int8)
    mask[..., kept] = 1
    choice = torch.randint(3, (6, 8))

    def gradients(algorithm, observation, action):
        time_step = step._replace(observation=observation)
        on_policy = algorithm.on_policy
        experience = Experience(time_step, action, None, algorithm.initial_state(8))
        with torch.no_grad():
            if on_policy:
                infos = algorithm.rollout_step(time_step, None).info
                experience = algorithm.preprocess_experience(experience._replace(info=infos))
                whole = experience.time_step, experience.action, experience.info
                cut = nest.map(lambda leaf: leaf[:5], whole)  # the last row is for its value only
                experience = experience._replace(time_step=cut[0], action=cut[1], info=cut[2])
        trained = algorithm.train_step(experience, None).info
        loss = algorithm.calc_loss(experience, trained).loss
        total = sum(part.mean() for part in loss.values()) if isinstance(loss, dict) else loss.mean()
        algorithm.zero_grad()
        total.backward()
        return total.detach(), {key: p.grad for key, p in algorithm.named_parameters() if p.grad is not None}

    ours, found = gradients(masked, {"x": step.observation["x"], "mask": mask}, kept[choice])
    theirs, expected = gradients(alone, step.observation["x"], choice)
    assert torch.allclose(ours, theirs, atol=1e-6)
    assert found.keys() == expected.keys() and any((grad != 0).any() for grad in expected.values())
    for key, gradient in found.items():
        if "policy_head" in key:
            forbidden = [k for k in range(5) if k not in kept]
            assert (gradient[forbidden] == 0).all()
            gradient = gradient[kept]
        assert torch.allclose(gradient, expected[key], atol=1e-5), key


class Table(nn.Module):
    """Q of one-hot states, without the mask."""

    def __init__(self, observation_spec, num_actions):
        super().__init__()
        self.q = nn.Parameter(torch.zeros(3, num_actions))

    def initial_state(self, batch_size):
        return None

    def forward(self, time_step, state):
        return time_step.observation["x"] @ self.q, state


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize(("length", "lambda_"), [(2, 1.0), (3, 1.0), (4, 1.0), (4, 0.6)])
def test_dqn_targets_use_the_action_mask_of_the_bootstrap_row(double, length, lambda_):
    """Three states of three actions, in each of which the forbidden action has the largest value by far."""
    gamma, observation_spec, action_spec = 0.5, *spec_of(spaces.Discrete(3))
    dqn = DQN(
        observation_spec, action_spec, REWARD, q_network=Table, gamma=gamma, lambda_=lambda_, double=double,
        huber_delta=None,
    )  # fmt: skip
    online = torch.tensor([[1.0, 2.0, 90.0], [80.0, 4.0, 3.0], [5.0, 70.0, 6.0]])
    target = torch.tensor([[0.5, 0.2, 900.0], [800.0, 0.1, 0.9], [0.7, 700.0, 0.3]])
    allowed = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 0, 1]], dtype=torch.int8)
    dqn.q_network.q.data.copy_(online)
    dqn.target.network.q.data.copy_(target)
    for states in itertools.product(range(3), repeat=length):
        index = torch.tensor(states)[:, None]
        step_type = torch.full((length, 1), StepType.MID, dtype=torch.int32)
        reward, one = torch.arange(length, dtype=torch.float32)[:, None], torch.ones(length, 1)
        observation = {"x": torch.eye(3)[index], "mask": allowed[index]}
        taken = torch.zeros(length, 1, dtype=torch.int64)
        step = TimeStep(step_type, reward, one, observation, taken, step_type)
        experience = Experience(step, taken, None, None)
        info = dqn.train_step(experience, None).info
        loss = dqn.calc_loss(experience, info)
        # By hand: V of a row is the target network's value of the best allowed action, then the lambda-return.
        value = []
        for s in states:
            choices = [a for a in range(3) if allowed[s, a]]
            chooser = online if double else target
            value.append(float(target[s, max(choices, key=lambda a: float(chooser[s, a]))]))
        expected = value[-1]
        for t in range(length - 1, 0, -1):
            later = value[t] if t == length - 1 else (1 - lambda_) * value[t] + lambda_ * expected
            expected = float(reward[t]) + gamma * later
        error = expected - float(online[states[0], 0])
        assert float(loss.priority.detach()) == pytest.approx(abs(error), abs=1e-5)


def test_with_an_empty_mask_dqn_takes_the_best_action():
    dqn = DQN(*spec_of(spaces.Discrete(3)), REWARD, q_network=Table)
    dqn.q_network.q.data.copy_(torch.tensor([[1.0, 5.0, 3.0]] * 3))
    step, _ = rows(dqn, (2,))
    mask = torch.tensor([[0, 0, 0], [1, 0, 1]], dtype=torch.int8)
    step = step._replace(observation={"x": torch.eye(3)[[0, 0]], "mask": mask})
    assert dqn.predict_step(step, None).output.tolist() == [1, 2]


def test_dqn_explores_uniformly_over_the_allowed_actions():
    torch.manual_seed(0)
    dqn = DQN(*spec_of(spaces.Discrete(4)), REWARD, epsilon=1.0)
    mask = torch.tensor([1, 0, 1, 1], dtype=torch.int8).expand(30_000, 4)
    step, _ = rows(dqn, (30_000,))
    step = step._replace(observation={"x": step.observation["x"], "mask": mask})
    action = dqn.rollout_step(step, None).output
    found = torch.bincount(action, minlength=4) / 30_000
    assert torch.allclose(found, torch.tensor([1 / 3, 0, 1 / 3, 1 / 3]), atol=0.01) and found[1] == 0


def sac_window(algorithm, states, allowed, step_type):
    """Rows of one-hot states `[L, 1]` with their masks; reward k at row k."""
    index, length = torch.tensor(states)[:, None], len(states)
    reward, one = torch.arange(length, dtype=torch.float32)[:, None], torch.ones(length, 1)
    observation = {"x": torch.eye(3)[index], "mask": allowed[index]}
    step_type = torch.full((length, 1), step_type, dtype=torch.int32)
    taken = torch.zeros(length, 1, dtype=torch.int64)
    return Experience(TimeStep(step_type, reward, one, observation, taken, step_type), taken, None, None)


@pytest.mark.parametrize("length", [2, 4])
def test_sacs_values_and_entropies_are_only_over_the_allowed_choices(length):
    """The forbidden choice of each of three states has a huge value and nearly all of the unmasked probability."""
    torch.manual_seed(0)
    gamma, alpha = 0.5, 0.3
    sac = SAC(
        *spec_of(spaces.Discrete(3)), REWARD, gamma=gamma, initial_alpha=alpha, discrete_entropy_fraction=0.4,
        actor_mlp=_Same,
    )  # fmt: skip
    allowed = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 0, 0]], dtype=torch.int8)
    forbidden = allowed == 0
    logits = torch.randn(3, 3) + 20 * forbidden
    table = torch.randn(2, 3, 3) + 1e4 * forbidden  # of the target critics
    sac.policy_head.discrete.weight.data.copy_(logits.T)
    sac.policy_head.discrete.bias.data.zero_()
    sac.target_critic.forward = lambda features, box: table[:, features.argmax(-1)]
    sac.target_critic.network.features = lambda step, state: (step.observation["x"], state)
    states = torch.randint(3, (length,)).tolist()
    experience = sac_window(sac, states, allowed, StepType.MID)
    info = sac.train_step(experience, None).info
    expected = []
    for s in states:
        keep = allowed[s].bool()
        p = logits[s][keep].softmax(-1)
        entropy = -(p * p.log()).sum()
        expected.append(float((p * table[:, s].amin(0)[keep]).sum() + alpha * entropy))
        assert 0 <= entropy <= np.log(int(keep.sum())) + 1e-6
    assert info.following.value[:, 0].tolist() == pytest.approx(expected[-1:], abs=1e-4)
    loss = sac.calc_loss(experience, info).loss
    allowed_now = int(allowed[states[0]].sum())
    excess = float(info.entropies["discrete"].detach()) - 0.4 * np.log(allowed_now)
    assert float(loss["alpha"].detach()) == pytest.approx(np.log(alpha) * excess, abs=1e-5)
    (gradient,) = torch.autograd.grad(loss["actor"].sum(), sac.policy_head.discrete.bias)
    assert (gradient[forbidden[states[0]]] == 0).all()


class _Same(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.output_size = size

    def forward(self, features):
        return features
