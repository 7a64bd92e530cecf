"""Algorithms with memory: what they see in training is what they saw while acting, and what trains is what should."""

import functools
from typing import NamedTuple

import gin
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from toys import Stamped

from alfish import nest, specs
from alfish.algorithms.a2c import A2C
from alfish.algorithms.dqn import DQN
from alfish.algorithms.ppo import PPO
from alfish.algorithms.recurrent_sac import RecurrentSAC
from alfish.algorithms.recurrent_td3 import RecurrentTD3
from alfish.algorithms.retrace import RecurrentRetraceSAC, RetraceDQN
from alfish.data import Experience, StepType, TimeStep, in_line, trainable
from alfish.environments import VectorEnvironment
from alfish.errors import UsageError
from alfish.functional import returns, targets
from alfish.learner.batches import EpochBatches, OfflineBatches, ReplayBatches, take
from alfish.networks import (
    GRU,
    LSTM,
    MLP,
    ActorCritic,
    AttentionWindow,
    CriticEnsemble,
    DeterministicActor,
    MinGRU,
    QNetwork,
    Torso,
    burn_in_state,
)
from alfish.processes.channel import from_bytes, to_bytes
from alfish.replay import HindsightReplay
from alfish.transforms import FrameStack, Transforms
from alfish.unrollers import SyncUnroller

FIRST, MID, LAST, PAD = StepType.FIRST, StepType.MID, StepType.LAST, StepType.PAD
B = 3
NEXT_STEP, SAME_STEP = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP
MODES = {"next step": NEXT_STEP, "same step": SAME_STEP}
WINDOW = functools.partial(AttentionWindow, length=4, num_heads=1)
KINDS = {"GRU": GRU, "LSTM": LSTM, "MinGRU": MinGRU, "window": WINDOW}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
SMALL = functools.partial(MLP, layers=(6,))
CRITIC = functools.partial(CriticEnsemble, layers=(6,))


def torso(kind):
    return functools.partial(Torso, mlp=SMALL, memory=functools.partial(kind, size=5))


class Noisy(Stamped):
    """Random observations in episodes of 3, 5, 1, 8, ... actions; reward 1 a step."""

    def __init__(self, lengths=(3, 5, 1, 8)):
        super().__init__(lengths, truncates=True)
        self.observation_space = spaces.Box(-1, 1, (4,), np.float32)

    def _observation(self):
        return self.np_random.uniform(-1, 1, 4).astype(np.float32)

    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, 1.0, *rest


class Telling(DQN):
    """Says what it saw in every step, for replay to keep."""

    def __init__(self, *specs, **settings):
        super().__init__(*specs, **settings)
        self.replay_needs = self.replay_needs._replace(info=("q",))

    def rollout_step(self, time_step, state):
        step = super().rollout_step(time_step, state)
        q, _ = self.q_network(time_step, state)
        return step._replace(info=Said(q))


class Said(NamedTuple):
    q: torch.Tensor


def make(algorithm, mode=NEXT_STEP, factories=(), seed=0):
    """Unroller, algorithm and transforms; policies far from where they see nothing."""
    lengths = [(3, 5, 1, 8), (2, 9), (30, 1)]
    env = SyncVectorEnv([lambda own=own: Noisy(own) for own in lengths], autoreset_mode=mode)
    environment = VectorEnvironment(env, list(range(B)))
    transforms = Transforms(factories, environment.observation_spec, environment.reward_spec)
    torch.manual_seed(seed)
    made = algorithm(transforms.observation_spec, environment.action_spec, transforms.reward_spec)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return SyncUnroller(environment, made, transforms), made, transforms


def q_network(kind):
    return functools.partial(QNetwork, torso=torso(kind))


# On-policy.

NETWORKS = {
    "shared": {"shared_torso": True},
    "two": {"critic_torso": torso(LSTM)},
    "actor's alone": {"critic_torso": functools.partial(Torso, mlp=SMALL)},
}


# Each network with each kind of memory, and each of them in both modes.
MIXED = [(network, kind, [*MODES][(i + k) % 2]) for i, network in enumerate(NETWORKS) for k, kind in enumerate(KINDS)]


