"""What every shipped algorithm keeps, whatever it learns from.

`anywhere` is every algorithm with each kind of spaces that it takes; what it makes of an unroll is asked of the
on-policy ones, `everywhere`, and what it makes of windows of the off-policy ones, `from_replay`. A test runs once an
algorithm, and goes through the kinds itself.
"""

import functools
import importlib
import inspect
import pickle
import pkgutil

import gin
import numpy as np
import pytest
import torch
from gymnasium import spaces

import alfish.algorithms
from alfish import nest, specs
from alfish.algorithms.acting import reset_state
from alfish.algorithms.actor_critic import ActorCriticAlgorithm
from alfish.algorithms.imitation.expert import Expert
from alfish.algorithms.normalized_returns import NormalizedReturns
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import AlgStep, Batch, Experience, LossInfo, StepType, TimeStep, trainable
from alfish.errors import UsageError
from alfish.learner.batches import EpochBatches, Minibatches, PhasicBatches
from alfish.learner.learner import Learner
from alfish.networks import ActorCritic
from alfish.transforms import Transforms

T, B = 4, 3
SIZES = {
    "MLP.layers": (8, 8),
    "CriticEnsemble.layers": (8, 8),
    "SmallCNN.channels": (4, 4),
    "SmallCNN.output_size": 8,
}


@pytest.fixture(autouse=True)
def small_networks():
    """Most of the time would be spent on building networks of the default sizes, and on comparing their parameters."""
    for name, value in SIZES.items():
        gin.bind_parameter(name, value)


def as_it_is(value):
    return value


class Prior(Expert):
    """A policy with the networks that algorithms have by default."""

    def check_specs(self, observation_spec, action_spec):
        self.network = ActorCritic(observation_spec, action_spec, specs.reward_spec(None)).requires_grad_(False)

    def forward(self, time_step, state):
        raise AssertionError("a prior policy labels no actions")

    @torch.no_grad()
    def distribution(self, time_step):
        return self.network.policy(time_step, None)[0]


# Settings without a default, or whose default is not for images.
NEEDED = {
    "PPG": {"network": functools.partial(ActorCritic, shared_torso=False)},
    "PriorKLPPO": {"prior": Prior},
    "SymmetricPPO": {"mirror_observation": as_it_is, "mirror_action": as_it_is},
}


def _shipped():
    for module in pkgutil.iter_modules(alfish.algorithms.__path__):
        if module.ispkg:
            continue
        for value in vars(importlib.import_module(f"alfish.algorithms.{module.name}")).values():
            if isinstance(value, type) and issubclass(value, RLAlgorithm) and not inspect.isabstract(value):
                yield value


ALGORITHMS = {cls.__name__: cls for cls in _shipped()}
ON_POLICY = {name: cls for name, cls in ALGORITHMS.items() if cls.on_policy}
OFF_POLICY = {name: cls for name, cls in ALGORITHMS.items() if not cls.on_policy}
ACTOR_CRITICS = {name: cls for name, cls in ON_POLICY.items() if issubclass(cls, ActorCriticAlgorithm)}
VECTOR = spaces.Box(-1, 1, (4,), np.float32)
NESTED = spaces.Dict(
    picture=spaces.Box(0, 255, (8, 8), np.uint8),
    rest=spaces.Tuple([spaces.Box(-1, 1, (2,), np.float64), spaces.Discrete(3, start=2)]),
)
NESTED_ACTION = spaces.Dict(
    choice=spaces.Discrete(3, start=1),
    parts=spaces.Tuple([spaces.Box(-3, 1, (2,), np.float32), spaces.MultiBinary(2), spaces.MultiDiscrete([2, 3])]),
)
SPACES = {
    "discrete": (VECTOR, spaces.Discrete(3)),
    "box": (VECTOR, spaces.Box(-2, 2, (2,), np.float32)),
    "multi-discrete": (VECTOR, spaces.MultiDiscrete([2, 3])),
    "multi-binary": (VECTOR, spaces.MultiBinary(2)),
    "nested": (NESTED, NESTED_ACTION),
}


