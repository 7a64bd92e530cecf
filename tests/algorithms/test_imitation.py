"""Experts that label rows, and the algorithms that clone their labels."""

import copy
import functools
import math

import numpy as np
import pytest
import torch
from gymnasium import spaces

from alfish import nest, specs
from alfish.algorithms.acting import ModeSwitch, reset_state
from alfish.algorithms.bc import BC
from alfish.algorithms.dqn import DQN
from alfish.algorithms.imitation.apprentice import LabelledRollout
from alfish.algorithms.imitation.dagger import DAgger
from alfish.algorithms.imitation.distillation import Distillation
from alfish.algorithms.imitation.expert import AbsentExpert, Expert, PolicyExpert
from alfish.algorithms.imitation.external import opened_to_act
from alfish.algorithms.ppo import PPO
from alfish.algorithms.sac import SAC
from alfish.data import Batch, Experience, StepType, TimeStep, trainable
from alfish.errors import UsageError
from alfish.learner.batches import EpochBatches, Minibatches
from alfish.learner.learner import Learner
from alfish.networks import GRU, MLP, ActorCritic, Encoder, PolicyHead, QNetwork, Torso
from alfish.offline import Arrays, Episode, OfflineBuffer, Spaces
from alfish.processes.channel import from_bytes, to_bytes
from alfish.runs.loading import load_model
from alfish.training.policy import Policy
from alfish.transforms import FrameStack, FrozenEncoder, ObservationNormalizer, RewardNormalizer, Transforms

VECTOR, BOX = spaces.Box(-3, 3, (4,), np.float32), spaces.Box(-2, 2, (2,), np.float32)
NESTED = spaces.Dict(choice=spaces.Discrete(3), parts=spaces.Tuple([BOX, spaces.MultiBinary(2)]))
SMALL = functools.partial(MLP, layers=(8,))
TORSO = functools.partial(Torso, mlp=SMALL)
MEMORY = functools.partial(TORSO, memory=functools.partial(GRU, size=6))
REMEMBERING = functools.partial(PPO, network=functools.partial(ActorCritic, actor_torso=MEMORY))


def trained(algorithm=REMEMBERING, transforms=(), observation=VECTOR, action=BOX, seed=0):
    """Networks whose statistics are not those that they began with."""
    torch.manual_seed(seed)
    chain = Transforms(transforms, specs.observation_spec(observation), specs.reward_spec())
    made = algorithm(chain.observation_spec, specs.action_spec(action), chain.reward_spec)
    for parameter in made.parameters():  # larger actions than those of a new network
        parameter.data += 0.3 * torch.randn_like(parameter)
    for _ in range(2):
        chain.observe(rows(observation, 6, 3, seed=9), chain.initial_state(3), num_seen=0)
    return made, chain


def expert_of(networks, action=BOX, name="runs/x", leaves=None):
    return PolicyExpert(*copy.deepcopy(networks), action, name, leaves)


def rows(observation, length, size, seed=0, action=BOX):
    """`[T, N]` rows of an episode that ends in column 0."""
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.full((length, size), StepType.MID, dtype=torch.int32)
    kinds[0] = StepType.FIRST
    if length > 4:
        kinds[3, 0], kinds[4, 0] = StepType.LAST, StepType.FIRST
    drawn = nest.map(
        lambda leaf: torch.randn(length, size, *leaf.shape, generator=generator), specs.observation_spec(observation)
    )
    zeros = specs.zeros(specs.action_spec(action), (length, size))
    env_id = torch.arange(size, dtype=torch.int32).expand(length, size)
    return TimeStep(kinds, torch.randn(kinds.shape, generator=generator), torch.ones(kinds.shape), drawn, zeros, env_id)


def labels_of(expert, steps):
    """`[T, N]` labels of rows, with the expert's memory carried on."""
    initial = state = expert.initial_state(steps.step_type.shape[1])
    found = []
    for t in range(len(steps.step_type)):
        row = nest.at(steps, t)
        label, state = expert(row, reset_state(state, initial, row.step_type))
        found.append(label)
    return nest.stack(found)