@pytest.mark.parametrize(
    ("algorithm", "network", "kind", "mode"),
    [*((PPO, *case) for case in MIXED), (A2C, "shared", "GRU", "next step"), (A2C, "two", "LSTM", "same step")],
)
def test_the_policy_in_training_is_the_one_that_acted(algorithm, network, kind, mode):
    """Over unrolls that start within episodes, and episodes that start within unrolls."""
    recurrent = functools.partial(ActorCritic, actor_torso=torso(KINDS[kind]), **NETWORKS[network])
    unroller, made, transforms = make(functools.partial(algorithm, network=recurrent), MODES[mode])
    source = EpochBatches(1, 6)
    source.bind(made, transforms, 6, B)
    begun_within = 0
    for _ in range(6):
        unroll = nest.tensors(unroller.unroll(6))
        step_type = unroll.time_step.step_type
        begun_within += int((step_type[1:] == FIRST).sum())
        source.add(unroll)
        (chunk,) = source.chunks(0)
        if algorithm is PPO:
            log_prob = unroll.info.policy.log_prob(unroll.action)[:-1]
            for columns in chunk.index:
                batch = take(chunk.source, columns)
                info = made.train_step(batch.experience, batch.experience.state).info
                trains = batch.mask
                found = info.policy.log_prob(batch.experience.action)
                torch.testing.assert_close(found[trains], log_prob[:, columns][trains])
        # Values of whole unrolls are those of the minibatches' rows, carried on by the same memory.
        line, acted = in_line(unroll)
        acted = torch.arange(7)[:, None].expand(7, B) if acted is None else acted
        step, info = line.time_step, chunk.source.experience.info
        with torch.no_grad():
            whole = made.network.value(step, line.state)
            (_, value, _), _ = made.network(chunk.source.experience.time_step, chunk.source.experience.state)
        torch.testing.assert_close(value, whole.gather(0, acted[:-1]))
        target = returns.lambda_return(step.reward, 0.99 * step.discount, whole[1:], step.step_type, made._lambda)
        torch.testing.assert_close(info.target[chunk.source.mask], target.gather(0, acted[:-1])[chunk.source.mask])
    assert unroller._actor._program is not None and begun_within > 3
    assert unroll.state is not None and any(leaf.any() for leaf in nest.leaves(unroll.state))


@pytest.mark.parametrize(("network", "kind", "mode"), [case for case in MIXED if case[1] != "MinGRU"])
def test_sequences_shorter_than_the_unroll_begin_with_the_state_of_the_rollout(network, kind, mode):
    recurrent = functools.partial(ActorCritic, actor_torso=torso(KINDS[kind]), **NETWORKS[network])
    unroller, made, transforms = make(functools.partial(PPO, network=recurrent), MODES[mode])
    unroller._actor._numpy_policy = None  # whose floats differ in the last bits
    source = EpochBatches(1, 6, sequence_length=3)
    source.bind(made, transforms, 12, B)
    unroller.stores_states = source.stores_states
    begun_within = begun_with = 0
    for _ in range(4):
        unroll = nest.tensors(unroller.unroll(12))
        source.add(unroll)
        (chunk,) = source.chunks(0)
        experience, mask = chunk.source.experience, chunk.source.mask
        assert mask.shape == (3, 4 * B) and chunk.index.shape == (6, 2)
        begun_within += int((experience.time_step.step_type[1:] == FIRST).sum())
        begun_with += int((experience.time_step.step_type[0] == FIRST).sum())
        behaviour = nest.map(lambda leaf: leaf[:-1].unflatten(0, (4, 3)), unroll.info.info.policy)  # [4, 3, B, ...]
        for k in range(4):
            columns = torch.arange(k * B, (k + 1) * B)
            row = nest.map(lambda leaf, columns=columns: leaf[0, columns], experience.time_step)
            state = nest.map(lambda leaf, columns=columns: leaf[columns], experience.state)
            acted = row.step_type <= MID  # in SAME_STEP nobody acts at LAST
            with torch.no_grad():
                found = made.network.policy(row, state)[0].log_p
            assert torch.equal(found[acted], behaviour.log_p[k, 0][acted])
        # Over all rows, by the memory's own way through FIRST rows.
        info = made.train_step(experience, experience.state).info
        expected = behaviour.log_p.transpose(0, 1).flatten(1, 2)
        torch.testing.assert_close(info.policy.log_p[mask], expected[mask])
        # Advantages are those of the whole unroll.
        whole = EpochBatches(1, 36)
        whole.bind(made, transforms, 12, B)
        whole.add(unroll._replace(info=unroll.info.info))
        advantage = next(whole.chunks(0)).source.experience.info.advantage
        found = experience.info.advantage.unflatten(1, (4, B)).transpose(0, 1).flatten(0, 1)
        torch.testing.assert_close(found, advantage)
    assert begun_within > 5 and begun_with > 2