def _with_statistics(algorithm):
    """Gives normalized returns a standard deviation, without which the critic does not train."""
    if isinstance(algorithm, NormalizedReturns):
        algorithm.network.value_head.std.fill_(1)


def _takes(name, kind, num_rewards=None):
    try:
        observation, action = SPACES[kind]
        spec = specs.observation_spec(observation), specs.action_spec(action), specs.reward_spec(num_rewards)
        ALGORITHMS[name].check_specs(*spec)
    except UsageError:
        return False
    return True


KINDS = {name: [kind for kind in SPACES if _takes(name, kind)] for name in ALGORITHMS}
REWARDS = [None, 1, 2, B]  # how many; as many as environments too


def _kinds_and_rewards(name):
    """Each kind of spaces with one reward and with as many as environments, and one kind with each number of them."""
    for kind in KINDS[name]:
        numbers = REWARDS if kind == KINDS[name][0] else (None, B)
        yield from ((kind, number) for number in numbers if _takes(name, kind, number))


def _for_each(arguments, values):
    """Calls a test once for each of `values(name)` of its algorithm, and tells at which one it failed."""

    def decorate(test):
        @functools.wraps(test)
        def repeated(name, **others):
            for value in values(name):
                try:
                    test(name=name, **dict(zip(arguments, value, strict=True)), **others)
                except Exception as error:
                    raise AssertionError(f"{name} fails with {arguments} {value!r}") from error

        signature = inspect.signature(test)
        kept = [parameter for parameter in signature.parameters.values() if parameter.name not in arguments]
        repeated.__signature__ = signature.replace(parameters=kept)
        return repeated

    return decorate


_each_kind = _for_each(("kind",), lambda name: [(kind,) for kind in KINDS[name]])


def _of(algorithms, each=_each_kind):
    """Every one of `algorithms` with each kind of spaces that it takes."""
    return lambda test: pytest.mark.parametrize("name", algorithms)(each(test))


anywhere, everywhere, from_replay = _of(ALGORITHMS), _of(ON_POLICY), _of(OFF_POLICY)
with_rewards = _of(ON_POLICY, _for_each(("kind", "num_rewards"), _kinds_and_rewards))


def _make(name, kind=None, num_rewards=None, seed=0):
    torch.manual_seed(seed)
    observation, action = SPACES[kind or KINDS[name][0]]
    return ALGORITHMS[name](
        specs.observation_spec(observation),
        specs.action_spec(action),
        specs.reward_spec(num_rewards),
        **NEEDED.get(name, {}),
    )


# For tests that change nothing of an algorithm; to build its networks takes longer than most of them.
_shared = functools.cache(_make)