def make(cls, expert, action=BOX, observation=VECTOR, seed=0, **settings):
    torch.manual_seed(seed)
    settings = {"torso": TORSO, **settings}
    return cls(
        specs.observation_spec(observation),
        specs.action_spec(action),
        specs.reward_spec(),
        expert=_factory(expert),
        **settings,
    )


def _factory(expert):
    return (lambda: expert) if isinstance(expert, (Expert, OfflineBuffer)) else expert


def test_a_noisy_expert_acts_by_its_mode_in_rollouts():
    noisy = functools.partial(DQN, q_network=functools.partial(QNetwork, noisy=True))
    expert = expert_of(trained(noisy, action=spaces.Discrete(5)), spaces.Discrete(5))
    made = make(DAgger, expert, spaces.Discrete(5))
    steps = rows(VECTOR, 1, 200, action=spaces.Discrete(5))
    expected = labels_of(made.expert, steps)
    ModeSwitch(made).switch(training=False)  # as in rollouts
    assert torch.equal(labels_of(made.expert, steps), expected)


class Opposite(Expert):
    """A controller of one's own: minus the first two entries of the observation."""

    def forward(self, time_step, state):
        return -time_step.observation[..., :2].clamp(-1, 1), state


# The expert.


@pytest.mark.parametrize("transforms", [(), (ObservationNormalizer, RewardNormalizer), (FrameStack,)])
def test_labels_come_from_the_saved_policy_with_memory_and_transforms(transforms):
    image = spaces.Box(0, 255, (6, 6), np.uint8)
    observation = image if FrameStack in transforms else VECTOR
    torch.manual_seed(3)
    networks = trained(transforms=transforms, observation=observation) if observation is VECTOR else None
    if networks is None:
        chain = Transforms(transforms, specs.observation_spec(image), specs.reward_spec())
        networks = REMEMBERING(chain.observation_spec, specs.action_spec(BOX), chain.reward_spec), chain
    steps = rows(observation, 6, 3)
    if observation is image:
        steps = steps._replace(observation=torch.randint(256, (6, 3, 6, 6), dtype=torch.uint8))
    policy = Policy(*networks, observation, BOX)
    expected = []
    for t in range(6):
        first = (steps.step_type[t] == StepType.FIRST).numpy()
        expected.append(policy.act(steps.observation[t].numpy(), batched=True, first=first) / 2)  # bounds are +-2
    with torch.no_grad():
        found = labels_of(expert_of(networks), steps)
    np.testing.assert_allclose(found.clamp(-1, 1), np.stack(expected), atol=1e-6)


def test_checkpoints_have_only_the_checksum_of_the_frozen_expert():
    networks = trained(transforms=(ObservationNormalizer, RewardNormalizer))
    student = make(DAgger, expert_of(networks))
    before = {name: buffer.clone() for name, buffer in student.expert.named_buffers()}
    assert len(before) > 10 and not list(student.expert.parameters())
    state = student.state_dict()
    assert [key for key in state if key.startswith("expert")] == ["expert._extra_state"]
    assert {name for name, _ in student.named_parameters()} == {
        name for name, _ in make(BC_LIKE, None).named_parameters()
    }
    Learner(student).train([windows(student)])
    assert all(torch.equal(buffer, before[name]) for name, buffer in student.expert.named_buffers())
    load_model(make(DAgger, expert_of(networks)), state, "the student")
    load_model(make(DAgger, AbsentExpert()), state, "a student that only acts")


def BC_LIKE(observation_spec, action_spec, reward_spec, *, expert, torso):
    return BC(observation_spec, action_spec, reward_spec, torso=torso)


def test_a_run_is_not_continued_with_another_expert():
    state = make(DAgger, expert_of(trained())).state_dict()
    with pytest.raises(
        UsageError, match="^runs/x has changed since this run was saved: its checksum is .*; restore the"
    ):
        load_model(make(DAgger, expert_of(trained(seed=1))), state, "the student")
    normalized = functools.partial(trained, transforms=(ObservationNormalizer,))
    one, other = normalized(), normalized()
    other[1].observe(rows(VECTOR, 6, 3, seed=5), other[1].initial_state(3), num_seen=0)
    assert expert_of(one).checksum == expert_of(normalized()).checksum != expert_of(other).checksum