def test_sequences_that_do_not_fit_the_unroll_or_have_no_memory_are_refused():
    recurrent = functools.partial(ActorCritic, actor_torso=torso(GRU), shared_torso=True)
    _, ppo, transforms = make(functools.partial(PPO, network=recurrent))
    with pytest.raises(UsageError, match="sequence_length is 5, which does not divide Trainer.unroll_length = 12"):
        EpochBatches(sequence_length=5).bind(ppo, transforms, 12, B)
    with pytest.raises(UsageError, match="minibatch_size is 6; .* a multiple of EpochBatches.sequence_length 4"):
        EpochBatches(1, 6, sequence_length=4).bind(ppo, transforms, 12, B)
    _, ppo, transforms = make(PPO)
    with pytest.raises(UsageError, match="sequence_length is 4, but PPO has no memory; remove the setting, or"):
        EpochBatches(sequence_length=4).bind(ppo, transforms, 12, B)
    with pytest.raises(UsageError, match="EpochBatches.sequence_length"):
        EpochBatches(sequence_length=1)


def test_an_update_of_ppo_moves_the_memory():
    recurrent = functools.partial(ActorCritic, actor_torso=torso(GRU), shared_torso=True)
    unroller, ppo, transforms = make(functools.partial(PPO, network=recurrent))
    source = EpochBatches(1)
    source.bind(ppo, transforms, 6, B)
    source.add(unroller.unroll(6))
    (chunk,) = source.chunks(0)
    batch = chunk.source
    loss = ppo.calc_loss(batch.experience, ppo.train_step(batch.experience, batch.experience.state).info).loss
    gradients = torch.autograd.grad(loss[batch.mask].sum(), list(ppo.network.actor_torso.memory.parameters()))
    assert all(gradient.any() for gradient in gradients)


# Replay.


def replay(algorithm, transforms, unroller, **settings):
    """A source of batches with some rows of the unroller's in it."""
    defaults = {"capacity": 60 * B, "batch_size": 40, "window_length": 6, "state_period": 4, "warmup_env_steps": 60}
    source = ReplayBatches(**{**defaults, **settings})
    source.bind(algorithm, transforms, 4, B)
    for length in [3, 1, 2, 4, 1] * 8:
        source.add(unroller.unroll(length))
    return source


STACKS = {"plain": (), "stacks": (functools.partial(FrameStack, num_frames=3),)}
WAYS = [(mode, stacks) for mode in MODES for stacks in STACKS]


@pytest.mark.parametrize(
    ("kind", "burn_in", "mode", "stacks"),
    [(kind, burn_in, *WAYS[(k + burn_in) % 4]) for k, kind in enumerate(KINDS) for burn_in in (0, 3)],
)
def test_training_replays_the_memory_inputs_of_acting(kind, burn_in, mode, stacks):
    """Whatever the window: Q of its rows is what Q was then, for the parameters have not changed."""
    telling = functools.partial(Telling, q_network=q_network(KINDS[kind]))
    unroller, dqn, transforms = make(telling, MODES[mode], STACKS[stacks])
    source = replay(dqn, transforms, unroller, burn_in=burn_in)
    assert unroller._actor._program is not None
    begun_within = begun_while_warming = 0
    for chunk in source.chunks(62):
        for batch in [take(chunk.source, index) for index in chunk.minibatches()]:
            experience = batch.experience
            step, kept = experience.time_step, experience.info["q"]
            assert len(step.reward) == 6 and (experience.burn_in is None) == (burn_in == 0)
            assert torch.equal(batch.mask, trainable(step.step_type))
            state = burn_in_state(dqn.q_network, experience.burn_in, experience.state)
            q, _ = dqn.q_network(step, state)
            acted = step.step_type != LAST  # in SAME_STEP nobody acts there
            torch.testing.assert_close(q[acted], kept[acted], atol=1e-5, rtol=1e-4)
            begun_within += int((step.step_type[1:] == FIRST).sum())
            if burn_in:
                assert len(experience.burn_in.reward) == burn_in
                begun_while_warming += int((experience.burn_in.step_type[1:] == FIRST).sum())
            # Another state would have been seen.
            forgetful, _ = dqn.q_network(step, nest.map(torch.zeros_like, state))
            assert not torch.allclose(forgetful[acted], kept[acted], atol=1e-3)
    assert begun_within > 10 and (begun_while_warming > 0) == bool(burn_in)