def _time_step(algorithm, leading, step_type=StepType.MID, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(spec):
        zeros = specs.zeros(spec, leading)
        if zeros.dtype == torch.float32:
            return torch.randn(zeros.shape, generator=generator)
        return torch.randint(2, zeros.shape, generator=generator).to(zeros.dtype)

    return TimeStep(
        step_type=torch.full(leading, step_type, dtype=torch.int32),
        reward=torch.randn(*leading, *algorithm.reward_spec.shape, generator=generator),
        discount=torch.ones(leading),
        observation=nest.map(draw, algorithm.observation_spec),
        prev_action=specs.zeros(algorithm.action_spec, leading),
        env_id=torch.arange(leading[-1], dtype=torch.int32).expand(leading),
    )


def _unroll(algorithm, length=T, num_envs=B, seed=0):
    """`[T+1, B]` of random rows that the algorithm acts in; column 0 is cut by an end in the middle."""
    torch.manual_seed(seed)
    rows = _time_step(algorithm, (length + 1, num_envs), seed=seed)
    if length >= 3:
        rows.step_type[1, 0], rows.step_type[2, 0] = StepType.LAST, StepType.FIRST
    initial = state = algorithm.initial_state(num_envs)
    steps = []
    with torch.no_grad():
        for t in range(length + 1):
            here = nest.map(lambda leaf, t=t: leaf[t], rows)
            steps.append(algorithm.rollout_step(here, reset_state(state, initial, here.step_type)))
            state = steps[-1].state
        action, info = nest.stack([(step.output, step.info) for step in steps])
    return Experience(rows, action, info, initial, torch.zeros(num_envs, dtype=torch.int64))


def _prepared(algorithm, experience):
    torch.manual_seed(0)
    with torch.no_grad():
        return algorithm.preprocess_experience(experience)


def _chunks(algorithm, experience, *settings):
    """What `EpochBatches(*settings)` makes of an unroll for this algorithm, without transforms."""
    settings = dict(zip(("num_epochs", "minibatch_size", "sequence_length"), settings))
    phasic = functools.partial(PhasicBatches, num_unrolls=1)  # a phase after each unroll
    source = (phasic if algorithm.unroll_use.has_auxiliary_phase else EpochBatches)(**settings)
    length, num_envs = trainable(experience.time_step.step_type).shape
    source.bind(algorithm, Transforms([], algorithm.observation_spec, algorithm.reward_spec), length, num_envs)
    source.add(experience)
    return source.chunks(0)


def _window(algorithm, length=3, num_windows=8, seed=0):
    """`[L, N]` of random rows, the first of which train; some episodes end within."""
    rows = _time_step(algorithm, (length, num_windows), seed=seed)
    rows.step_type[-1, ::2], rows.discount[-1, ::4] = StepType.LAST, 0
    rows.step_type[1, 1::4], rows.step_type[2:, 1::4] = StepType.LAST, StepType.FIRST
    torch.manual_seed(seed)
    count = length * num_windows
    action = nest.map(
        lambda leaf: leaf.view(length, num_windows, *leaf.shape[1:]), specs.sample(algorithm.action_spec, count)
    )
    needed = {"log_prob": torch.zeros(length, num_windows), "action": action}  # of an action, for Retrace
    info = {name: needed[name] for name in algorithm.replay_needs.info} or None
    returns = None if algorithm.replay_needs.return_gamma is None else torch.randn(length, num_windows)
    return Experience(rows, action, info, algorithm.initial_state(num_windows), return_to_go=returns)


def _replayed(experience, num_updates=1):
    size = experience.time_step.reward.shape[1]
    batch = Batch(experience, trainable(experience.time_step.step_type))
    return [Minibatches(batch, torch.arange(size).expand(num_updates, -1))]


def _train(algorithm, num_updates=1, **settings):
    learner = Learner(algorithm, **settings)
    for i in range(num_updates):
        learner.train(_chunks(algorithm, _unroll(algorithm, seed=i), 1))
    return learner


def _assert_actions(action, algorithm, leading):
    assert nest.paths(action) == nest.paths(algorithm.action_spec)
    for leaf, spec in zip(nest.leaves(action), nest.leaves(algorithm.action_spec)):
        assert leaf.shape == (*leading, *spec.shape)
        assert leaf.dtype == specs.torch_dtype(spec)
        if isinstance(spec, spaces.Discrete):
            assert ((leaf >= 0) & (leaf < int(spec.n))).all()


def test_the_shipped_algorithms_are_found_and_take_something():
    assert {"PPO", "A2C", "APPO", "PQN", "REPPO"} <= set(ON_POLICY)
    assert {"DQN", "SAC", "RecurrentSAC", "DDPG", "TD3", "TD3BC", "BC", "IQL"} <= set(OFF_POLICY)
    assert KINDS["BC"] == KINDS["IQL"] == list(SPACES)
    assert all(KINDS.values())
    assert all(KINDS[name] == list(SPACES) for name in ACTOR_CRITICS)


@anywhere
@pytest.mark.parametrize("size", [1, B])
def test_acting_returns_one_action_per_environment(name, kind, size):
    algorithm = _shared(name, kind)
    state = algorithm.initial_state(size)
    with torch.no_grad():
        for step in (algorithm.rollout_step, algorithm.predict_step):
            result = step(_time_step(algorithm, (size,)), state)
            assert isinstance(result, AlgStep)
            _assert_actions(result.output, algorithm, (size,))
            assert nest.paths(result.state) == nest.paths(state)
    for leaf in nest.leaves(algorithm.rollout_step(_time_step(algorithm, (size,)), state).info):
        assert leaf.shape[0] == size


@anywhere
def test_predicting_twice_gives_the_same_action(name, kind):
    algorithm = _shared(name, kind)
    row = _time_step(algorithm, (B,))
    actions = [algorithm.predict_step(row, algorithm.initial_state(B)).output for _ in range(2)]
    for a, b in zip(*map(nest.leaves, actions)):
        assert torch.equal(a, b)


@with_rewards
def test_preprocessing_keeps_the_rows_that_may_train(name, kind, num_rewards):
    algorithm = _shared(name, kind, num_rewards)
    prepared = _prepared(algorithm, _unroll(algorithm))
    for path, leaf in zip(nest.paths(prepared.info), nest.leaves(prepared.info)):
        assert leaf.shape[:2] in ((T, B), (T + 1, B)), path
        assert not leaf.requires_grad, path


@with_rewards
@pytest.mark.parametrize("merged", [False, True], ids=["[T, B]", "[1, N]"])
def test_a_loss_per_row_and_summaries_per_row(name, kind, num_rewards, merged):
    algorithm = _shared(name, kind, num_rewards)
    prepared = nest.map(lambda leaf: leaf[:T], _prepared(algorithm, _unroll(algorithm))._replace(policy_version=None))
    if merged:
        prepared = nest.merge_leading(prepared)
    leading = (1, T * B) if merged else (T, B)
    step = algorithm.train_step(prepared, None)
    for leaf in nest.leaves(step.info):
        assert leaf.shape[:2] == leading
    loss_info = algorithm.calc_loss(prepared, step.info)
    assert isinstance(loss_info, LossInfo)
    per_row = loss_info.loss if isinstance(loss_info.loss, dict) else {"": loss_info.loss}
    for loss in per_row.values():
        assert loss.shape == leading
        assert loss.dtype == torch.float32
        assert loss.requires_grad
    for key, value in (loss_info.extra or {}).items():
        assert value.shape in (leading, ()), key


@with_rewards
def test_a_whole_update_changes_the_parameters_and_stays_finite(name, kind, num_rewards):
    algorithm = _make(name, kind, num_rewards)
    _with_statistics(algorithm)
    before = {key: value.clone() for key, value in algorithm.named_parameters() if value.requires_grad}
    _train(algorithm, 2)
    assert all(torch.isfinite(value).all() for value in algorithm.parameters())
    parameters = dict(algorithm.named_parameters())
    unchanged = [key for key, value in before.items() if torch.equal(value, parameters[key])]
    assert unchanged == []


@from_replay
@pytest.mark.parametrize("length", [2, 3, 5])
def test_windows_give_a_loss_for_each_row_of_the_mask(name, kind, length):
    algorithm = _make(name, kind)
    experience = _window(algorithm, max(length, 3))
    rows = nest.map(lambda leaf: leaf[:length], experience._replace(state=None))
    experience = rows._replace(state=experience.state)
    for _ in range(2):  # delayed actors have their turn
        loss_info = algorithm.calc_loss(experience, algorithm.train_step(experience, None).info)
        per_row = loss_info.loss if isinstance(loss_info.loss, dict) else {"": loss_info.loss}
        num_rows = len(next(iter(per_row.values())))
        assert 1 <= num_rows <= length - 1
        for loss in per_row.values():
            assert loss.shape == (num_rows, 8)
            assert loss.dtype == torch.float32
            assert loss.requires_grad
        for key, value in (loss_info.extra or {}).items():
            assert value.shape in ((num_rows, 8), ()), key
        if loss_info.priority is not None:
            assert loss_info.priority.shape == (num_rows, 8)
        algorithm.after_update()


@from_replay
def test_updates_from_replay_change_the_parameters_and_stay_finite(name, kind):
    algorithm = _make(name, kind)
    before = {key: value.clone() for key, value in algorithm.named_parameters()}
    Learner(algorithm).train(_replayed(_window(algorithm), 2))
    assert all(torch.isfinite(value).all() for value in algorithm.parameters())
    trained = {key: value for key, value in algorithm.named_parameters() if value.requires_grad}
    assert [key for key, value in trained.items() if torch.equal(value, before[key])] == []


@from_replay
def test_values_outside_transitions_are_never_read(name, kind):
    """Row 0's reward and discount, those of FIRST rows, and the last row's action."""
    losses = []
    for garbage in (None, 1e6, float("nan")):
        algorithm = _make(name, kind)
        experience = _window(algorithm)
        if garbage is not None:
            step = experience.time_step
            unread = step.step_type == StepType.FIRST
            unread[0] = True
            reward, discount = (leaf.masked_fill(unread, garbage) for leaf in (step.reward, step.discount))
            experience = experience._replace(time_step=step._replace(reward=reward, discount=discount))
            for leaf in nest.leaves(experience.action):
                leaf[-1] = 0
        torch.manual_seed(0)
        values = Learner(algorithm).train(_replayed(experience, 2))
        losses.append({key: value for key, value in values.items() if key.startswith("loss")})
    assert losses[0] == losses[1] == losses[2] and losses[0]


@from_replay
def test_hooks_on_windows_change_no_attribute_or_experience(name, kind):
    algorithm = _make(name, kind)
    experience = _window(algorithm)
    rows, before = nest.map(torch.clone, experience), _attributes(algorithm)
    for _ in range(3):
        algorithm.calc_loss(experience, algorithm.train_step(experience, None).info)
    after = _attributes(algorithm)
    assert {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)} == set()
    assert all(torch.equal(was, leaf) for was, leaf in zip(nest.leaves(rows), nest.leaves(experience)))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_weighted_losses_are_of_groups_that_there_are(name):
    algorithm = _shared(name)
    assert set(algorithm.weighted_losses or ()) <= set(algorithm.parameter_groups())
    assert (algorithm.replay_needs.return_gamma is None) == (name != "CalQL")
    assert bool(algorithm.replay_needs.info) == ("Retrace" in name and name != "RetraceDQN")