@pytest.mark.parametrize(
    ("there", "here", "message"),
    [
        ((spaces.Box(-3, 3, (5,)), BOX), (VECTOR, BOX), r"other observations: observation is .*\(5,\).* and .*\(4,\)"),
        (
            (spaces.Box(-1, 1, (4,)), BOX),
            (VECTOR, BOX),
            r"other observations: observation is .*-1.*and .*-3.* in this run;",
        ),
        ((VECTOR, spaces.Discrete(3)), (VECTOR, BOX), r"other actions: action is Discrete\(3\) in its run and Box"),
        (
            (VECTOR, NESTED),
            (VECTOR, BOX),
            r"other actions: action.choice is Discrete\(3\) in its run and no such leaf in this run",
        ),
    ],
)
def test_an_expert_of_other_spaces_is_refused_with_the_first_difference(there, here, message):
    expert = expert_of(trained(observation=there[0], action=there[1]), there[1])
    with pytest.raises(UsageError, match=f"^the expert runs/x was trained on {message}"):
        make(DAgger, expert, here[1], here[0])


def test_an_expert_whose_actions_have_other_units_is_refused_when_training_starts():
    student = make(DAgger, expert_of(trained(), spaces.Box(-1, 1, (2,), np.float32)))
    with pytest.raises(
        UsageError, match=r"^the expert runs/x has the action space Box\(-1.* has Box\(-2.*; train the expert in"
    ):
        student.expert.start(VECTOR, BOX)
    make(DAgger, expert_of(trained())).expert.start(VECTOR, BOX)


@pytest.mark.parametrize("cls", [DAgger, Distillation])
@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (
            lambda step, state: (step.observation[..., 0], state),
            r"forward of Own returned .* as action; .* shape \[5, 2\]",
        ),
        (lambda step, state: (step.observation[..., :2] > 0, state), "forward of Own returned .* as action"),
        (
            lambda step, state: step.observation[..., :2],
            r"forward of Own returned .*; it must return \(labels, state\)",
        ),
    ],
)
def test_labels_of_another_shape_or_dtype_are_refused_before_they_train(cls, returned, words):
    class Own(Expert):
        name, checksum = "own", ""

        def forward(self, time_step, state):
            return returned(time_step, state)

    algorithm = make(cls, Own())
    with pytest.raises(UsageError, match=words):
        algorithm.rollout_step(nest.at(rows(VECTOR, 1, 5), 0), algorithm.initial_state(5))


def test_an_expert_encodes_what_its_run_stored_encoded():
    image = spaces.Box(0, 255, (8, 8, 3), np.uint8)
    networks = trained(PPO, observation=VECTOR)
    torch.manual_seed(0)
    chain = Transforms([FrozenEncoder], specs.observation_spec(image), specs.reward_spec())
    algorithm = PPO(chain.observation_spec, specs.action_spec(BOX), chain.reward_spec)
    expert = expert_of((algorithm, chain))
    step = nest.at(rows(VECTOR, 1, 5), 0)._replace(observation=torch.randint(256, (5, 8, 8, 3), dtype=torch.uint8))
    label, _ = expert(step, expert.initial_state(5))
    encoded = step._replace(observation=chain.encode(step.observation))
    torch.testing.assert_close(label, algorithm.predict_step(encoded, algorithm.initial_state(5)).output)
    assert networks is not None


def test_what_cannot_label_is_refused_as_an_expert():
    episode = Episode("0", *(np.zeros((n, 2), np.float32) for n in (3, 2)), *np.zeros((3, 2)))
    data = OfflineBuffer([Arrays([episode], Spaces(BOX, BOX))])
    for cls in (DAgger, Distillation):
        with pytest.raises(
            UsageError, match=rf"^{cls.__name__}.expert made a OfflineBuffer, which cannot label new rows"
        ):
            make(cls, data)
    with pytest.raises(UsageError, match="DAgger.expert is 'runs/x'; it must be a class or function"):
        make(DAgger, "runs/x")