def another(leaf):
    """A leaf of a state that is not the initial one."""
    return torch.randn_like(leaf) if leaf.is_floating_point() else torch.randint_like(leaf, 4)


def windows(algorithm, burn_in=0, num_rows=6, num_windows=8, seed=1):
    """`[L, N]` of random rows in which episodes end and begin; states that are not the initial ones."""
    torch.manual_seed(seed)
    shape = (burn_in + num_rows, num_windows)
    step_type = torch.full(shape, MID, dtype=torch.int32)
    step_type[-4, ::2], step_type[-3, ::2] = LAST, FIRST
    step_type[-2, 1::4], step_type[-1, 1::4] = LAST, FIRST
    discount = 1.0 - (step_type == LAST) * (torch.rand(shape) < 0.5).float()
    action = torch.randint(3, shape)
    rows = TimeStep(step_type, torch.randn(shape), discount, torch.randn(*shape, 4), action, action.int())
    state = nest.map(another, algorithm.initial_state(num_windows))
    before, rows = nest.split(rows, burn_in) if burn_in else (None, rows)
    return Experience(rows, action[burn_in:], None, state, burn_in=before)


def one_step_targets(step, value):
    """By hand: `[L-1, N]`, and which of them mean something."""
    target = step.reward[1:] + 0.5 * step.discount[1:] * value
    return target, trainable(step.step_type)


@kinds
@pytest.mark.parametrize("burn_in", [0, 2])
@pytest.mark.parametrize("double", [False, True])
def test_every_trainable_row_of_a_window_trains_dqn_to_its_one_step_target(kind, double, burn_in):
    settings = {"q_network": q_network(kind), "gamma": 0.5, "double": double, "huber_delta": None}
    _, dqn, _ = make(functools.partial(DQN, **settings))
    experience = windows(dqn, burn_in)
    step = experience.time_step
    with torch.no_grad():
        q, target_q = (
            network(step, burn_in_state(network, experience.burn_in, experience.state))[0]
            for network in (dqn.q_network, dqn.target)
        )
        assert not torch.allclose(q, target_q, atol=0.01)
        greedy = (q if double else target_q)[1:].argmax(-1, keepdim=True)
        target, trains = one_step_targets(step, target_q[1:].gather(-1, greedy).squeeze(-1))
        error = q[:-1].gather(-1, experience.action[:-1].unsqueeze(-1)).squeeze(-1) - target
    assert trains.any(0).all() and not trains.all()
    loss = dqn.calc_loss(experience, dqn.train_step(experience, experience.state).info).loss
    assert loss.shape == (5, 8)
    torch.testing.assert_close(loss[trains], 0.5 * error.square()[trains])


def test_rows_that_warm_up_are_run_over_without_gradient():
    _, dqn, _ = make(functools.partial(DQN, q_network=q_network(GRU)))
    experience = windows(dqn, burn_in=2)
    observation = experience.burn_in.observation.requires_grad_()
    state = experience.state.requires_grad_()
    loss = dqn.calc_loss(experience, dqn.train_step(experience, state).info).loss.sum()
    assert torch.autograd.grad(loss, [observation, state], allow_unused=True, retain_graph=True) == (None, None)
    # They do matter.
    with torch.no_grad():
        observation.zero_()
    assert dqn.calc_loss(experience, dqn.train_step(experience, state).info).loss.sum() != loss


@pytest.mark.parametrize(("lambda_", "expected"), [(None, 0.0), (0.7, 0.7)])
def test_with_memory_returns_are_of_one_step_by_default(lambda_, expected):
    dqn = functools.partial(DQN, lambda_=lambda_)
    _, recurrent, _ = make(functools.partial(dqn, q_network=q_network(GRU)))
    _, plain, _ = make(dqn)
    assert recurrent._lambda == expected and plain._lambda == (1.0 if lambda_ is None else lambda_)
    assert recurrent.replay_needs.recurrent_state and not plain.replay_needs.recurrent_state
    assert recurrent.has_state and not plain.has_state