@pytest.mark.parametrize("name", ACTOR_CRITICS)
def test_rows_of_a_batch_do_not_touch_one_another(name):
    """With as many rewards as environments, an alignment on the wrong side would mix columns."""
    algorithm = _make(name, "discrete", num_rewards=B)
    experience = _unroll(algorithm)
    other = experience._replace(
        time_step=experience.time_step._replace(
            reward=experience.time_step.reward.clone().index_fill_(1, torch.tensor([2]), 50.0)
        )
    )
    algorithm._normalize_advantage = False
    infos = [_prepared(algorithm, rows).info for rows in (experience, other)]
    assert torch.equal(infos[0].advantage[:, :2], infos[1].advantage[:, :2])
    assert torch.equal(infos[0].target[:, :2], infos[1].target[:, :2])
    assert not torch.equal(infos[0].target[:, 2], infos[1].target[:, 2])


@pytest.mark.parametrize("name", ON_POLICY)
@pytest.mark.parametrize("garbage", [1e6, float("nan")])
def test_reward_discount_and_action_of_first_rows_are_never_read(name, garbage):
    algorithm = _shared(name)
    experience = _unroll(algorithm)
    step = experience.time_step
    unread = step.step_type == StepType.FIRST
    unread[0] = True
    dirty = experience._replace(
        time_step=step._replace(
            reward=step.reward.masked_fill(unread, garbage),
            discount=step.discount.masked_fill(unread, garbage),
            prev_action=step.prev_action + 7,
        )
    )
    for a, b in zip(*(nest.leaves(_prepared(algorithm, rows).info) for rows in (experience, dirty))):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ON_POLICY)