def test_an_expert_sees_chosen_leaves_joined_as_it_was_trained():
    split = spaces.Dict(other=BOX, velocity=spaces.Box(-3, 3, (3,)), position=spaces.Box(-3, 3, (1,)))
    networks = trained()
    expert = expert_of(networks, leaves=["position", "velocity"])
    make(DAgger, expert, observation=split)
    steps = rows(split, 6, 3)
    joined = torch.cat([steps.observation["position"], steps.observation["velocity"]], -1)
    found = labels_of(expert, steps)
    assert torch.equal(found, labels_of(expert_of(networks), steps._replace(observation=joined)))
    one = expert_of(networks, leaves=["flat"])
    steps = steps._replace(observation={"flat": joined, "other": joined})
    assert torch.equal(found, labels_of(one, steps))
    with pytest.raises(
        UsageError,
        match=r"should see 'speed', but the leaves of the observation are \['other', 'position', 'velocity'\]",
    ):
        make(DAgger, expert_of(networks, leaves=["speed"]), observation=split)
    discrete = spaces.Dict(position=VECTOR, velocity=spaces.Discrete(3))
    with pytest.raises(UsageError, match=r"several leaves joined, but Discrete\(3\) is not a float32 vector"):
        make(DAgger, expert, observation=discrete)


def test_an_expert_travels_to_workers():
    expert = expert_of(trained(transforms=(ObservationNormalizer,)))
    steps = rows(VECTOR, 6, 3)
    there = from_bytes(to_bytes(make(DAgger, expert), "the algorithm")).expert
    assert torch.equal(labels_of(there, steps), labels_of(expert, steps))


# DAgger.


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_expert_acts_in_each_environment_with_chance_beta(beta):
    student = make(DAgger, Opposite(), beta=beta)
    row = nest.at(rows(VECTOR, 1, 4000), 0)
    with torch.no_grad():
        step = student.rollout_step(row, student.initial_state(4000))
    label = -row.observation[:, :2].clamp(-1, 1)
    assert torch.equal(step.info.label, label), "every row is labelled, whoever acts"
    is_expert = (step.output == label).all(-1)
    assert abs(is_expert.float().mean() - beta) < 0.03
    assert is_expert.unique().numel() == (2 if 0 < beta < 1 else 1)


def test_beta_is_a_schedule_of_progress():
    student = make(DAgger, Opposite(), beta=lambda progress: 1.0 * (progress < 0.5))
    row = nest.at(rows(VECTOR, 1, 50), 0)
    for progress, is_expert in ((0.4, True), (0.6, False)):
        student.progress.fill_(progress)
        step = student.rollout_step(row, student.initial_state(50))
        assert (step.output == step.info.label).all().item() == is_expert


def windows(algorithm, length=3, size=12, seed=0):
    """Windows whose labels are not the actions that were executed."""
    steps = rows(VECTOR, length, size, seed)
    torch.manual_seed(seed)
    label, action = (nest.stack([specs.sample(algorithm.action_spec, size) for _ in range(length)]) for _ in range(2))
    experience = Experience(steps, action, {"label": label}, algorithm.initial_state(size))
    return Minibatches(Batch(experience, trainable(steps.step_type)), None)


def loss_of(algorithm, experience):
    return algorithm.calc_loss(experience, algorithm.train_step(experience, experience.state).info).loss.detach()


@pytest.mark.parametrize("torso", [TORSO, MEMORY])
def test_the_label_is_cloned_instead_of_the_executed_action(torso):
    student = make(DAgger, expert_of(trained()), torso=torso)
    experience = windows(student, 6).source.experience
    loss = loss_of(student, experience)
    other = experience._replace(action=-experience.action)
    assert torch.equal(loss_of(student, other), loss)
    clone = make(BC_LIKE, None, torso=torso)
    as_recorded = experience._replace(action=experience.info["label"], info=None, state=experience.state[0])
    assert torch.equal(loss_of(clone, as_recorded), loss)
    assert loss.shape == ((1, 12) if torso is TORSO else (5, 12))
    assert student.replay_needs.info == ("label",)
    assert student.replay_needs.recurrent_state == (torso is MEMORY), "the expert's memory alone asks for no state"
    assert student.has_state