def recurrent_sac(kind=GRU, algorithm=RecurrentSAC, **settings):
    memory = functools.partial(kind, size=5)
    defaults = {"critic": CRITIC, "actor_mlp": SMALL, "memory": memory, "gamma": 0.5}
    _, sac, _ = make(functools.partial(algorithm, **{**defaults, **settings}))
    return sac


@kinds
@pytest.mark.parametrize("burn_in", [0, 2])
def test_every_trainable_row_of_a_window_trains_sac_to_its_soft_one_step_target(kind, burn_in):
    sac = recurrent_sac(kind)
    experience = windows(sac, burn_in)
    step = experience.time_step
    target_critic = sac.target_critic.network
    with torch.no_grad():
        features, target_features = (
            critic.features(step, burn_in_state(critic.features, experience.burn_in, experience.state))[0]
            for critic in (sac.critic, target_critic)
        )
        assert not torch.allclose(features, target_features, atol=0.01)
        log_p = sac.policy_head(sac.actor_mlp(features)).discrete.log_p
        alpha = sac.temperatures.log_alpha["discrete"].exp()
        soft = (log_p.exp() * (target_critic(target_features).amin(0) - alpha * log_p)).sum(-1)
        target, trains = one_step_targets(step, soft[1:])
        all_q = sac.critic(features)
        q = all_q.gather(-1, experience.action.expand(2, -1, -1).unsqueeze(-1)).squeeze(-1)[:, :-1]
        expected = {
            "critic": 0.5 * (q - target).square().sum(0),
            "actor": -(log_p.exp() * (all_q.amin(0) - alpha * log_p)).sum(-1)[:-1],
        }
    loss = sac.calc_loss(experience, sac.train_step(experience, experience.state).info).loss
    for name, value in expected.items():
        assert loss[name].shape == (5, 8)
        torch.testing.assert_close(loss[name][trains], value[trains], msg=name)


@kinds
@pytest.mark.parametrize("burn_in", [0, 2])
def test_retrace_reads_the_rows_of_a_window_that_memory_runs_over(kind, burn_in):
    """All but row 0, whose action value and trace no target takes."""
    settings = {"q_network": q_network(kind), "gamma": 0.5, "huber_delta": None}
    _, dqn, _ = make(functools.partial(RetraceDQN, **settings))
    assert dqn._lambda == 1
    experience = windows(dqn, burn_in)
    step = experience.time_step
    with torch.no_grad():
        q, target_q = (
            network(step, burn_in_state(network, experience.burn_in, experience.state))[0]
            for network in (dqn.q_network, dqn.target)
        )
        greedy = q.argmax(-1)
        value, taken, own = (
            each.gather(-1, action.unsqueeze(-1)).squeeze(-1)
            for each, action in ((target_q, greedy), (target_q, experience.action), (q, experience.action))
        )
        trace = (experience.action == greedy).float()
        assert trace.any() and not trace.all()
        target = targets.retrace(step.reward, 0.5 * step.discount, taken[1:], value[1:], step.step_type, trace[1:], 1.0)
    loss = dqn.calc_loss(experience, dqn.train_step(experience, experience.state).info).loss
    trains = trainable(step.step_type)
    torch.testing.assert_close(loss[trains], 0.5 * (own[:-1] - target).square()[trains])

    sac = recurrent_sac(kind, RecurrentRetraceSAC)
    experience = windows(sac, burn_in)
    step, target_critic = experience.time_step, sac.target_critic.network
    log_mu = -2 * torch.rand(experience.action.shape)
    experience = experience._replace(info={"log_prob": log_mu, "action": experience.action})
    with torch.no_grad():
        features, target_features = (
            critic.features(step, burn_in_state(critic.features, experience.burn_in, experience.state))[0]
            for critic in (sac.critic, target_critic)
        )
        log_p, q = sac.policy_head(sac.actor_mlp(features)).discrete.log_p, target_critic(target_features).amin(0)
        soft = (log_p.exp() * (q - sac.temperatures.log_alpha["discrete"].exp() * log_p)).sum(-1)
        taken, log_pi = (each.gather(-1, experience.action.unsqueeze(-1)).squeeze(-1) for each in (q, log_p))
        trace = (log_pi - log_mu).exp().clamp(max=1)
        target = targets.retrace(step.reward, 0.5 * step.discount, taken[1:], soft[1:], step.step_type, trace[1:], 1.0)
        own = sac.critic(features).gather(-1, experience.action.expand(2, -1, -1).unsqueeze(-1)).squeeze(-1)[:, :-1]
    loss = sac.calc_loss(experience, sac.train_step(experience, experience.state).info).loss["critic"]
    torch.testing.assert_close(loss[trains], 0.5 * (own - target).square().sum(0)[trains])