def test_the_action_at_the_end_of_an_episode_is_never_trained(name):
    weights = []
    for action_at_last in (0, 2):
        algorithm = _make(name)
        experience = _unroll(algorithm)
        assert experience.time_step.step_type[1, 0] == StepType.LAST
        assert not trainable(experience.time_step.step_type)[1, 0]
        experience.action[1, 0] = action_at_last
        torch.manual_seed(0)
        Learner(algorithm).train(_chunks(algorithm, experience, 1 if algorithm.unroll_use.single_epoch else 3, 4))
        weights.append(torch.cat([value.detach().flatten() for value in algorithm.parameters()]))
    assert torch.equal(*weights)


@pytest.mark.parametrize("name", ACTOR_CRITICS)
def test_row_t_gives_its_value_and_is_not_trained(name):
    """The value of the last row's observation enters the targets; its action and reward-to-come do not exist."""
    algorithm = _make(name)
    experience = _unroll(algorithm, length=1)
    algorithm._normalize_advantage = False
    info = _prepared(algorithm, experience).info
    with torch.no_grad():
        value = algorithm.network.value(experience.time_step, None)
    expected = experience.time_step.reward[1] + 0.99 * value[1]
    torch.testing.assert_close(info.target[0], expected)
    torch.testing.assert_close(info.advantage[0], expected - value[0])