def test_a_policy_that_only_acts_has_no_expert_of_its_own():
    with opened_to_act():
        assert isinstance(make(DAgger, Opposite()).expert, AbsentExpert)
    assert isinstance(make(DAgger, Opposite()).expert, Opposite)


def test_a_policy_acts_without_its_expert():
    student = make(DAgger, AbsentExpert(), torso=MEMORY, beta=1.0)
    row = nest.at(rows(VECTOR, 1, 5), 0)
    whole = make(DAgger, expert_of(trained()), torso=MEMORY, beta=0.0)
    torch.manual_seed(1)
    step = student.rollout_step(row, student.initial_state(5))
    torch.manual_seed(1)
    assert torch.equal(step.output, whole.rollout_step(row, whole.initial_state(5)).output)
    for algorithm in (student, whole):
        best = algorithm.predict_step(row, algorithm.initial_state(5))
        assert torch.equal(best.output, whole.predict_step(row, whole.initial_state(5)).output)
        assert nest.paths(best.state) == nest.paths(algorithm.initial_state(5))
    with pytest.raises(UsageError, match="loaded without its expert"):
        AbsentExpert()(row, None)


# Distillation.


def unroll(algorithm, length=5, size=4, seed=0):
    steps, initial = rows(VECTOR, length + 1, size, seed, algorithm_space(algorithm)), algorithm.initial_state(size)
    torch.manual_seed(seed)
    state, found = initial, []
    with torch.no_grad():
        for t in range(length + 1):
            row = nest.at(steps, t)
            found.append(algorithm.rollout_step(row, reset_state(state, initial, row.step_type)))
            state = found[-1].state
    return Experience(steps, *nest.stack([(step.output, step.info) for step in found]), initial)


def algorithm_space(algorithm):
    return NESTED if isinstance(algorithm.action_spec, dict) else BOX


def chunks(algorithm, experience, size=None):
    length, num_envs = trainable(experience.time_step.step_type).shape
    source = EpochBatches(1, size)
    source.bind(algorithm, Transforms([], algorithm.observation_spec, algorithm.reward_spec), length, num_envs)
    source.add(experience)
    return list(source.chunks(0))


def test_loss_is_squared_error_for_boxes_and_cross_entropy_for_others():
    networks = trained(action=NESTED)
    student = make(Distillation, expert_of(networks, NESTED), NESTED)
    experience = unroll(student)
    torch.testing.assert_close(experience.info.label, labels_of(student.expert, experience.time_step))
    (chunk,) = chunks(student, experience)
    batch = chunk.source.experience
    with torch.no_grad():
        policy = student.policy_head(student.torso(batch.time_step, None)[0]).parts
    label = batch.info.label
    expected = 0.5 * (policy["parts"][0].mean - label["parts"][0]).square().mean(-1)
    expected = expected - policy["choice"].log_prob(label["choice"]) - policy["parts"][1].log_prob(label["parts"][1])
    torch.testing.assert_close(loss_of(student, batch), expected)


def test_hubers_loss_is_linear_from_delta_on():
    student = make(Distillation, Opposite(), huber_delta=0.1)
    (chunk,) = chunks(student, unroll(student))
    batch = chunk.source.experience
    with torch.no_grad():
        error = (student.policy_head(student.torso(batch.time_step, None)[0]).mean - batch.info.label).abs()
    expected = torch.where(error <= 0.1, 0.5 * error.square(), 0.1 * (error - 0.05)).mean(-1)
    assert (error > 0.1).any() and (error < 0.1).any()
    torch.testing.assert_close(loss_of(student, batch), expected)