def test_only_the_critics_loss_moves_the_memory_of_sac():
    sac = recurrent_sac()
    experience = windows(sac)
    loss = sac.calc_loss(experience, sac.train_step(experience, experience.state).info).loss
    memory = list(sac.critic.memory.parameters())
    assert all(gradient.any() for gradient in torch.autograd.grad(loss["critic"].sum(), memory, retain_graph=True))
    assert set(torch.autograd.grad(loss["actor"].sum(), memory, allow_unused=True)) == {None}
    groups = {name: {id(p) for p in group} for name, group in sac.parameter_groups().items()}
    assert all(id(parameter) in groups["critic"] for parameter in memory)
    assert not list(sac.actor_encoder.parameters()) and not any(p.requires_grad for p in sac.target_critic.parameters())


def test_sac_acts_by_its_memory():
    unroller, sac, _ = make(functools.partial(RecurrentSAC, critic=CRITIC, actor_mlp=SMALL))
    row = TimeStep(torch.full((B,), MID), None, None, torch.ones(B, 4), None, None)
    before = sac.initial_state(B)
    with torch.no_grad():
        _, after = sac.critic.features(row, before)
        for act in (sac.rollout_step, sac.predict_step):
            torch.testing.assert_close(act(row, before).state, after)
    assert not torch.equal(before, after)


@pytest.mark.parametrize("algorithm", ["SAC", "TD3"])
def test_the_value_of_a_state_reads_the_memory(algorithm):
    made = recurrent_sac() if algorithm == "SAC" else recurrent_td3()
    row = TimeStep(torch.full((B,), MID), None, None, torch.ones(B, 4), None, None)
    state = nest.map(torch.randn_like, made.initial_state(B))
    with torch.no_grad():
        features, _ = made.critic.features(row, state)
        action = made.predict_step(row, state).output
        if algorithm == "SAC":
            expected = made.critic(features).min(0).values.gather(-1, action[:, None])[:, 0]
        else:
            expected = made.critic(features, action).min(0).values
        torch.testing.assert_close(made.state_value(row, state), expected)


def recurrent_td3(**settings):
    """Networks far from their initial weights; no noise on target actions; the actor trains in every update."""
    torch.manual_seed(0)
    memory = functools.partial(GRU, size=5)
    defaults = {"critic": CRITIC, "memory": memory, "smoothing_std": 0.0, "actor_period": 1, "gamma": 0.5}
    box = spaces.Box(-2, 3, (2,))
    specifications = specs.observation_spec(spaces.Box(-1, 1, (4,))), specs.action_spec(box), specs.reward_spec()
    made = RecurrentTD3(*specifications, **defaults | settings)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made


@pytest.mark.parametrize("burn_in", [0, 2])
def test_every_trainable_row_of_a_window_trains_td3_to_its_one_step_target(burn_in):
    td3 = recurrent_td3()
    experience = windows(td3, burn_in)
    experience = experience._replace(action=torch.rand(*experience.action.shape, 2) * 2 - 1)
    step, target_critic = experience.time_step, td3.target_critic.network
    with torch.no_grad():
        features, target_features = (
            critic.features(step, burn_in_state(critic.features, experience.burn_in, experience.state))[0]
            for critic in (td3.critic, target_critic)
        )
        assert not torch.allclose(features, target_features, atol=0.01)
        value = target_critic(target_features, td3.target_actor(target_features)).amin(0)
        target, trains = one_step_targets(step, value[1:])
        expected = {
            "critic": 0.5 * (td3.critic(features, experience.action)[:, :-1] - target).square().sum(0),
            "actor": -td3.critic(features, td3.actor(features))[0][:-1],
        }
    info = td3.calc_loss(experience, td3.train_step(experience, experience.state).info)
    assert info.priority.shape == (5, 8)
    for name, loss in expected.items():
        assert info.loss[name].shape == (5, 8)
        torch.testing.assert_close(info.loss[name][trains], loss[trains], msg=name)