@pytest.mark.parametrize("name", ACTOR_CRITICS)
@pytest.mark.parametrize("kind", [StepType.LAST, StepType.MID], ids=["an episode", "a life"])
@pytest.mark.parametrize("discount", [1.0, 0.0], ids=["truncated", "terminated"])
def test_what_was_truncated_is_bootstrapped_and_what_terminated_is_not(name, discount, kind):
    algorithm = _make(name)
    experience = _unroll(algorithm, length=1)
    experience.time_step.step_type[1] = kind
    experience.time_step.discount[1] = discount
    with torch.no_grad():
        algorithm.network.value_head.bias.fill_(5.0)
        _with_statistics(algorithm)
        value = algorithm.network.value(experience.time_step, None)
    expected = experience.time_step.reward[1] + 0.99 * discount * value[1]
    torch.testing.assert_close(_prepared(algorithm, experience).info.target[0], expected)


@pytest.mark.parametrize("name", [name for name in ACTOR_CRITICS if name not in NEEDED])
def test_targets_carry_no_gradient(name):
    """The loss's slope with regard to each value is that of a regression to a constant.

    The loss of SymmetricPPO is the mean of two losses of PPO, see its own tests.
    """
    algorithm = _make(name)
    prepared = _prepared(algorithm, _unroll(algorithm))
    prepared = nest.map(lambda leaf: leaf[:T], prepared._replace(policy_version=None))
    step = algorithm.train_step(prepared, None)
    loss = algorithm.calc_loss(prepared, step.info).loss
    loss = loss["all"] if isinstance(loss, dict) else loss
    (slope,) = torch.autograd.grad(loss.sum(), step.info.value)
    expected = algorithm._value_coef * (step.info.value - prepared.info.target)
    torch.testing.assert_close(slope, expected.detach())


@functools.cache
def _with_learner(name, kind):
    """An algorithm in training, for tests that do not change it; a learner makes views of the parameters."""
    algorithm = _make(name, kind)
    algorithm.progress.fill_(0.25)
    Learner(algorithm)
    return algorithm


@anywhere
def test_state_dict_round_trip(name, kind):
    algorithm, other = _with_learner(name, kind), _make(name, kind, seed=1)
    other.load_state_dict(algorithm.state_dict())
    assert other.progress.item() == 0.25
    row = _time_step(algorithm, (B,))
    actions = [each.predict_step(row, each.initial_state(B)).output for each in (algorithm, other)]
    for a, b in zip(*map(nest.leaves, actions)):
        assert torch.equal(a, b)


@anywhere
def test_pickling_to_a_worker(name, kind):
    algorithm = _with_learner(name, kind)
    other = pickle.loads(pickle.dumps(algorithm))
    row = _time_step(algorithm, (B,))
    steps = []
    for each in (algorithm, other):
        torch.manual_seed(0)
        steps.append(nest.leaves(each.rollout_step(row, each.initial_state(B))))
    assert all(torch.equal(a, b) for a, b in zip(*steps))