def test_gradients_stop_at_the_initial_state_of_an_unroll():
    student = make(Distillation, expert_of(trained()), torso=MEMORY)
    experience = unroll(student)
    before = nest.map(lambda leaf: leaf.requires_grad_(), experience.state[0])
    observation = experience.time_step.observation.requires_grad_()
    (chunk,) = chunks(student, experience)
    batch = chunk.source.experience
    info = student.train_step(batch, batch.state).info
    loss = student.calc_loss(batch, info).loss
    (slope,) = torch.autograd.grad(loss[2, 1:].sum(), observation, retain_graph=True)
    assert slope[0, 1:].abs().sum() > 0 and slope[3:].abs().sum() == 0
    assert before is not None and loss.shape == (5, 4)
    assert trainable(experience.time_step.step_type)[3, 0].item() is False


def test_actions_of_the_student_keep_their_deviation():
    student = make(Distillation, Opposite())
    learner = Learner(student, learning_rate=1e-2)
    for k in range(3):
        learner.train(chunks(student, unroll(student, seed=k)))
    row = nest.at(rows(VECTOR, 1, 4000), 0)
    noise = (
        student.rollout_step(row, student.initial_state(4000)).output
        - student.predict_step(row, student.initial_state(4000)).output
    )
    assert abs(noise.std() - 0.1) < 0.005


@pytest.mark.parametrize(("cls", "torso"), [(DAgger, MEMORY), (Distillation, TORSO)])
def test_a_student_learns_what_its_expert_does(cls, torso):
    student = make(cls, Opposite(), torso=torso)
    learner = Learner(student, learning_rate=1e-2, compile=False)
    for k in range(100):
        experience = unroll(student, 8, 16, seed=k)
        if cls is DAgger:
            experience = experience._replace(info={"label": experience.info.label})
            mask = trainable(experience.time_step.step_type)
            learner.train([Minibatches(Batch(experience, mask), None)])
        else:
            learner.train(chunks(student, experience))
    experience = unroll(student, 8, 16, seed=500)
    with torch.no_grad():
        state = student.initial_state(16)
        for t in range(3):
            step = student.predict_step(nest.at(experience.time_step, t), state)
            error, state = (step.output - experience.info.label[t]).abs().mean(), step.state
    assert error < 0.15, error


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("cls", [DAgger, Distillation])
@pytest.mark.parametrize("torso", [TORSO, MEMORY])
def test_compiled_updates_equal_plain_updates(interpreted, cls, torso):
    found = []
    for is_compiled in (False, True):
        student = make(cls, expert_of(trained()), torso=torso)
        batches = [windows(student)] if cls is DAgger else chunks(student, unroll(student))
        learner = Learner(student, compile=is_compiled)
        for _ in range(3):
            learner.train(batches)
        assert not is_compiled or learner._compiled is not None, "it fell back"
        found.append(torch.cat([p.detach().reshape(-1) for p in student.parameters()]))
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-4)


def test_labels_fit_other_experts_too():
    """Squashed modes, and an encoder that drops a leaf from the student only."""
    split = spaces.Dict(position=spaces.Box(-3, 3, (1,)), velocity=spaces.Box(-3, 3, (3,)))
    sac = functools.partial(SAC, actor_mlp=SMALL)
    encoder = functools.partial(Encoder, leaves={"velocity": None})
    student = make(
        Distillation,
        expert_of(trained(sac), leaves=["position", "velocity"]),
        observation=split,
        torso=functools.partial(MEMORY, encoder=encoder),
        policy_head=functools.partial(PolicyHead, initial_log_std=math.log(0.2), learn_std=False),
    )
    steps = rows(split, 1, 5)
    step = student.rollout_step(nest.at(steps, 0), student.initial_state(5))
    assert isinstance(step.info, LabelledRollout) and (step.info.label.abs() < 1).all()
    blind = nest.at(steps._replace(observation=dict(steps.observation, velocity=torch.full((1, 5, 3), 9.0))), 0)
    at_start = student.initial_state(5)
    assert torch.equal(
        student.predict_step(nest.at(steps, 0), at_start).output, student.predict_step(blind, at_start).output
    )
    assert not torch.equal(student.rollout_step(blind, at_start).info.label, step.info.label)