def test_only_the_td3_critic_loss_trains_the_shared_memory():
    td3 = recurrent_td3(noise_std=0.0)
    assert td3.replay_needs.recurrent_state and td3.has_state
    groups = {name: {id(p) for p in group} for name, group in td3.parameter_groups().items()}
    memory = {id(parameter) for parameter in td3.critic.memory.parameters()}
    assert memory <= groups["critic"] and not memory & groups["actor"]
    row = TimeStep(torch.full((B,), MID), None, None, torch.ones(B, 4), None, None)
    before = td3.initial_state(B)
    with torch.no_grad():
        features, after = td3.critic.features(row, before)
        for act in (td3.rollout_step, td3.predict_step):
            step = act(row, before)
            torch.testing.assert_close(step.state, after)
            torch.testing.assert_close(step.output, td3.actor(features))
    assert not torch.equal(before, after)


# What is refused.


def test_td3_with_memory_requires_shared_features_and_white_noise():
    with pytest.raises(UsageError, match="RecurrentTD3.actor is set, but the actor's input is the critics' features"):
        recurrent_td3(actor=functools.partial(DeterministicActor, gain=0.5))
    with pytest.raises(
        UsageError, match="noise_correlation is 0.5, but the policy's state has room for the memory only"
    ):
        recurrent_td3(noise_correlation=0.5)


@pytest.mark.parametrize(("settings", "message"), [
    ({"state_period": 3}, "state_period is 3, and Trainer.unroll_length is 4; .* raise state_period"),
    ({"capacity": 41, "warmup_env_steps": 41}, "capacity is 41, too small for one window of 10 rows"),
])  # fmt: skip
def test_settings_that_do_not_fit_the_memory_are_refused_with_a_remedy(settings, message):
    _, dqn, transforms = make(functools.partial(DQN, q_network=q_network(GRU)))
    defaults = {"batch_size": 8, "window_length": 6, "burn_in": 4, "state_period": 4, "warmup_env_steps": 60}
    with pytest.raises(UsageError, match=message):
        ReplayBatches(**{**defaults, **settings}).bind(dqn, transforms, 4, B)


def test_a_memory_takes_rows_to_learn_across():
    _, dqn, transforms = make(functools.partial(DQN, q_network=q_network(GRU)))
    for batches in (ReplayBatches(batch_size=8), OfflineBatches(batch_size=8)):
        name = type(batches).__name__
        with pytest.raises(UsageError) as error:
            batches.bind(dqn, transforms, 4, B)
        assert str(error.value) == (
            f"{name}.window_length is 2, so only one row trains, but the memory of DQN learns across trainable "
            "rows; set window_length to 3 or more (dqn_recall.gin has 16)"
        )
    _, ppo, transforms = make(
        functools.partial(PPO, network=functools.partial(ActorCritic, actor_torso=torso(GRU), shared_torso=True))
    )
    with pytest.raises(UsageError) as error:
        EpochBatches().bind(ppo, transforms, 1, B)
    assert str(error.value) == (
        "Trainer.unroll_length is 1, but the memory of PPO learns across the rows of an unroll; set unroll_length "
        "to 2 or more (ppo_recall.gin has 32)"
    )


def test_a_stored_state_and_another_goal_do_not_go_together():
    _, dqn, transforms = make(functools.partial(DQN, q_network=q_network(GRU)))
    with pytest.raises(UsageError) as error:
        ReplayBatches(window_length=4, hindsight=HindsightReplay).bind(dqn, transforms, 4, B)
    assert str(error.value) == (
        "HindsightReplay changes the goal of windows, but the memory of DQN begins with a state that was "
        "computed under the old goal; leave out the memory or hindsight"
    )


def test_without_memory_there_is_no_burn_in():
    _, dqn, transforms = make(DQN)
    with pytest.raises(UsageError, match="burn_in is 2, but DQN has no memory"):
        ReplayBatches(burn_in=2).bind(dqn, transforms, 4, B)
    for settings in ({"burn_in": -1}, {"state_period": 0}):
        with pytest.raises(UsageError, match="it must be an integer of at least"):
            ReplayBatches(**settings)


@pytest.mark.parametrize("kind", [RecurrentSAC, RecurrentRetraceSAC, RecurrentTD3])
def test_a_memory_from_a_reference_with_a_scope_can_be_sent_to_workers(kind):
    gin.parse_config(f"{kind.__name__}.memory = @small/GRU\nsmall/GRU.size = 3")
    box = spaces.Box(-1, 1, (2,), np.float32)
    made = from_bytes(to_bytes(kind(box, box, specs.reward_spec()), "the algorithm"))
    assert made.critic.memory.output_size == 3