def _attributes(algorithm):
    """Every attribute of every module, by identity and, where it is a tensor or a number, by value."""
    seen = {}
    for path, module in algorithm.named_modules():
        for key, value in vars(module).items():
            inside = value.items() if isinstance(value, dict) else [("", value)]
            for name, item in inside:
                if isinstance(item, torch.Tensor):
                    seen[path, key, name] = (id(item), item.detach().clone().tolist())
                elif isinstance(item, (int, float, str, tuple, list, type(None))):
                    seen[path, key, name] = repr(item)
                else:
                    seen[path, key, name] = id(item)
                    own = getattr(item, "__dict__", {}) if not isinstance(item, torch.nn.Module) else {}
                    seen[path, key, name, "inside"] = repr(sorted(own)) + repr(
                        [value for value in own.values() if isinstance(value, (int, float))]
                    )
    return seen


@anywhere
def test_acting_writes_no_attribute_and_counts_no_calls(name, kind):
    algorithm = _shared(name, kind)
    row, state = _time_step(algorithm, (B,)), algorithm.initial_state(B)
    before = _attributes(algorithm)
    for _ in range(5):
        state = algorithm.rollout_step(row, state).state
        algorithm.predict_step(row, state)
    after = _attributes(algorithm)
    assert {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)} == set()


@everywhere
def test_hooks_write_no_attribute_and_count_no_calls(name, kind):
    algorithm = _shared(name, kind)
    experience = _unroll(algorithm)
    row, state = _time_step(algorithm, (B,)), algorithm.initial_state(B)
    before = _attributes(algorithm)
    for _ in range(5):
        algorithm.rollout_step(row, state)
        algorithm.predict_step(row, state)
        prepared = nest.map(lambda leaf: leaf[:T], _prepared(algorithm, experience)._replace(policy_version=None))
        algorithm.calc_loss(prepared, algorithm.train_step(prepared, None).info)
    after = _attributes(algorithm)
    assert {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)} == set()


@everywhere
def test_hooks_edit_no_time_step_and_no_experience(name, kind):
    algorithm = _shared(name, kind)
    experience = _unroll(algorithm)
    before = nest.map(torch.clone, experience)
    prepared = nest.map(lambda leaf: leaf[:T], _prepared(algorithm, experience)._replace(policy_version=None))
    kept = nest.map(torch.clone, prepared)
    algorithm.calc_loss(prepared, algorithm.train_step(prepared, None).info)
    for was, leaf in zip(nest.leaves((before, kept)), nest.leaves((experience, prepared))):
        assert torch.equal(was, leaf)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_parameter_belongs_to_one_group(name):
    algorithm = _shared(name)
    claimed = [id(p) for group in algorithm.parameter_groups().values() for p in group if p.requires_grad]
    assert len(claimed) == len(set(claimed))
    assert set(claimed) == {id(p) for p in algorithm.parameters() if p.requires_grad}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithms_own_parameters_but_no_run_state(name):
    """Progress is its only counter, and travels with the weights."""
    algorithm = _shared(name)
    assert algorithm.progress.dtype == torch.float64
    assert "progress" in algorithm.state_dict()
    assert isinstance(algorithm.has_state, bool)


def test_who_corrects_for_rows_of_an_older_policy():
    assert [name for name in ALGORITHMS if _shared(name).unroll_use.handles_stale_policies] == [
        "APPO",
        "NormalizedReturnsAPPO",
    ]


@pytest.mark.parametrize("name", ON_POLICY)
def test_padding_may_hold_anything(name):
    """An uneven column ends in rows of zeros; whatever is computed from them must not reach a parameter."""
    weights = []
    for filler in (0.0, 1e4):
        algorithm = _make(name)
        experience = _unroll(algorithm)
        step = experience.time_step
        step.step_type[3:, 2] = StepType.PAD
        for leaf in (step.reward, step.observation):
            leaf[3:, 2] = filler
        torch.manual_seed(0)
        Learner(algorithm).train(_chunks(algorithm, experience, 1 if algorithm.unroll_use.single_epoch else 2, 6))
        weights.append(torch.cat([value.detach().flatten() for value in algorithm.parameters()]))
    torch.testing.assert_close(*weights, atol=1e-6, rtol=1e-6)
